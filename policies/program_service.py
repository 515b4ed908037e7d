"""What programs have had: requests that wait for one another are served for a common end.

Sources: program-level attained service (PLAS) and, along the longest chain of calls, ATLAS: Luo et al., "Autellix: An
Efficient Serving Engine for LLM Agents as General Programs", 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from schedlab.framework.policy import Aborted, Arrived, Event, Finished, Rejected
from schedlab.framework.request import Request


def program_of(request: Request) -> tuple[bool, str]:
    """The program of `request`; one that has none is a program by itself."""
    program = request.program
    return program is not None, request.request_id if program is None else program


@dataclass
class ProgramService:
    """Service that each program has had: generated tokens, and a prompt token as `prompt_weight` of one. It
    never falls, so that nobody who is preempted overtakes by that; what ended without a token had none.

    by : `sum` of all requests that ended, or `critical_path`: the longest chain of them, where a request continues what
         had ended when it arrived. A policy sees no edges of the graph, so that what ended by then stands for a
         request's parents.
    """

    prompt_weight: float = 0.02
    by: Literal["sum", "critical_path"] = "sum"
    _had: dict[tuple[bool, str], float] = field(default_factory=dict, init=False, repr=False)
    _at_arrival: dict[Request, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.by not in ("sum", "critical_path"):
            raise ValueError(f"policy.service: expected sum or critical_path, found {self.by!r}")
        if not self.prompt_weight >= 0:
            raise ValueError(f"policy.prompt_weight: expected at least 0, found {self.prompt_weight}")

    def observe(self, event: Event) -> bool:
        """Take in what happened; whether a program's service changed for its other requests."""
        if isinstance(event, Arrived):
            self._at_arrival[event.request] = self._had.get(program_of(event.request), 0.0)
            return False
        if not isinstance(event, Finished | Aborted | Rejected):
            return False
        request, program = event.request, program_of(event.request)
        before, began = self._had.get(program, 0.0), self._at_arrival.pop(request, 0.0)
        if request.program is None:
            return False  # nobody else is of it
        own = 0.0 if request.first_token_s is None else self._own(request)
        self._had[program] = before + own if self.by == "sum" else max(before, began + own)
        return self._had[program] != before

    def of(self, request: Request) -> float:
        """What the program of a waiting or running `request` has had, and the request itself."""
        had = self._had.get(program_of(request), 0.0) if self.by == "sum" else self._at_arrival.get(request, 0.0)
        return had + self._own(request)

    def _own(self, request: Request) -> float:
        return request.num_output_tokens + self.prompt_weight * request.num_prompt_tokens
