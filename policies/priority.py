"""Urgent requests first: they overtake in the queue, and throw out running requests of strictly lower priority.

Source: priority scheduling of vLLM (`--scheduling-policy priority`), with the preemption of running requests that its
users ask for. The larger priority is the more urgent, where vLLM serves the smaller first. Strict inequality keeps
equals from throwing each other out for ever.

Differs from the source: a waiting prompt goes ahead of less urgent running ones and may take their place, and a running
prompt that lacks blocks is granted the part that fits; `vllm_v1` with `order=priority` has vLLM's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, preempt_to_admit, ranked_step
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankBy, RankedQueue
from schedlab.policies.victims import strictly_worse, worst_of


def urgency(request: Request) -> tuple[int, float]:
    """Rank of a request in the queue: the larger priority, then the earlier arrival."""
    return -request.priority, request.arrival_s


def class_of(request: Request) -> int:
    """Rank for displacing others: the priority alone."""
    return -request.priority


@dataclass
class Priority(Preempting):
    """Prompts in the order of `priority`, larger first, equals by arrival; running ones and waiting ones alike.

    `preempt_running`: a waiting request that finds no slot or no blocks takes those of a strictly lower priority.
    Lower priorities starve for as long as higher ones keep coming: that is what a priority is.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {
        "waiting": "lower priorities wait for as long as higher ones keep coming"
    }

    chunk_size: int = 512
    preempt_running: bool = True
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        self._queue = RankedQueue(RankBy(urgency))

    def schedule(self, step: Step) -> None:
        head = next(self._queue.best_first(step), None) if self.preempt_running else None
        disturbed = head is not None and preempt_to_admit(step, head, partial(strictly_worse, rank=class_of), self.mode)
        waiting = self._queue.best_first(step)
        alone = ranked_step(step, waiting, urgency, self.chunk_size, self.mode, worst_of(class_of))
        # a head that fitted until these decodes took their blocks would displace somebody if it were asked again
        if alone and not disturbed and (head is None or not strictly_worse(step, head, class_of)):
            step.hold()
