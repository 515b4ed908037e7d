"""A test's own hand on an executor: it keeps sequences and block tables itself, and builds the inputs of each step.

Blocks come in random order, and whatever no sequence owns holds NaN.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from schedlab.framework.batch import Batch, Inputs
from schedlab.framework.content import TokenContent
from schedlab.framework.executor import StepResult
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.request import EngineRequest, SamplingParams


@dataclass(eq=False)
class Sequence:
    request: EngineRequest
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.request.num_prompt_tokens :]


class Pages:
    """One executor's pool; a grant is (sequence, tokens)."""

    def __init__(self, executor: ModelExecutor, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> None:
        self.executor = executor
        self.block_size = block_size
        executor.allocate(num_blocks, block_size, num_blocks, num_blocks)
        for caches in executor.kv_caches:
            for cache in caches:
                cache.fill_(torch.nan)
        self.free = list(range(num_blocks))
        self.free_host = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.owners = dict.fromkeys(self.free, 0)

    def add(self, prompt, request_id: str = "r", sampling: SamplingParams | None = None) -> Sequence:
        prompt = [int(token) for token in prompt]
        request = EngineRequest(request_id, 0, len(prompt), TokenContent(prompt), sampling=sampling)
        return Sequence(request, prompt)

    def step(self, *grants: tuple[Sequence, int], copies_out=(), copies_in=()) -> StepResult:
        """Compute the grants and append the tokens that they emit."""
        inputs = self.inputs(grants) if grants else None
        result = self.executor.execute(Batch(copies_out=list(copies_out), copies_in=list(copies_in), inputs=inputs))
        for (sequence, count), token in zip(grants, result.tokens[:, 0].tolist(), strict=True):
            sequence.computed += count
            if token >= 0:
                sequence.tokens.append(token)
        return result

    def logits(self, *grants: tuple[Sequence, int]) -> torch.Tensor:
        """Logits of the grants that complete their sequence; nothing is appended."""
        with torch.inference_mode():
            logits = self.executor.logits(self.inputs(grants))
        for sequence, count in grants:
            sequence.computed += count
        return logits

    def inputs(self, grants) -> Inputs:
        for sequence, count in grants:
            self._grow(sequence, sequence.computed + count)
        spans = [range(s.computed, s.computed + n) for s, n in grants]
        tables = np.zeros((len(grants), max(len(s.blocks) for s, _ in grants)), dtype=np.int64)
        for row, (sequence, _) in zip(tables, grants, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        emitting = [i for i, (s, n) in enumerate(grants) if s.computed + n == len(s.tokens)]
        tokens = [s.tokens[p] for (s, _), span in zip(grants, spans, strict=True) for p in span]
        slots = [self._slot(s, p) for (s, _), span in zip(grants, spans, strict=True) for p in span]
        return Inputs(
            token_ids_T=_ints(tokens),
            positions_T=_ints([p for span in spans for p in span]),
            slots_T=_ints(slots),
            query_starts_N1=_ints(np.cumsum([0] + [n for _, n in grants])),
            context_lens_N=_ints([span.stop for span in spans]),
            rows_N=_ints(range(len(grants))),
            block_tables_NB=tables,
            emitting_S=_ints(emitting),
            output_positions_S=_ints([spans[i].stop for i in emitting]),
            requests=[s.request for s, _ in grants],
        )

    def prefill(self, sequence: Sequence, chunk: int | None = None) -> None:
        while left := len(sequence.tokens) - sequence.computed:
            count = min(left, chunk or left)
            self.step((sequence, count))
            if count == left:
                return

    def generate(self, sequence: Sequence, count: int, chunk: int | None = None) -> list[int]:
        """`count` more tokens; what is not computed yet is prefilled in chunks."""
        wanted = len(sequence.output) + count
        self.prefill(sequence, chunk)
        while len(sequence.output) < wanted:
            self.step((sequence, 1))
        return sequence.output

    def share(self, sequence: Sequence, donor: Sequence, num_blocks: int) -> None:
        """Adopt the donor's leading blocks: a prefix hit."""
        sequence.blocks = donor.blocks[:num_blocks]
        sequence.computed = num_blocks * self.block_size
        for block in sequence.blocks:
            self.owners[block] += 1

    def drop(self, sequence: Sequence) -> None:
        """Preempt for recompute: blocks that nobody else owns are free, and poison."""
        self._release(sequence)
        sequence.computed = 0

    def swap_out(self, sequence: Sequence) -> None:
        sequence.host_blocks = [self.free_host.pop() for _ in sequence.blocks]
        self.step(copies_out=zip(sequence.blocks, sequence.host_blocks, strict=True))
        self._release(sequence)

    def swap_in(self, sequence: Sequence, *grants: tuple[Sequence, int]) -> None:
        """Copy back into other blocks, in one step with `grants`."""
        self._grow(sequence, sequence.computed)
        pairs = list(zip(sequence.host_blocks, sequence.blocks, strict=True))
        self.step(*grants, copies_in=pairs)
        self.free_host += sequence.host_blocks
        sequence.host_blocks = []

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self.block_size < num_tokens:
            block = self.free.pop(0)
            self.owners[block] = 1
            sequence.blocks.append(block)

    def _release(self, sequence: Sequence) -> None:
        for block in sequence.blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
                for caches in self.executor.kv_caches:
                    for cache in caches:
                        cache[block] = torch.nan
        sequence.blocks = []

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size


def _ints(values) -> np.ndarray:
    return np.asarray(list(values), dtype=np.int64)
