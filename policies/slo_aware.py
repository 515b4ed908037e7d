"""Serves what can still meet its objective: least slack first, late requests last, chunks as wide as decodes can bear.

Sources: least laxity first (Mok, "Fundamental Design Problems of Distributed Systems for the Hard-Real-Time
Environment", MIT, 1983); for LLM serving, admission by estimated time to first token and prefill chunks sized by the
decodes' objective, as in SLOs-Serve (Chen et al., 2025) and the SLO-aware schedulers that users of vLLM ask for.

Differs from the source: the slack is that of the first token and orders the waiting queue alone, and what is late
already goes last, not first. Nothing is planned ahead, as SLOs-Serve does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step, nobody_fits, remaining
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.ranking import RankedQueue, overdue_first

IN_TIME, LATE = 0, 1


@dataclass
class SLOAware(ChoosingVictims):
    """Waiting requests by the latest moment at which computing their prompt would still meet their SLO; those for which
    it has passed go after all others, in arrival order.

    A step takes as many prompt tokens beside its decodes as the tightest `tpot_s` among them allows, at most
    `chunk_size` tokens in all and at least `min_chunk`. `estimator` says how long steps take. After `patience_s` a
    request goes first, late or not: that bounds every wait. One that has waited for `reject_after_s` without a token is
    rejected (`shed:waited too long`); null: nobody is.
    """

    estimator: Estimator
    chunk_size: int = 2048
    min_chunk: int = 64
    patience_s: float = 60.0
    reject_after_s: float | None = None
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        estimator = self.estimator
        if estimator is None:  # a base's default
            raise ValueError("policy.estimator: SLOAware needs an estimator of step times, found none")
        super().__post_init__()
        self.estimator = estimator  # asked in any mode
        check_chunk(self.chunk_size)
        if not (self.min_chunk >= 1 and self.patience_s > 0):
            raise ValueError(
                f"policy: expected min_chunk >= 1 and patience_s > 0, found {self.min_chunk}, {self.patience_s}"
            )
        if self.reject_after_s is not None and not self.reject_after_s > 0:
            raise ValueError(f"policy.reject_after_s: expected null or above 0, found {self.reject_after_s}")
        self._queue = RankedQueue(self._rank)

    def schedule(self, step: Step) -> None:
        gone = dict.fromkeys(self._reject_impatient(step))
        chunk = self._chunk(step) if step.waiting or step.prefilling else self.chunk_size

        def order(step: Step) -> Iterator[Request]:
            return (request for request in self._best_first(step) if request not in gone)

        undisturbed = chunked_step(step, order, chunk, self.mode, self.victim)
        if undisturbed and not gone and step.decoding and nobody_fits(step):
            step.hold(self._next_to_reject(step))

    def _rank(self, step: Step, request: Request) -> tuple[int, float]:
        return IN_TIME, self.latest_start(step, request)

    def latest_start(self, step: Step, request: Request) -> float:
        return latest_start(self.estimator, step, request)

    def _reject_impatient(self, step: Step) -> list[Request]:
        """Reject who has waited for `reject_after_s` without a token."""
        if self.reject_after_s is None:
            return []
        bar = step.now - self.reject_after_s
        gone = [r for r in step.waiting if r.arrival_s <= bar and r.first_token_s is None]
        for request in gone:
            step.reject(request, "waited too long")
        return gone

    def _next_to_reject(self, step: Step) -> float:
        """When somebody who waits will have waited for `reject_after_s`."""
        if self.reject_after_s is None:
            return math.inf
        arrivals = (r.arrival_s for r in step.waiting if r.first_token_s is None)
        return min(arrivals, default=math.inf) + self.reject_after_s

    def _best_first(self, step: Step) -> Iterator[Request]:
        return overdue_first(step, self._in_time_first(step), self.patience_s)

    def _in_time_first(self, step: Step) -> Iterator[Request]:
        now = step.now
        for request in self._queue.best_first(step):
            lateness, start = self._queue.rank_of(request)
            if lateness == IN_TIME and start < now:
                self._queue.rank_again(request, (LATE, request.arrival_s))
            else:
                yield request

    def _chunk(self, step: Step) -> int:
        """Tokens of this step, decodes included: the most whose estimated time is within every decode's `tpot_s`, and
        `min_chunk` prompt tokens even where these are not.
        """
        limits = [r.slo.tpot_s for r in step.decoding if r.slo is not None and r.slo.tpot_s is not None]
        if not limits:
            return self.chunk_size
        decodes, context = len(step.decoding), sum(request.num_tokens for request in step.decoding)
        start = step.prefilling[0].num_computed_tokens if step.prefilling else 0
        most = min(self.chunk_size, step.token_budget) - decodes
        least = min(self.min_chunk, most)
        larger = range(least + 1, most + 1)
        in_time = bisect_right(larger, min(limits), key=lambda n: self.estimator.step_s(n, start, decodes, context))
        return decodes + least + in_time


def latest_start(estimator: Estimator, step: Step, request: Request) -> float:
    """Seconds on the engine's clock at which `request` must be computed to meet its SLO; infinite without one."""
    tokens = remaining(step, request)
    return _due(request) - estimator.step_s(tokens, request.num_tokens - tokens)


def _due(request: Request) -> float:
    """When its next token is due."""
    slo, first = request.slo, request.first_token_s
    if slo is None:
        return math.inf
    if first is not None:
        return math.inf if slo.tpot_s is None else first + slo.tpot_s * request.num_output_tokens
    limits = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    return request.arrival_s + min(limits, default=math.inf)
