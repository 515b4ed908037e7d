"""Shortest remaining work first with preemption, by predicted lengths; who has waited for `patience_s` goes first."""

from dataclasses import dataclass
from functools import partial

from schedlab import Policy, Request, Step
from schedlab.policies.common import preempt_to_admit, ranked_step
from schedlab.policies.sjf import work_left
from schedlab.policies.victims import strictly_worse, worst_of


@dataclass
class BoundedSRTF(Policy):
    """Who arrived `patience_s` ago or earlier is neither overtaken nor displaced by anybody who arrived later."""

    needs_prediction = True
    chunk_size: int = 512
    patience_s: float = 5.0

    def schedule(self, step: Step) -> None:
        rank = partial(self.rank, step)
        head = min(step.waiting, key=rank, default=None)
        displaced = head is not None and preempt_to_admit(step, head, partial(strictly_worse, rank=rank))
        waiting = sorted(step.waiting, key=rank)
        alone = ranked_step(step, waiting, rank, self.chunk_size, victims=worst_of(rank))
        if alone and not displaced and not waiting:
            step.hold()

    def rank(self, step: Step, request: Request) -> tuple[int, float]:
        overdue = step.now - request.arrival_s >= self.patience_s
        return (0, request.arrival_s) if overdue else (1, work_left(step, request))
