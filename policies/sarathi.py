"""Sarathi-Serve: decodes first, then prompts in chunks, whose blocks are all set aside when they are admitted.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, as its
scheduler is written in microsoft/sarathi-serve, which has the chunks that shrink, and in Vidur 0.0.26. The orders `edf`
and `srpf` are those of Agrawal et al., "Medha: Efficient LLM Inference Without Approximation on Contexts of Millions of
Tokens", 2025.

Differs from the source: a step that preempted admits nobody, and a partly computed prompt that was preempted is
computed in full (Vidur goes on as if it ended where it was preempted). The watermark, 1 % there, is `engine.watermark`:
beside running requests an admission leaves that, and one block at least, and a request that runs alone needs no spare
block. Deadlines are those that requests bring instead of estimates from a profile. A chunk that shrinks stays at
its smallest behind `chunk_schedule_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, decode_with_spare, never_short, remaining
from schedlab.policies.edf import due
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankedQueue, may_be_admitted

ALIGNED = 32
"""Sizes of chunks that shrink are multiples of it, unless the smallest is smaller."""


@dataclass
class Sarathi(Preempting):
    """`chunk_size` caps the tokens of a step, decodes included. Prompts in `order`: by arrival, deadline (`edf`,
    `default_deadline_s` after the arrival where a request brings none) or what is left of them (`srpf`).

    With `low_chunk_size` the cap shrinks for a prompt that is far on: from `chunk_size` to that in
    `chunk_schedule_stages` steps over `chunk_schedule_tokens` of the prompt.
    """

    chunk_size: int = 512
    order: Literal["fcfs", "edf", "srpf"] = "fcfs"
    default_deadline_s: float = 60.0
    low_chunk_size: int | None = None
    chunk_schedule_tokens: int = 16384
    chunk_schedule_stages: int = 16
    _chunks: list[int] = field(init=False, repr=False)
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if self.order not in ("fcfs", "edf", "srpf"):
            raise ValueError(f"policy.order: expected fcfs, edf or srpf, found {self.order!r}")
        if not 0 <= self.default_deadline_s < float("inf"):
            raise ValueError(f"policy.default_deadline_s: expected at least 0 s, found {self.default_deadline_s}")
        for key in ("chunk_schedule_tokens", "chunk_schedule_stages"):
            if getattr(self, key) < 1:
                raise ValueError(f"policy.{key}: expected at least 1, found {getattr(self, key)}")
        if self.order == "srpf":
            self.no_bound_on = {"waiting": "shorter prompts may keep coming"}  # type: ignore[misc]
        self._chunks = self._shrinking()
        self._queue = RankedQueue(self._rank)

    def _shrinking(self) -> list[int]:
        """The cap by stage of a prompt."""
        low, high, stages = self.low_chunk_size, self.chunk_size, self.chunk_schedule_stages
        if low is None:
            return [high]
        if not 1 <= low <= high:
            raise ValueError(f"policy.low_chunk_size: expected null or 1 to chunk_size = {high}, found {low}")
        unit, steps = min(ALIGNED, low), max(stages - 1, 1)
        return [round((low + (high - low) * (stages - 1 - i) // steps) / unit) * unit for i in range(stages)]

    def schedule(self, step: Step) -> None:
        budget = step.token_budget
        undisturbed = decode_with_spare(step, self.mode, set_aside=set_aside)
        batched = decoded = budget - step.token_budget
        batched += self._continue(step, batched)
        if undisturbed:
            batched += self._admit(step, batched)
            if batched == decoded and never_short(step):
                step.hold()

    def _rank(self, step: Step, request: Request) -> Any:
        if self.order == "edf":
            return due(request, self.default_deadline_s)
        return remaining(step, request) if self.order == "srpf" else 0

    def _chunk(self, request: Request, start: int) -> int:
        """The cap of a step in which `request` is computed from `start` on."""
        stage = start * self.chunk_schedule_stages // self.chunk_schedule_tokens
        return self._chunks[min(stage, len(self._chunks) - 1)]

    def _continue(self, step: Step, batched: int) -> int:
        """What `batched` tokens leave of the chunk to running prompts, whose blocks are there; returns their tokens."""
        before = batched
        for request in sorted(step.prefilling, key=lambda request: self._rank(step, request)):
            room = self._chunk(request, request.num_computed_tokens) - batched
            if request.state == "running" and room > 0:
                batched += step.grant(request, room).tokens
        return batched - before

    def _admit(self, step: Step, batched: int) -> int:
        """The same to waiting prompts, each if blocks for all of it are left; returns their tokens."""
        before, aside = batched, set_aside(step)
        for request in self._waiting(step):
            if not (step.token_budget and step.free_slots and may_be_admitted(step, request)):
                break
            room = self._chunk(request, step.cached_tokens(request)) - batched
            needed = step.blocks_needed(request, remaining(step, request))
            spare = max(step.watermark_blocks, 1) if step.running or batched else 0
            if room <= 0 or needed + aside + spare > step.free_blocks:
                break
            free = step.free_blocks
            batched += step.grant(request, room).tokens
            aside += needed - (free - step.free_blocks)
        return batched - before

    def _waiting(self, step: Step) -> Iterable[Request]:
        return step.waiting if self.order == "fcfs" else self._queue.best_first(step)


def set_aside(step: Step) -> int:
    """Blocks that running prompts will take and nobody else may."""
    running = (request for request in step.prefilling if request.state == "running")
    return sum(step.blocks_needed(request, request.num_uncomputed_tokens) for request in running)
