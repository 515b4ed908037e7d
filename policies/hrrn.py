"""Highest response ratio next: short jobs first, but a job's claim grows with its wait in proportion to its work.

Source: Brinch Hansen, "An Analysis of Response Ratio Scheduling", IFIP Congress 1971; SGLang offers it for the order
of its waiting queue.

Differs from the source: jobs run beside each other, so that only the waiting queue is ordered, and service is counted
in tokens, of the output in predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, nobody_fits
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.ranking import smallest_first
from schedlab.policies.sjf import work_left


@dataclass
class HRRN(ChoosingVictims):
    """Decodes first, then chunks; waiting requests by `(wait + service) / service`, largest first.

    Service is the work left, in tokens, at a common rate, which drops out of the order: the ratio grows as wait / work.
    Aging is bounded without a knob: a request is overtaken only by those whose wait is a larger multiple of their work.
    """

    needs_prediction = True

    chunk_size: int = 512
    output_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not 0 <= self.output_weight < math.inf:
            raise ValueError(f"policy.output_weight: expected at least 0, found {self.output_weight}")

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._best_first, self.chunk_size, self.mode, self.victim) and nobody_fits(step):
            step.hold()

    def _best_first(self, step: Step) -> Iterable[Request]:
        def patience(request: Request) -> float:
            return (request.arrival_s - step.now) / work_left(step, request, self.output_weight)

        return smallest_first(step.waiting, patience)
