"""Orders of waiting requests: a queue for ranks that change only with the prefix cache, a heap for those that move.

Knows what a policy may read of a request; knows no policy and grants nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Any

from schedlab.framework.request import Request
from schedlab.framework.step import Step

Entry = tuple[Any, int, Request]
"""Rank, place among arrivals, request."""
WAITING = ("waiting", "preempted", "swapped")


def may_be_admitted(step: Step, request: Request) -> bool:
    """Whether `request` waits and did so when the step began: what was preempted in a step is not granted in it."""
    state = request.state
    return state == "waiting" or (state in WAITING and request not in step.running)


class RankedQueue:
    """Waiting requests by `rank(step, request)`, smallest first, equals in arrival order.

    The rank may depend on what a request is and on `step.cached_tokens`, and not on `step.now`: a deep queue is then
    ranked anew only where `step.cache_changed` says so. Aging fits in all the same: what falls with time at one rate
    for all, `rank - rate * (now - arrival)`, orders as `rank + rate * arrival`.
    """

    def __init__(self, rank: Callable[[Step, Request], Any]) -> None:
        self._rank = rank
        self._heap: list[Entry] = []
        self._taken: list[Entry] = []
        self._latest: dict[Request, Entry] = {}
        self._places: dict[Request, int] = {}
        self._arrivals = 0
        self._prune_at = 1024

    def best_first(self, step: Step) -> Iterator[Request]:
        """Waiting requests by rank as of now, which is after this step's grants so far; none that it preempted."""
        for entry in self._taken:  # what the last walk took out; who was admitted leaves when met again
            heappush(self._heap, entry)
        self._taken = []
        if len(self._places) > self._prune_at:
            self._prune()
        for request in step.cache_changed:
            self.rank_again(request, self._rank(step, request))
        return self._walk(step)

    def rank_again(self, request: Request, rank: Any) -> None:
        """`request` stands by `rank` from now on, until its cached prefix changes; a walk in progress heeds it."""
        place = self._places.get(request)
        if place is None:
            place = self._places[request] = self._arrivals
            self._arrivals += 1
        entry = self._latest[request] = (rank, place, request)
        heappush(self._heap, entry)

    def _prune(self) -> None:
        """Forget the places of who has ended; who runs may be preempted, and is then among its equals where it was."""
        self._places = {r: place for r, place in self._places.items() if r.state == "running" or r.state in WAITING}
        self._prune_at = 1024 + 2 * len(self._places)

    def rank_of(self, request: Request) -> Any:
        """What the waiting `request` stands by."""
        return self._latest[request][0]

    def _walk(self, step: Step) -> Iterator[Request]:
        while self._heap:
            entry = heappop(self._heap)
            request = entry[-1]
            if self._latest.get(request) is not entry:
                continue  # ranked anew since
            if request.state in WAITING:
                self._taken.append(entry)
                if may_be_admitted(step, request):  # or it has run since this entry was made, until a moment ago
                    yield request
            else:
                del self._latest[request]


@dataclass(frozen=True)
class RankBy:  # a class, for a closure could not be pickled with its policy
    """A rank for a `RankedQueue` that looks at the request alone."""

    rank: Callable[[Request], Any]

    def __call__(self, step: Step, request: Request) -> Any:
        return self.rank(request)


def smallest_first(requests: Iterable[Request], rank: Callable[[Request], Any]) -> Iterator[Request]:
    """`requests` by `rank`, smallest first, equals in the order given; what is not asked for is not sorted.

    For ranks that change with time: linear in the number of requests, so ask only when somebody can be admitted.
    """
    heap = [(rank(request), i, request) for i, request in enumerate(requests)]
    heapify(heap)
    while heap:
        yield heappop(heap)[2]


def overdue_first(step: Step, order: Iterable[Request], after_s: float) -> Iterator[Request]:
    """Waiting requests that arrived `after_s` ago or earlier, in arrival order, then the others in `order`.

    Bounds the wait under any order: who is overdue is overtaken by nobody who is not.
    """
    bar = step.now - after_s
    overdue: dict[Request, None] = {}
    for request in takewhile(lambda request: request.arrival_s <= bar, step.waiting):
        overdue[request] = None
        yield request
    yield from (request for request in order if request not in overdue)
