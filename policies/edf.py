"""Earliest deadline first.

Source: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 20(1),
1973; for LLM serving, e.g. the deadline order of Kubernetes' inference gateway. It minimises lateness while the load
can be borne, and is known to thrash beyond: `slo_aware` gives up on what is late already.

Differs from the source: the theorem is of single jobs that can be interrupted for nothing; here a batch runs together,
and who is displaced computes its keys and values again or swaps them. The gateway orders a queue and displaces nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, ranked_step
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankBy, RankedQueue
from schedlab.policies.victims import worst_of


@dataclass
class EDF(Preempting):
    """Prompts by `deadline_s`, running and waiting ones alike; where blocks are short, later deadlines make room.

    A request without a deadline gets `default_deadline_s` after its arrival. With one default for all that is arrival
    order: deadlines must differ for this policy to.
    """

    chunk_size: int = 512
    default_deadline_s: float = 60.0
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not 0 <= self.default_deadline_s < math.inf:
            raise ValueError(f"policy.default_deadline_s: expected at least 0 s, found {self.default_deadline_s}")
        self._queue = RankedQueue(RankBy(self.deadline))

    def schedule(self, step: Step) -> None:
        waiting = self._queue.best_first(step)
        if ranked_step(step, waiting, self.deadline, self.chunk_size, self.mode, worst_of(self.deadline)):
            step.hold()

    def deadline(self, request: Request) -> float:
        """Seconds on the engine's clock by which `request` should be done."""
        return due(request, self.default_deadline_s)


def due(request: Request, default_s: float) -> float:
    """The deadline of `request`, `default_s` after its arrival where it brings none; seconds on the engine's clock."""
    deadline = request.deadline_s
    return request.arrival_s + default_s if deadline is None else deadline
