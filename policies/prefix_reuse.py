"""Longest cached prefix first, with bounded aging, and duplicates of a pending prefix deferred.

Source: cache-aware scheduling of SGLang (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", NeurIPS 2024). The aging term bounds the tail that plain longest-prefix-first is known for.

Differs from the source: prompts are computed in chunks beside decodes, with aging, and without SGLang's thresholds and
its reservation for outputs; `sglang_lpm` has these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step
from schedlab.policies.preemption import ChoosingVictims
from schedlab.policies.ranking import RankedQueue


@dataclass
class PrefixReuse(ChoosingVictims):
    """Decodes first, then chunks; waiting requests in the order of `aging * arrival - cached tokens`.

    `aging_tokens_per_s`: a second of waiting weighs as much as so many cached tokens, so nobody is overtaken by those
    that arrive later than its disadvantage divided by it; 0: the longest prefix goes first, however long others wait.
    The order needs no `now`, so a heap fed by `cache_changed`
    keeps it.
    """

    chunk_size: int = 512
    aging_tokens_per_s: float = 100.0
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        if not 0 <= self.aging_tokens_per_s < math.inf:
            raise ValueError(f"policy.aging_tokens_per_s: expected at least 0, found {self.aging_tokens_per_s}")
        if not self.aging_tokens_per_s:
            self.no_bound_on = {"waiting": "longer cached prefixes may keep coming"}  # type: ignore[misc]
        self._queue = RankedQueue(self._rank)

    def schedule(self, step: Step) -> None:
        if chunked_step(step, self._best_first, self.chunk_size, self.mode, self.victim):
            step.hold()

    def _rank(self, step: Step, request: Request) -> float:
        return self.aging_tokens_per_s * request.arrival_s - step.cached_tokens(request)

    def _best_first(self, step: Step) -> Iterator[Request]:
        """Waiting requests by rank; those whose prefix somebody is computing right now are passed over in this step."""
        return (request for request in self._queue.best_first(step) if not step.pending_tokens(request))
