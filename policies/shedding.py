"""Turns away who can no longer be served in time: the rest are served stall-free, in arrival order.

Sources: admission control by predicted latency (Welsh & Culler, "Adaptive Overload Control for Busy Internet Servers",
USITS 2003); for LLM serving, early rejection by estimated time to first token as in Mooncake (Qin et al., FAST 2025).

Differs from the source: a request is refused while it waits, not as it arrives, and by the time that its prompt alone
would take, not by the load that is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.ranking import RankedQueue
from schedlab.policies.slo_aware import latest_start


@dataclass
class Shedding(ChoosingVictims):
    """As `chunked_prefill`, but a waiting request without a first token is rejected (`shed:late`) once its prompt,
    computed at once and alone, would by `estimator` come after the limit of its SLO. Without an SLO nobody is rejected.
    """

    estimator: Estimator
    chunk_size: int = 512
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        estimator = self.estimator
        if estimator is None:  # a base's default
            raise ValueError("policy.estimator: Shedding needs an estimator of step times, found none")
        super().__post_init__()
        self.estimator = estimator
        check_chunk(self.chunk_size)
        self._queue = RankedQueue(self._latest_start)

    def schedule(self, step: Step) -> None:
        late = self._reject_late(step)
        undisturbed = chunked_step(step, lambda step: _without(step, late), self.chunk_size, self.mode, self.victim)
        if undisturbed and not late and step.decoding:
            step.hold(self._next_late(step))

    def _latest_start(self, step: Step, request: Request) -> float:
        return math.inf if request.first_token_s is not None else latest_start(self.estimator, step, request)

    def _reject_late(self, step: Step) -> list[Request]:
        late: list[Request] = []
        for request in self._queue.best_first(step):
            if self._queue.rank_of(request) >= step.now:
                break
            step.reject(request, "late")
            late.append(request)
        return late

    def _next_late(self, step: Step) -> float:
        """When the next of the waiting is to be rejected, if nothing happens before; infinite if nobody is."""
        first = next(self._queue.best_first(step), None)
        return math.inf if first is None else math.nextafter(self._queue.rank_of(first), math.inf)


def _without(step: Step, late: list[Request]) -> Iterator[Request]:
    gone = dict.fromkeys(late)
    return (request for request in step.waiting if request not in gone)
