"""Shortest job first by the work that is left, with bounded aging.

Source: Shortest processing time first (Smith, "Various Optimizers for Single-Stage Production", Naval Research
Logistics Quarterly 3, 1956); for LLM serving with predicted lengths, Qiu et al., "Efficient Interactive LLM Serving
with Proxy Model-based Sequence Length Prediction", 2024. It can only help where requests queue.

Differs from the source: jobs run beside each other, so that only the waiting queue is ordered; lengths are predicted,
and a wait weighs against work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, remaining
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.ranking import RankedQueue


def work_left(step: Step, request: Request, output_weight: float = 1.0, prompt_weight: float = 1.0) -> float:
    """Tokens that `request` has to compute, its cached prefix left out, each of which counts as `prompt_weight`, plus
    the output that it is predicted to generate, at `output_weight` a token. Without a prediction the output is
    `max_tokens`.
    """
    predicted = request.predicted_output_tokens
    output = request.max_tokens if predicted is None else predicted
    return prompt_weight * remaining(step, request) + output_weight * max(output - request.num_output_tokens, 0)


@dataclass
class SJF(ChoosingVictims):
    """Decodes first, then chunks; waiting requests in the order of `work left - aging * time waited`.

    `output_weight` and `prompt_weight`: work of an output token and of a prompt token. `aging_tokens_per_s`: a second
    of waiting outweighs as much work, so nobody is overtaken by those that arrive later than its disadvantage divided
    by it.
    """

    needs_prediction = True

    chunk_size: int = 512
    output_weight: float = 1.0
    aging_tokens_per_s: float = 20.0
    prompt_weight: float = 1.0
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not (0 <= self.output_weight < math.inf and 0 < self.aging_tokens_per_s < math.inf):
            raise ValueError(
                f"policy: expected output_weight >= 0 and aging_tokens_per_s > 0, "
                f"found {self.output_weight}, {self.aging_tokens_per_s}"
            )
        if not 0 <= self.prompt_weight < math.inf:
            raise ValueError(f"policy.prompt_weight: expected at least 0, found {self.prompt_weight}")
        self._queue = RankedQueue(self._rank)

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._queue.best_first, self.chunk_size, self.mode, self.victim):
            step.hold()

    def _rank(self, step: Step, request: Request) -> float:
        work = work_left(step, request, self.output_weight, self.prompt_weight)
        return work + self.aging_tokens_per_s * request.arrival_s
