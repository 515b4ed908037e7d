"""The queues that vLLM's scheduler is given: all that wait, in arrival order, and those that a step has granted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue


class ArrivalQueue(RequestQueue):  # type: ignore[misc]
    """vLLM's waiting requests in the order of `place(request)`, so that a preempted one waits where it did before.

    Coming and leaving take O(log n) comparisons.
    """

    def __init__(self, place: Callable[[Any], int]) -> None:
        self._place = place
        self._places: list[int] = []
        self._requests: list[Any] = []

    def add_request(self, request: Any) -> None:
        place = self._place(request)
        if not self._places or place > self._places[-1]:
            self._places.append(place)
            self._requests.append(request)
        else:
            at = bisect_left(self._places, place)
            self._places.insert(at, place)
            self._requests.insert(at, request)

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        at = self._find(request)
        assert at is not None, f"{request.request_id} does not wait"
        del self._places[at]
        del self._requests[at]

    def remove_requests(self, requests: Iterable[Any]) -> None:
        for request in list(requests):
            if self._find(request) is not None:
                self.remove_request(request)

    def _find(self, request: Any) -> int | None:
        at = bisect_left(self._places, self._place(request))
        return at if at < len(self._requests) and self._requests[at] is request else None

    def pop_request(self) -> Any:
        self._places.pop(0)
        return self._requests.pop(0)

    def peek_request(self) -> Any:
        return self._requests[0]

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._requests)


class Granted(list[Any]):
    """The waiting requests that vLLM's own loop is shown: exactly those that the step admits, in that order."""

    def peek_request(self) -> Any:
        return self[0]

    def pop_request(self) -> Any:
        return self.pop(0)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        self[:0] = list(requests)
