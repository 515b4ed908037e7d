"""Programs in the order in which they began: a later step of an old program goes before a new program.

Source: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache Time-to-Live", 2025,
whose order of the queue this is.

Differs from the source: the order alone; a time for which the blocks of a program are kept is not set here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from schedlab.framework.policy import Aborted, Arrived, Event, Finished, Rejected
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.program_service import program_of
from schedlab.policies.ranking import RankBy, RankedQueue


@dataclass
class ProgramFCFS(ChoosingVictims):
    """Decodes first, then chunks; waiting requests by the first arrival of their program, then by their own."""

    no_bound_on: ClassVar[Mapping[str, str]] = {"waiting": "programs that began earlier may go on for ever"}

    chunk_size: int = 512
    _began: dict[tuple[bool, str], float] = field(default_factory=dict, init=False, repr=False)
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        self._queue = RankedQueue(RankBy(self._rank))

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._began.setdefault(program_of(event.request), event.request.arrival_s)
        elif isinstance(event, Finished | Aborted | Rejected) and event.request.program is None:
            self._began.pop(program_of(event.request), None)

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._order, self.chunk_size, self.mode, self.victim):
            step.hold()

    def _order(self, step: Step) -> Iterable[Request]:
        return self._queue.best_first(step)

    def _rank(self, request: Request) -> tuple[float, float]:
        return self._began.get(program_of(request), request.arrival_s), request.arrival_s
