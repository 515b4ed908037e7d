"""Least attained service of programs: who belongs to a program that has had little goes first, and nobody is thrown
out.

Source: PLAS and ATLAS of Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025,
as an order of the queue alone.

Differs from the source: nobody is displaced, service is counted in tokens, not in time, and `patience_s` bounds every
wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from schedlab.framework.policy import Event
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, nobody_fits
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.program_service import ProgramService
from schedlab.policies.ranking import overdue_first, smallest_first


@dataclass
class ProgramLAS(ChoosingVictims):
    """Decodes first, then chunks; waiting requests by the service of their program, equals by arrival. Who has waited
    for `patience_s` goes first: that bounds every wait. `service`: `sum` or `critical_path`, see `ProgramService`.
    """

    chunk_size: int = 512
    prompt_weight: float = 0.02
    service: Literal["sum", "critical_path"] = "sum"
    patience_s: float = 60.0
    _service: ProgramService = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not self.patience_s > 0:
            raise ValueError(f"policy.patience_s: expected above 0, found {self.patience_s}")
        self._service = ProgramService(self.prompt_weight, self.service)

    def observe(self, event: Event) -> None:
        self._service.observe(event)

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._order, self.chunk_size, self.mode, self.victim) and nobody_fits(step):
            step.hold()

    def _order(self, step: Step) -> Iterator[Request]:
        least_first = smallest_first(step.waiting, lambda request: (self._service.of(request), request.arrival_s))
        return overdue_first(step, least_first, self.patience_s)
