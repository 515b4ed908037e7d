"""The executor of real tokens: a decoder, its paged KV memory and host pool, and seeded sampling.

Knows how to run one batch's inputs and which request failed in it; knows nothing of scheduling, and takes blocks, slots
and lengths as they are given.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from schedlab.framework.batch import Batch, Inputs
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import StepResult
from schedlab.framework.model.backend import Backend, backend_for
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.decoder import Decoder, KVCache
from schedlab.framework.model.graphs import DecodeGraphs, Recorder
from schedlab.framework.model.linear import headless
from schedlab.framework.model.memory import available_bytes, keep_freed_memory, readable
from schedlab.framework.model.phases import all_generated
from schedlab.framework.model.sampling import sampling_tensors
from schedlab.framework.model.stopwatch import stopwatch
from schedlab.framework.model.tensor_parallel import Group, Shard
from schedlab.framework.model.weights import CPU, Weights, all_but_matrices_on, load_weights, random_weights
from schedlab.framework.request import EngineRequest
from schedlab.kernels.torch_invariant import ROW_TILE

DECODE_SPLIT = 512
"""Keys whose partial result a decode keeps in float32 until the splits are combined."""
BlockPairs: TypeAlias = list[tuple[int, int]]
"""From which block to which."""
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class ModelExecutor:
    """Runs a model of shape `config` with the weights in `path`, or with random ones drawn from `seed`.

    `dtype` is what weights and KV cache are held in; norms, rotation, softmax and logits are float32 at least, and on a
    CPU all that lies between the products. `weight_dtype` (bf16, int8, int4) is another type for the weights: of
    integers, those of the layers' matrices, the rest then being read as bfloat16. `kernels`, for CPUs: "native" are the
    compiled ones, "torch" needs no compiler, "auto" takes the former where they are built. `num_threads` sets torch's
    threads for the whole process, as it sets what becomes of freed memory. `sampling_seed` seeds requests that bring no
    seed. `batch_invariant`: the same bits for a request in any batch and under any chunking, at a price in speed.
    `recorder`: how steps of decodes are recorded, padded to a few sizes, to be replayed; None runs each as it comes.
    `max_model_len` bounds their block tables. `weights` stand for `path` and `seed`, `backend` for the device's own.
    `group`: this is one rank's share of the model, which only rank 0's logits are read of. Durations are the device's.
    """

    needs_inputs = True
    chains = True

    def __init__(
        self,
        config: ModelConfig,
        *,
        path: str | Path | None = None,
        dtype: str = "float32",
        seed: int = 0,
        sampling_seed: int = 0,
        num_threads: int = 1,
        device: str = "cpu",
        batch_invariant: bool = False,
        recorder: Recorder | None = None,
        max_model_len: int | None = None,
        weights: Weights | None = None,
        kernels: str = "auto",
        weight_dtype: str | None = None,
        backend: Backend | None = None,
        group: Group | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"engine.dtype: expected one of {', '.join(DTYPES)}, found {dtype}")
        if batch_invariant and device == "cpu" and ROW_TILE % num_threads:
            raise ConfigError(
                f"engine.num_threads: expected to divide {ROW_TILE} in batch-invariant mode, found {num_threads}"
            )
        if (modelled := config.virtual_only()) is not None:
            key, expected = modelled
            found, said = getattr(config, key), "null" if expected is None else expected
            raise ConfigError(
                f"model.{key}: expected {said} on engines that compute, found {found}; engine=virtual models it"
            )
        if config.num_experts and device != "cpu":
            raise ConfigError(
                f"model.num_experts: expected 0 on {device} (engine=cpu runs experts, engine=virtual models them), "
                f"found {config.num_experts}"
            )
        torch.set_num_threads(num_threads)
        if device == "cpu":
            keep_freed_memory()
        self.config = config if group is None else group.shard.config(config)
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self._dtype: torch.dtype = DTYPES[dtype]
        self._device = torch.device(device)
        self.adjacent_blocks = self._device.type == "cpu"
        self._sampling_seed = sampling_seed
        self._backend = backend or backend_for(
            self._device, self._dtype, batch_invariant=batch_invariant, choice=kernels, weight_dtype=weight_dtype
        )
        if weights is None:
            weights = self._weights(config, path, seed, weight_dtype, None if group is None else group.shard)
        if self._backend.staged:
            weights = all_but_matrices_on(self._device, weights)
        self._decoder = Decoder(
            self.config, weights, self._backend.kernels, self._backend.linear,
            head=self._backend.head if group is None or group.shard.rank == 0 else headless,
            router=self._backend.router, activations=self._backend.activations,
            reduce=None if group is None else group.sum,
        )  # fmt: skip
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what packing took is room for the KV cache
        self._recorder = recorder
        self._graphs: DecodeGraphs | None = None
        self._max_model_len = max_model_len or config.max_position_embeddings
        self._stopwatch = stopwatch(self._device)
        self._block_size = 0
        self._kv = torch.empty(0)
        self._host_kv = torch.empty(0)
        self.kv_caches: list[KVCache] = []

    @property
    def kernels(self) -> str:
        """The implementation that runs, as dispatch.py names it."""
        return self._backend.kernels.name

    def _weights(
        self, config: ModelConfig, path: str | Path | None, seed: int, weight_dtype: str | None, shard: Shard | None
    ) -> Weights:
        """Those of the whole model that are this rank's."""
        count = config.num_parameters() if shard is None else shard.num_parameters(config)
        dtype = self._backend.weights or self._dtype
        place = CPU if self._backend.staged else self._device
        if self._backend.staged:
            needed = Roofline(self.config, weight_dtype or "bf16").weight_bytes
            if self._dtype is not torch.bfloat16:  # logits then have a head of their own in the activations' type
                needed += self.config.vocab_size * self.config.hidden_size * self._dtype.itemsize
            self._require(needed, f"model: {count:,} parameters in {weight_dtype} need", self._device)
        where = " of the host's memory, to be taken to the device from there" if self._backend.staged else ""
        self._require(count * dtype.itemsize, f"model: {count:,} parameters in {str(dtype)[6:]} need", place, where)
        keep = None if shard is None else partial(shard.layer, config)
        if path is None:
            return random_weights(config, seed, dtype, place, draw_on=self._device, keep=keep)
        return load_weights(config, path, dtype, place, keep=keep)

    def _require(self, needed: int, said: str, place: torch.device, where: str = "") -> None:
        if needed > (available := available_bytes(place)):
            raise ConfigError(f"{said} {readable(needed)}{where}, found {readable(available)} available")

    def step_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """The most that a step keeps besides weights and cache: activations, logits, and the splits of long decodes."""
        config, itemsize = self.config, self._dtype.itemsize
        inner = max(config.intermediate_size, config.moe_intermediate_size * config.num_experts_per_tok)
        widest = 3 * inner + 2 * config.hidden_size + config.q_size + 2 * config.kv_size
        splits = -(-self._max_model_len // DECODE_SPLIT) * config.q_size * 4
        return max_num_batched_tokens * widest * itemsize + max_num_seqs * (3 * 4 * config.vocab_size + 2 * splits)

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        """Reserve [layers, K and V, blocks, block_size, Hkv, D] on the device, and as much for the host's blocks."""
        self.release()
        self._require_blocks(num_blocks, num_host_blocks, block_size)
        config = self.config
        self._block_size = block_size
        row = (block_size, config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, 2)
        self._kv = torch.empty((*shape, num_blocks, *row), dtype=self._dtype, device=self._device)
        pinned = self._device.type == "cuda" and num_host_blocks > 0
        self._host_kv = torch.empty((*shape, num_host_blocks, *row), dtype=self._dtype, pin_memory=pinned)
        self.kv_caches = [(layer[0], layer[1]) for layer in self._kv]
        if self._device.type == "cuda":
            self.warm_up()
        if self._recorder is not None:
            self._graphs = DecodeGraphs(
                self._decoder, self._backend.kernels, self.kv_caches, self._device, max_num_seqs=max_num_seqs,
                max_blocks=min(-(-self._max_model_len // block_size), num_blocks), recorder=self._recorder,
            )  # fmt: skip

    def _require_blocks(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        """On a CPU both kinds lie in one memory."""
        block_bytes, blocks = self.block_bytes(block_size), f"{num_blocks} blocks"
        of_size = f"of {block_size} tokens need"
        if self._device.type == "cpu":
            blocks, num_blocks = f"{blocks} and {num_host_blocks} host blocks", num_blocks + num_host_blocks
        elif num_host_blocks:
            said = f"engine.swap_space_gib: {num_host_blocks} host blocks {of_size}"
            self._require(num_host_blocks * block_bytes, said, CPU, " of the host's memory")
        self._require(num_blocks * block_bytes, f"engine.num_blocks: {blocks} {of_size}", self._device)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run prompts and decodes that write nothing, so that a run neither compiles kernels nor loads libraries."""
        for rows in self._backend.row_classes:
            self._draw(self._nothing(max(rows - 1, 2)))

    def _nothing(self, length: int) -> Inputs:
        """A prompt of `length` and a decode, at position 0 all of them."""
        prompt, decode = (EngineRequest(f"warm-up {n}", 0, n, TokenContent([0] * n)) for n in (length, 1))
        rows = length + 1
        return Inputs(
            token_ids_T=np.zeros(rows, dtype=np.int64), positions_T=np.zeros(rows, dtype=np.int64),
            slots_T=np.full(rows, -1), query_starts_N1=np.array([0, length, rows]),
            context_lens_N=np.array([length, 2]), rows_N=np.array([0, 1]),
            block_tables_NB=np.zeros((2, -(-length // self._block_size)), dtype=np.int64), emitting_S=np.array([0, 1]),
            output_positions_S=np.array([length, 2]), requests=[prompt, decode],
        )  # fmt: skip

    def release(self) -> None:
        """Give back what an engine was given. Another can be given as much."""
        self._graphs, self.kv_caches = None, []
        self._kv = self._host_kv = torch.empty(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def block_bytes(self, block_size: int) -> int:
        return block_size * 2 * self.config.num_hidden_layers * self.config.kv_size * self._dtype.itemsize

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        self._stopwatch.start()
        self.copy_blocks(batch.copies_out, batch.copies_in)
        inputs = batch.inputs
        if inputs is None or not inputs.requests:
            self._stopwatch.stop()
            return self._result(np.empty((0, 1), dtype=np.int64), {})
        on_device_SK = self._run(inputs, batch.steps)
        self._stopwatch.stop()
        drawn_SK = on_device_SK.cpu().numpy()  # the one wait for the device in a step
        tokens_NK = np.full((len(inputs.requests), batch.steps), -1, dtype=np.int64)
        tokens_NK[inputs.emitting_S] = drawn_SK
        return self._result(tokens_NK, _failed(inputs, drawn_SK))

    def copy_blocks(self, copies_out: BlockPairs, copies_in: BlockPairs) -> None:
        """From device to host, then from host to device."""
        _copy(self._kv, self._host_kv, copies_out)
        _copy(self._host_kv, self._kv, copies_in)

    def _result(self, tokens_NK: np.ndarray, failed: dict[int, str]) -> StepResult:
        took_ns = self._stopwatch.elapsed_ns()
        return StepResult(took_ns, tokens_NK, failed=failed, device_us=took_ns / 1000)

    def logits(self, inputs: Inputs) -> Tensor:
        """Run the model on `inputs`: logits [S, V] of the emitting grants. Keys and values go to their slots."""
        return self._decoder.forward(self._backend.ragged(inputs, self._device), self.kv_caches)

    def _run(self, inputs: Inputs, steps: int) -> Tensor:
        """Tokens [S, steps] drawn by `inputs` and by the steps of decodes that follow from them, on the device."""
        if self._graphs is not None and all_generated(inputs):
            return self._graphs.run(inputs, steps, self._sampling_seed)
        drawn = [self._draw(inputs)]
        for _ in range(steps - 1):
            inputs = inputs.following(drawn[-1].cpu().numpy(), self._block_size)
            drawn.append(self._draw(inputs))
        return torch.stack(drawn, dim=1)

    def _draw(self, inputs: Inputs) -> Tensor:
        sampling = sampling_tensors(inputs, self._sampling_seed, self._device)
        tokens_S: Tensor = self._backend.kernels.sample(self.logits(inputs), *sampling)
        return tokens_S


def _failed(inputs: Inputs, drawn_SK: np.ndarray) -> dict[int, str]:
    """The grants that did not draw a token in every step, and why."""
    missing_SK = drawn_SK < 0
    rows_F = np.flatnonzero(missing_SK.any(axis=1))
    positions_F = inputs.output_positions_S[rows_F] + missing_SK[rows_F].argmax(axis=1)
    grants_F = inputs.emitting_S[rows_F]
    return {
        grant: f"logits at position {position} are not finite"
        for grant, position in zip(grants_F.tolist(), positions_F.tolist(), strict=True)
    }


def _copy(source: Tensor, target: Tensor, pairs: BlockPairs) -> None:
    if pairs:
        from_blocks, to_blocks = torch.tensor(pairs).unbind(1)
        copied = source.index_select(2, from_blocks.to(source.device))
        target.index_copy_(2, to_blocks.to(target.device), copied.to(target.device))
