"""Shortest remaining processing time first, by predicted lengths: who has less left displaces who has more.

Source: Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", Operations Research
16(3), 1968; FastServe's code (LLMServe/FastServe) has it as the bound of what preemption can give.

Differs from the source: a displaced request may have to compute its keys and values again, which counts as work that is
left. FastServe's version knows lengths and counts output tokens alone (`prompt_weight=0`, `predictor=oracle`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, preempt_to_admit, ranked_step
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankedQueue
from schedlab.policies.sjf import work_left
from schedlab.policies.victims import strictly_worse, worst_of


@dataclass
class SRPT(Preempting):
    """Decodes first, then chunks; running and waiting prompts in the order of the work that is left of their requests.
    A waiting request takes slot and blocks of running ones that have strictly more left.

    Work is `prompt_weight` a prompt token still to compute and `output_weight` a token of the predicted output still to
    generate. Long requests starve for as long as shorter ones keep coming.
    """

    needs_prediction = True
    no_bound_on: ClassVar[Mapping[str, str]] = {"waiting": "shorter requests may keep coming"}

    chunk_size: int = 512
    output_weight: float = 1.0
    prompt_weight: float = 1.0
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not (0 <= self.output_weight < math.inf and 0 <= self.prompt_weight < math.inf):
            raise ValueError(
                f"policy: expected output_weight >= 0 and prompt_weight >= 0, "
                f"found {self.output_weight}, {self.prompt_weight}"
            )
        self._queue = RankedQueue(self._work_left)

    def schedule(self, step: Step) -> None:
        rank = partial(self._work_left, step)
        head = next(self._queue.best_first(step), None)
        disturbed = head is not None and preempt_to_admit(step, head, partial(strictly_worse, rank=rank), self.mode)
        waiting = self._queue.best_first(step)
        alone = ranked_step(step, waiting, rank, self.chunk_size, self.mode, worst_of(rank))
        # while all decode, what is left of them falls and what is left of the waiting does not
        if alone and not disturbed and (head is None or not strictly_worse(step, head, rank)):
            step.hold()

    def _work_left(self, step: Step, request: Request) -> float:
        return work_left(step, request, self.output_weight, self.prompt_weight)
