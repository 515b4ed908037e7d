"""Decode steps at fixed addresses and of few sizes, so that a CUDA graph of one serves every later batch.

A step is padded to the next size: rows beyond the batch have context 0, so they attend nothing, and slot -1, so they
write nothing. Its inputs are one packed buffer, filled by one copy; lengths are read on the device, and each step
leaves the inputs of the next one, so that a chain is replayed without the host. The step is an ordinary function:
captured on a GPU, called as it is elsewhere. Knows nothing of scheduling. Shape letters: N rows of a size, B blocks of
the widest table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schedlab.framework.batch import Inputs
from schedlab.framework.model.decoder import Decoder, KVCache, RaggedBatch, Span
from schedlab.framework.model.sampling import sampling_arrays
from schedlab.kernels.dispatch import Kernels

Run = Callable[[], None]
Recorder = Callable[[list[Run]], list[Run]]
"""From the steps of one engine to what repeats each."""

FIELDS = {
    "token_ids": np.int64, "positions": np.int64, "contexts": np.int64, "seeds": np.int64, "top_ks": np.int64,
    "temperatures": np.float64, "top_ps": np.float64,
}  # fmt: skip
"""What a step needs of each row besides its block table; all of one width, tables after them."""
ROW_BYTES = 8


def sizes_up_to(most: int) -> tuple[int, ...]:
    """The batch sizes that are captured: powers of two below `most`, and `most` itself."""
    return (*(1 << power for power in range((most - 1).bit_length())), most)


class Packed:
    """The inputs of a step of `size` rows in one buffer of bytes, and views of its fields."""

    def __init__(self, size: int, width: int, device: torch.device, *, pinned: bool = False) -> None:
        rows = len(FIELDS) * size * ROW_BYTES
        self.bytes = torch.zeros(rows + 4 * size * width, dtype=torch.uint8, device=device, pin_memory=pinned)
        fields = self.bytes[:rows].view(len(FIELDS), size * ROW_BYTES)
        self.of = {
            name: row.view(torch.int64 if dtype is np.int64 else torch.float64)
            for (name, dtype), row in zip(FIELDS.items(), fields, strict=True)
        }
        self.tables_NB = self.bytes[rows:].view(torch.int32).view(size, width)


class PaddedDecode:
    """A decode step of up to `size` sequences of up to `width` blocks over static buffers.

    `step` computes what the buffers say, leaves the drawn tokens in `drawn_N` (-1: logits that are not finite), and
    moves the buffers on to the step after it. It allocates nothing but temporaries and never waits for the device.
    """

    def __init__(
        self,
        size: int,
        width: int,
        decoder: Decoder,
        kernels: Kernels,
        kv_caches: list[KVCache],
        device: torch.device,
    ) -> None:
        self.size = size
        self._decoder = decoder
        self._kernels = kernels
        self._kv_caches = kv_caches
        self._block_size = kv_caches[0][0].shape[1]
        self.capacity = width * self._block_size
        self._host = Packed(size, width, torch.device("cpu"), pinned=device.type == "cuda")
        self._device = Packed(size, width, device)
        self._filled = {name: field.numpy() for name, field in self._host.of.items()}
        self._filled_tables_NB = self._host.tables_NB.numpy()
        self.drawn_N = torch.empty(size, dtype=torch.int64, device=device)
        counting_N1 = torch.arange(size + 1, device=device)
        self._every_row_N = counting_N1[:-1]
        self._span = Span(
            decode=True, rows=slice(0, size), query_starts_N1=counting_N1,
            context_lens_N=self._device.of["contexts"], block_tables_NB=self._device.tables_NB,
        )  # fmt: skip

    def load(self, inputs: Inputs, steps: int, sampling_seed: int) -> None:
        """The inputs of the first of `steps`, by one copy: the device's next work waits for it, the host does not."""
        count = len(inputs.requests)
        assert inputs.context_lens_N.max() + steps - 1 <= self.capacity, "a sequence outgrows the recorded tables"
        values = (
            inputs.token_ids_T, inputs.positions_T, inputs.context_lens_N, *sampling_arrays(inputs, sampling_seed)
        )  # fmt: skip
        for filled_N, array_N in zip(self._filled.values(), values, strict=True):
            filled_N[:count] = array_N
            filled_N[count:] = 0
        used = min(inputs.block_tables_NB.shape[1], self._filled_tables_NB.shape[1])
        self._filled_tables_NB[:count, :used] = inputs.block_tables_NB[:, :used]
        self._device.bytes.copy_(self._host.bytes, non_blocking=True)

    def step(self) -> None:
        rows, tables_NB, size = self._device.of, self._device.tables_NB, self._block_size
        positions_N, contexts_N = rows["positions"], rows["contexts"]
        live_N = contexts_N > 0
        blocks_N = tables_NB.gather(1, (positions_N // size)[:, None]).squeeze(1)
        slots_N = torch.where(live_N, blocks_N * size + positions_N % size, -1)
        batch = RaggedBatch(rows["token_ids"], positions_N, slots_N, self._every_row_N, (self._span,))
        logits_NV = self._decoder.forward(batch, self._kv_caches)
        drawn_N = self._kernels.sample(
            logits_NV, rows["temperatures"], rows["top_ks"], rows["top_ps"], rows["seeds"], contexts_N
        )
        self.drawn_N.copy_(drawn_N)
        rows["token_ids"].copy_(drawn_N.clamp_min(0))
        positions_N += live_N
        contexts_N += live_N


class DecodeGraphs:
    """Recorded decode steps of a few sizes; a batch runs by the smallest that holds it.

    `max_blocks` is the widest block table. All sizes are recorded here, before the first batch, with rows that attend
    and write nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        kv_caches: list[KVCache],
        device: torch.device,
        *,
        max_num_seqs: int,
        max_blocks: int,
        recorder: Recorder,
    ) -> None:
        self.sizes = sizes_up_to(max_num_seqs)
        steps = [PaddedDecode(size, max_blocks, decoder, kernels, kv_caches, device) for size in reversed(self.sizes)]
        runs = recorder([step.step for step in steps])  # the largest first sizes the pool
        self._recorded = {step.size: (step, run) for step, run in zip(steps, runs, strict=True)}

    @torch.inference_mode()
    def run(self, inputs: Inputs, steps: int, sampling_seed: int) -> Tensor:
        """Tokens [N, steps] on the device, for which nothing has waited yet; -1 where logits were not finite."""
        count = len(inputs.requests)
        padded, replay = self._recorded[next(size for size in self.sizes if size >= count)]
        padded.load(inputs, steps, sampling_seed)
        drawn = []
        for _ in range(steps):
            replay()
            drawn.append(padded.drawn_N[:count].clone())
        return torch.stack(drawn, dim=1)


def called(steps: list[Run]) -> list[Run]:
    """A recorder for devices without graphs: the steps themselves."""
    return steps


class CudaGraphRecorder:
    """Captures steps as CUDA graphs in one memory pool, as they never run at the same time.

    Pool and stream are each engine's own: what an earlier engine captured may be gone, and its pool and the libraries'
    workspaces for its stream with it.
    """

    WARM_UPS = 2
    """Calls before the capture, which compile kernels and let libraries allocate what they keep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, steps: list[Run]) -> list[Run]:
        with torch.inference_mode(), torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle()
            return [self._captured(step, stream, pool) for step in steps]

    def _captured(self, step: Run, stream: Any, pool: Any) -> Run:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            step()
        return graph.replay
