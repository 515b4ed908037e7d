"""The executor of real tokens: a decoder, its paged KV memory and host pool, and seeded sampling.

Knows how to run one batch's inputs and which request failed in it; knows nothing of scheduling, and takes blocks, slots
and lengths as they are given.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from schedlab.framework.batch import Batch, Inputs
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import StepResult
from schedlab.framework.model.arithmetic import arithmetic
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.decoder import Decoder, KVCache, RaggedBatch
from schedlab.framework.model.memory import available_bytes, readable
from schedlab.framework.model.sampling import sampling_tensors
from schedlab.framework.model.weights import Weights, load_weights, random_weights
from schedlab.framework.request import EngineRequest
from schedlab.kernels.torch_invariant import ROW_TILE

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class ModelExecutor:
    """Runs a model of shape `config` with the weights in `path`, or with random ones drawn from `seed`.

    `dtype` is what weights and KV cache are held in; norms, rotation, softmax and logits are float32 at least, and on a
    CPU all that lies between the products. `weight_dtype` (bf16, int8, int4) is another type for the weights: of
    integers, those of the layers' matrices, the rest then being bfloat16. `kernels`: "native" are the compiled ones,
    "torch" needs no compiler, "auto" takes the former where they are built. `num_threads` sets torch's threads for the
    whole process. `sampling_seed` seeds requests that bring no seed. `batch_invariant`: the same bits for a request in
    any batch and under any chunking, at a price in speed.
    """

    needs_inputs = True

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
        kernels: str = "auto",
        weight_dtype: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype: expected one of {', '.join(DTYPES)}, found {dtype}")
        if batch_invariant and device != "cpu":
            raise ConfigError(f"engine.batch_invariant: expected false on {device}; it is made for the cpu")
        if batch_invariant and ROW_TILE % num_threads:
            raise ConfigError(
                f"engine.num_threads: expected to divide {ROW_TILE} in batch-invariant mode, found {num_threads}"
            )
        torch.set_num_threads(num_threads)
        self.config = config
        self.vocab_size = config.vocab_size
        self.eos_token_ids = config.eos_token_ids
        self._dtype: torch.dtype = DTYPES[dtype]
        self._device = torch.device(device)
        self._sampling_seed = sampling_seed
        self._arithmetic = arithmetic(
            self._device, self._dtype, batch_invariant=batch_invariant, choice=kernels, weight_dtype=weight_dtype
        )
        self._decoder = Decoder(config, self._weights(path, seed), self._arithmetic)
        self._kv = torch.empty(0)
        self._host_kv = torch.empty(0)
        self.kv_caches: list[KVCache] = []

    def _weights(self, path: str | Path | None, seed: int) -> Weights:
        count, dtype = self.config.num_parameters(), self._arithmetic.weights
        self._require(count * dtype.itemsize, f"model: {count:,} parameters in {str(dtype)[6:]} need")
        if path is None:
            return random_weights(self.config, seed, dtype, self._device)
        return load_weights(self.config, path, dtype, self._device)

    def _require(self, needed: int, said: str) -> None:
        if needed > (available := available_bytes(self._device)):
            raise ConfigError(f"{said} {readable(needed)}, found {readable(available)} available")

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        """Reserve [layers, K and V, blocks, block_size, Hkv, D] on the device, and as much for the host's blocks."""
        needed = (num_blocks + num_host_blocks) * self.block_bytes(block_size)
        blocks = f"{num_blocks} blocks and {num_host_blocks} host blocks"
        self._require(needed, f"engine.num_blocks: {blocks} of {block_size} tokens need")
        config = self.config
        row = (block_size, config.num_key_value_heads, config.head_dim)
        shape = (config.num_hidden_layers, 2)
        self._kv = torch.empty((*shape, num_blocks, *row), dtype=self._dtype, device=self._device)
        self._host_kv = torch.empty((*shape, num_host_blocks, *row), dtype=self._dtype)
        self.kv_caches = [(layer[0], layer[1]) for layer in self._kv]

    def block_bytes(self, block_size: int) -> int:
        return block_size * 2 * self.config.num_hidden_layers * self.config.kv_size * self._dtype.itemsize

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        began = time.perf_counter_ns()
        _copy(self._kv, self._host_kv, batch.copies_out)
        _copy(self._host_kv, self._kv, batch.copies_in)
        failed: dict[int, str] = {}
        tokens = np.empty((0, 1), dtype=np.int64)
        if batch.inputs is not None and batch.inputs.requests:
            tokens = self._compute(batch.inputs, failed)
        return StepResult(time.perf_counter_ns() - began, tokens, failed=failed)

    def logits(self, inputs: Inputs) -> Tensor:
        """Run the model on `inputs`: logits [S, V] of the emitting grants. Keys and values go to their slots."""
        return self._decoder.forward(RaggedBatch.of(inputs, self._device), self.kv_caches)

    def _compute(self, inputs: Inputs, failed: dict[int, str]) -> np.ndarray:
        tokens_N1 = np.full((len(inputs.requests), 1), -1, dtype=np.int64)
        logits_SV = self.logits(inputs)
        sampling = sampling_tensors(inputs, self._sampling_seed, self._device)
        drawn_S = self._arithmetic.kernels.sample(logits_SV, *sampling).cpu()
        tokens_N1[inputs.emitting_S, 0] = drawn_S.numpy()
        for grant, position in zip(inputs.emitting_S.tolist(), inputs.output_positions_S.tolist(), strict=True):
            if tokens_N1[grant, 0] < 0:
                failed[grant] = f"logits at position {position} are not finite"
        return tokens_N1


def _copy(source: Tensor, target: Tensor, pairs: list[tuple[int, int]]) -> None:
    if pairs:
        from_blocks, to_blocks = torch.tensor(pairs).unbind(1)
        copied = source.index_select(2, from_blocks.to(source.device))
        target.index_copy_(2, to_blocks.to(target.device), copied.to(target.device))
