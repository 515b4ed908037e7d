"""The executor of the virtual clock: it computes how long a batch would take, and no tokens.

Knows a model's shape, a machine and, if given, a measured profile; knows nothing of policies, queues or clocks. The
scheduler's own time is part of the modelled overhead, never measured. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.framework.cost.coefficients import Coefficients, DecodeCost, Rates, shares_ns
from schedlab.framework.cost.estimate import largest
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import ModelShape, Roofline, windowed_context
from schedlab.framework.cost.windows import attention_reach
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import StepResult, check_duration

if TYPE_CHECKING:
    from schedlab.framework.batch import Batch
    from schedlab.framework.cost.fit import Profile
    from schedlab.framework.request import EngineRequest

GIB = 1 << 30


class CostExecutor:
    """Durations from the roofline of `model` on `hardware`, or from a `profile` measured on it.

    `jumpable`: the cost of a decode step depends on the sum of contexts alone, so `decode_cost` may stand for
    `execute`; under a sliding window it depends on each length, and every step must be executed. `bound` is judged by
    the roofline: what a measured duration takes beyond it counts as overhead. `max_num_batched_tokens` and
    `max_num_seqs` size the activations. ConfigError for what the model, hardware or profile cannot do.
    """

    needs_inputs = False
    chains = True
    eos_token_ids = tuple[int, ...]()

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        *,
        weight_dtype: str = "bf16",
        kv_cache_dtype: str = "auto",
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        gpu_memory_utilization: float = 0.9,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        profile: Profile | str | Path | None = None,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization: expected a share in (0, 1], found {gpu_memory_utilization}")
        self.roofline = Roofline(model, weight_dtype, kv_cache_dtype, tensor_parallel, expert_parallel)
        self.hardware = hardware
        self.scheduler_us = hardware.scheduler_us  # part of every modelled step, with its share a request on top
        self.vocab_size = model.vocab_size
        self.window = self.roofline.window
        self.jumpable = self.window is None
        self.explained = Coefficients.from_roofline(self.roofline, hardware)
        self.coefficients = self.explained
        self.profile = _loaded(profile)
        if self.profile is not None:
            self.coefficients = self.profile.coefficients_for(self.roofline, hardware)
        self._activations = self.roofline.activation_bytes(max_num_batched_tokens, max_num_seqs)
        self._utilization = gpu_memory_utilization
        self._block_bytes = 0
        self._decode_costs: dict[int, DecodeCost] = {}
        self._rated: Coefficients | None = None  # whose rates these are
        self._rates: Rates = ()

    def use_rates(self, rates: Mapping[str, Mapping[str, Any]]) -> None:
        """Charge what a run's manifest says that it charged (`expand.rates_of`), wherever that came from."""
        self.coefficients = Coefficients(**rates["coefficients"])
        self.explained = Coefficients(**rates["explained"])
        self._decode_costs.clear()

    # ---- memory ----

    def block_bytes(self, block_size: int) -> int:
        """Bytes of keys and values in one block over all layers, on one device."""
        return block_size * self.roofline.kv_bytes_per_token

    def cache_bytes(self) -> int:
        """Bytes of one device left for the KV cache. ConfigError if weights and activations alone exceed its share."""
        share = int(self.hardware.memory_bytes * self._utilization)
        weights = self.roofline.weight_bytes
        left = share - weights - self._activations
        if left <= 0:
            raise ConfigError(
                f"model does not fit on hardware={self.hardware.name}: {weights / GIB:.1f} GiB of weights and "
                f"{self._activations / GIB:.1f} GiB of activations exceed {self._utilization:g} of "
                f"{self.hardware.memory_bytes / GIB:.1f} GiB by {-left / GIB:.1f} GiB; raise tensor_parallel "
                f"({self.roofline.tensor_parallel}) or narrow weight_dtype ({self.roofline.weight_dtype})"
            )
        return left

    def kv_blocks(self, block_size: int, max_model_len: int) -> int:
        """Blocks that fit beside weights and activations. ConfigError unless one request of `max_model_len` fits."""
        left = self.cache_bytes()
        blocks = left // self.block_bytes(block_size)
        needed = -(-max_model_len // block_size)
        if blocks < needed:
            short = needed * self.block_bytes(block_size) - left
            raise ConfigError(
                f"max_model_len: {max_model_len} tokens need {short / GIB:.1f} GiB more KV cache than hardware="
                f"{self.hardware.name} has left ({left / GIB:.1f} GiB); expected at most {blocks * block_size}"
            )
        return blocks

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        """Takes the sizes; ConfigError if the blocks do not fit beside the weights."""
        self._block_bytes = self.block_bytes(block_size)
        left, needed = self.cache_bytes(), num_blocks * self._block_bytes
        if needed > left:
            raise ConfigError(
                f"num_blocks: {num_blocks} blocks of {block_size} exceed the {left / GIB:.1f} GiB that hardware="
                f"{self.hardware.name} has left for them by {(needed - left) / GIB:.1f} GiB"
            )

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    # ---- time ----

    def decode_cost(self, num_decodes: int) -> DecodeCost:
        """The cost of a step of `num_decodes` decodes and nothing else; the same object for the same number."""
        cost = self._decode_costs.get(num_decodes)
        if cost is None:
            cost = DecodeCost(self.coefficients, self.explained, num_decodes)
            self._decode_costs[num_decodes] = cost
        return cost

    def execute(self, batch: Batch) -> StepResult:
        """Duration and bound of `batch`; it computes no tokens."""
        if batch.prefills or batch.copies_out or batch.copies_in or not self.jumpable:
            return self._mixed(batch) if batch.steps == 1 else self._windowed_chain(batch)
        cost = self._decode_costs.get(len(batch.decodes)) or self.decode_cost(len(batch.decodes))
        context = batch.decode_context
        if batch.steps > 1:
            return StepResult(cost.chain_ns(context, len(batch.decodes), batch.steps), None, cost.bound(context))
        return StepResult(cost.duration_ns(context), None, cost.bound(context))

    def _windowed_chain(self, batch: Batch) -> StepResult:
        """A chain of decodes that each see a window: the lengths of every step count."""
        assert self.window is not None and not batch.prefills, "only decodes are chained"
        cost = self.decode_cost(len(batch.decodes))
        first, *others = (windowed_context(batch, self.window, ahead) for ahead in range(batch.steps))
        further = sum((cost.further + cost.slope * context) >> cost.shift for context in others)
        return StepResult(cost.duration_ns(first) + further, None, cost.bound(first))

    def _mixed(self, batch: Batch) -> StepResult:
        """A step that is more than decodes, or whose decodes see a window."""
        decodes, prefills, window = len(batch.decodes), len(batch.prefills), self.window
        context = batch.decode_context if window is None else windowed_context(batch, window)
        rows, pairs, keys, tokens = decodes, 0, 0, decodes + batch.prefill_tokens
        for request, start, count in batch.prefills:
            more_pairs, more_keys = attention_reach(start, count, window)
            if count == 1:
                context += more_pairs
                decodes += 1
                prefills -= 1
            else:
                pairs += more_pairs
                keys += more_keys
            if start + count == request.num_tokens:
                rows += 1
        copied = (len(batch.copies_out) + len(batch.copies_in)) * self._block_bytes
        explained = self.explained
        read_ns = explained.experts_read_ns(tokens) if explained.num_experts and tokens else 0.0
        compute, memory, overhead = shares_ns(
            self._rates_of(explained), tokens, rows, decodes, prefills, pairs, keys, context, copied, read_ns
        )
        total = compute + memory + overhead
        if self.coefficients is not self.explained:
            charged = self.coefficients.shares_ns(tokens, rows, decodes, prefills, pairs, keys, context, copied)
            total = sum(charged)
        check_duration(total)
        return StepResult(round(total), None, largest(compute, memory, total - compute - memory))

    def _rates_of(self, explained: Coefficients) -> Rates:
        if self._rated is not explained:
            self._rated, self._rates = explained, explained.rates
        return self._rates


def _loaded(profile: Profile | str | Path | None) -> Profile | None:
    if not isinstance(profile, (str, Path)):
        return profile
    from schedlab.framework.cost.fit import Profile

    return Profile.load(profile)
