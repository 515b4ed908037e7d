"""The decode cohort: requests that decode in step, advanced together by one counter.

A member's computed tokens are a stored base plus `tick`, so a step that decodes all of them costs the same at any size:
finishes come from a heap of ticks, block needs from buckets of `-base mod block_size`, the sum of contexts is an
integer. Knows lengths and ticks; knows nothing of pools, slots or tokens.
"""

from __future__ import annotations

from heapq import heappop, heappush

from schedlab.framework.lineup import Lineup
from schedlab.framework.request import STILL, Cadence, EngineRequest


def _by_admission(request: EngineRequest) -> int:
    return request.admission


class DecodeCohort(Cadence):
    """Members in admission order. `emitted_ns` is when they last emitted together; `stragglers` emitted at another
    time.
    """

    __slots__ = (
        "_finishes",
        "block_size",
        "buckets",
        "emitted_ns",
        "lineup",
        "members",
        "stragglers",
        "total_base",
        "version",
    )

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.lineup = Lineup()
        self.members = self.lineup.requests
        self.buckets: list[dict[EngineRequest, None]] = [{} for _ in range(block_size)]
        self._finishes: list[tuple[int, int, EngineRequest]] = []
        self.total_base = 0
        self.emitted_ns = -1
        self.stragglers: dict[EngineRequest, int] = {}
        self.version = 0

    @property
    def context(self) -> int:
        """Sum of the members' computed tokens."""
        return self.total_base + len(self.members) * self.tick

    def join(self, request: EngineRequest) -> None:
        """`request` has one uncomputed token left and has emitted one."""
        request._computed -= self.tick
        request._tokens -= self.tick
        request._cadence = self
        self.lineup.add(request.admission, request)
        self.total_base += request._computed
        self._place(request)
        if request.emitted_ns != self.emitted_ns:
            self.stragglers[request] = request.emitted_ns
        self.version += 1

    def leave(self, request: EngineRequest) -> None:
        """`request` finished, was aborted or was preempted."""
        self.lineup.remove(request.admission)
        del self.buckets[-request._computed % self.block_size][request]
        self.total_base -= request._computed
        request._computed += self.tick
        request._tokens += self.tick
        request._cadence = STILL
        request.emitted_ns = self.stragglers.pop(request, self.emitted_ns)
        self.version += 1

    def advance(self, now_ns: int) -> None:
        """Every member computed one token and emitted the next at `now_ns`."""
        self.tick += 1
        self.emitted_ns = now_ns
        if self.stragglers:
            self.stragglers.clear()

    def advance_only(self, decoded: list[EngineRequest], now_ns: int) -> None:
        """Only `decoded` computed and emitted; the others fall back by one."""
        chosen = {id(request) for request in decoded}
        skipped = [request for request in self.members if id(request) not in chosen]
        emitted = {request: self.stragglers.get(request, self.emitted_ns) for request in skipped}
        self.advance(now_ns)
        self.stragglers.update(emitted)
        for request in skipped:
            del self.buckets[-request._computed % self.block_size][request]
            request._computed -= 1
            request._tokens -= 1
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
            if request._cadence is self and request.final_tokens - request._tokens == tick:
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
        return sorted(finished, key=_by_admission)

    def _place(self, request: EngineRequest) -> None:
        self.buckets[-request._computed % self.block_size][request] = None
        heappush(self._finishes, (request.final_tokens - request._tokens, request.order, request))
