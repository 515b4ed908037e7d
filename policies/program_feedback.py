"""Multi-level feedback by program: a request stands where the service of its whole program puts it.

Source: Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025, which preempts by
the levels of programs (PLAS) or of their longest chains (ATLAS).

Differs from the source: service is counted in tokens, not in time; who is displaced is chosen and saved as in
`multilevel_feedback`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from schedlab.framework.policy import Event
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.program_service import ProgramService


@dataclass
class ProgramFeedback(MultilevelFeedback):
    """As `multilevel_feedback`, but the service that decides a level is that of the request's program; `service`: `sum`
    or `critical_path`, see `ProgramService`.
    """

    service: Literal["sum", "critical_path"] = field(default="sum", kw_only=True)
    _service: ProgramService = field(init=False, repr=False)
    _moved: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._service = ProgramService(self.prompt_weight, self.service)
        super().__post_init__()

    def observe(self, event: Event) -> None:
        self._moved |= self._service.observe(event)

    def level_by_service(self, request: Request) -> int:
        return bisect_left(self._limits, self._service.of(request))

    def _highest_first(self, step: Step) -> Iterator[Request]:
        if self._moved:
            for request in step.waiting:
                self._queue.rank_again(request, self.level_by_service(request))
            self._moved = False
        return super()._highest_first(step)
