"""Requests that decode in step, advanced together by one counter.

A member's lengths are stored as a base relative to the shared `tick`, so a step that decodes all of them touches none
and costs the same at any size: finishes come from a heap of ticks, the sum of contexts is an integer, and who needs a
block is found in a bucket. A member needs one when `base + tick` is a multiple of the block size, which is at the ticks
that equal `-base` modulo the block size: by that it is filed, once for as long as it decodes in step.
"""

from __future__ import annotations

from heapq import heappop, heappush

from schedlab.framework.ordered_requests import OrderedRequests
from schedlab.framework.request import NOT_DECODING, DecodeClock, EngineRequest


def _by_admission(request: EngineRequest) -> int:
    return request.admission


class DecodeSet(DecodeClock):
    """Members in admission order. They last emitted together at `emitted_ns`, except for those in
    `last_emitted_overrides`, who joined or fell back since and emitted at a time of their own.
    """

    __slots__ = (
        "_finishes",
        "block_size",
        "buckets",
        "emitted_ns",
        "ordered",
        "members",
        "last_emitted_overrides",
        "total_base",
        "version",
    )

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.ordered = OrderedRequests()
        self.members = self.ordered.requests
        self.buckets: list[dict[EngineRequest, None]] = [{} for _ in range(block_size)]
        self._finishes: list[tuple[int, int, EngineRequest]] = []
        self.total_base = 0
        self.emitted_ns = -1
        self.last_emitted_overrides: dict[EngineRequest, int] = {}
        self.version = 0

    @property
    def context(self) -> int:
        """Sum of the members' computed tokens."""
        return self.total_base + len(self.members) * self.tick

    def join(self, request: EngineRequest) -> None:
        """`request` has one uncomputed token left and has emitted one."""
        request._base_computed -= self.tick
        request._base_tokens -= self.tick
        request._clock = self
        self.ordered.add(request.admission, request)
        self.total_base += request._base_computed
        self._place(request)
        if request.emitted_ns != self.emitted_ns:
            self.last_emitted_overrides[request] = request.emitted_ns
        self.version += 1

    def leave(self, request: EngineRequest) -> None:
        """`request` finished, was aborted or was preempted."""
        self.ordered.remove(request.admission)
        del self.buckets[-request._base_computed % self.block_size][request]
        self.total_base -= request._base_computed
        request._base_computed += self.tick
        request._base_tokens += self.tick
        request._clock = NOT_DECODING
        request.emitted_ns = self.last_emitted_overrides.pop(request, self.emitted_ns)
        self.version += 1

    def advance(self, now_ns: int) -> None:
        """Every member computed one token and emitted the next at `now_ns`."""
        self.tick += 1
        self.emitted_ns = now_ns
        if self.last_emitted_overrides:
            self.last_emitted_overrides.clear()

    def advance_only(self, decoded: list[EngineRequest], now_ns: int) -> None:
        """Only `decoded` computed and emitted; the others fall back by one."""
        chosen = {id(request) for request in decoded}
        skipped = [request for request in self.members if id(request) not in chosen]
        emitted = {request: self.last_emitted_overrides.get(request, self.emitted_ns) for request in skipped}
        self.advance(now_ns)
        self.last_emitted_overrides.update(emitted)
        for request in skipped:
            del self.buckets[-request._base_computed % self.block_size][request]
            request._base_computed -= 1
            request._base_tokens -= 1
            self._place(request)
        self.total_base -= len(skipped)
        self.version += 1

    def needing_block(self) -> dict[EngineRequest, None]:
        """Members whose next token starts a new block."""
        return self.buckets[self.tick % self.block_size]

    def next_finish(self) -> int | None:
        """Tick at which the next member reaches its final length, or None."""
        while self._finishes:
            tick, _, request = self._finishes[0]
            if request._clock is self and request.final_tokens - request._base_tokens == tick:
                return tick
            heappop(self._finishes)
        return None

    def take_finished(self) -> list[EngineRequest]:
        """Members that have reached their final length, in admission order. They remain members."""
        if not self._finishes or self._finishes[0][0] > self.tick:
            return []  # whether the first entry is stale or not, none is due
        finished: dict[EngineRequest, None] = {}  # who left and came back within a tick is in the heap twice
        while (tick := self.next_finish()) is not None and tick <= self.tick:
            finished[heappop(self._finishes)[2]] = None
        return sorted(finished, key=_by_admission) if len(finished) > 1 else list(finished)

    def _place(self, request: EngineRequest) -> None:
        self.buckets[-request._base_computed % self.block_size][request] = None
        heappush(self._finishes, (request.final_tokens - request._base_tokens, request.order, request))
