"""Multi-level feedback queue: who has been served little goes first, with no prediction of lengths.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023 (FastServe): a request enters
at the level of its prompt, sinks as it generates, and gives way to those above it at the next token.

Differs from the source: a level is a band of the service that a request has had, in tokens, with no full quantum on the
level that it joins; promotion is by the time since the arrival, not by the time without service; who is displaced
always gives up its blocks. `fastserve` has the rules of the source.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, preempt_to_admit, ranked_step
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankBy, RankedQueue, overdue_first
from schedlab.policies.victims import strictly_worse, worst_of


@dataclass
class MultilevelFeedback(Preempting):
    """Prompts by level, equals by arrival, running and waiting ones alike; a waiting request takes slot and blocks of
    running ones that are on a strictly lower level.

    Level i holds requests of up to `quantum * 2^i` tokens of service, the lowest of `num_levels` all others. Service is
    the output so far and `prompt_weight` a prompt token: the weight is what a prompt token costs beside an output
    token. After `promote_after_s` since its arrival a request is on the highest level, whatever it has had: that bounds
    every wait. The source keeps the memory of who gives way on the host, hence `swap`; without `swap_space_gib` it is
    computed again.
    """

    chunk_size: int = 512
    quantum: int = 32
    num_levels: int = 5
    prompt_weight: float = 0.02
    promote_after_s: float = 20.0

    preempt_mode: Literal["recompute", "swap", "auto"] = field(default="swap", kw_only=True)
    _queue: RankedQueue = field(init=False, repr=False)
    _limits: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not (self.quantum >= 1 and self.num_levels >= 1 and self.prompt_weight >= 0 and self.promote_after_s > 0):
            raise ValueError(
                f"policy: expected quantum >= 1, num_levels >= 1, prompt_weight >= 0, promote_after_s > 0; "
                f"found {self.quantum}, {self.num_levels}, {self.prompt_weight}, {self.promote_after_s}"
            )
        self._queue = RankedQueue(RankBy(self.level_by_service))
        self._limits = [self.quantum * 2.0**level for level in range(self.num_levels - 1)]

    def schedule(self, step: Step) -> None:
        overdue_since = step.now - self.promote_after_s

        def level(request: Request) -> int:
            return 0 if request.arrival_s <= overdue_since else self.level_by_service(request)

        def rank(request: Request) -> tuple[int, float]:
            return level(request), request.arrival_s

        head = next(self._highest_first(step), None)
        disturbed = head is not None and preempt_to_admit(step, head, partial(strictly_worse, rank=level), self.mode)
        waiting = self._highest_first(step)
        alone = ranked_step(step, waiting, rank, self.chunk_size, self.mode, worst_of(level))
        if alone and not disturbed and not step.waiting:  # who may displace whom changes with every token
            step.hold()

    def level_by_service(self, request: Request) -> int:
        """Level of `request` before any promotion; 0 is served first."""
        service = request.num_output_tokens + self.prompt_weight * request.num_prompt_tokens
        return bisect_left(self._limits, service)

    def _highest_first(self, step: Step) -> Iterator[Request]:
        return overdue_first(step, self._queue.best_first(step), self.promote_after_s)
