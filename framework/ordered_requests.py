"""Requests in the order of an integer each, so that any of them can leave or come back at its place. Knows no more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import overload

from schedlab.framework.request import EngineRequest, Request


class OrderedRequests:
    """`requests` in ascending order of the keys that they were added with; the list object is always the same one."""

    __slots__ = ("_keys", "_snapshot", "requests")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._snapshot: tuple[EngineRequest, ...] | None = ()
        self.requests: list[EngineRequest] = []

    def snapshot(self) -> tuple[EngineRequest, ...]:
        """The requests as they are now, for good; made once for as long as nobody comes or leaves."""
        if self._snapshot is None:
            self._snapshot = tuple(self.requests)
        return self._snapshot

    def add(self, key: int, request: EngineRequest) -> None:
        """Put `request` in its place; usually the last."""
        self._snapshot = None
        if not self._keys or key > self._keys[-1]:
            self._keys.append(key)
            self.requests.append(request)
        else:
            place = bisect_left(self._keys, key)
            self._keys.insert(place, key)
            self.requests.insert(place, request)

    def remove(self, key: int) -> None:
        """Take out the request that was added with `key`."""
        self._snapshot = None
        place = bisect_left(self._keys, key)
        del self._keys[place]
        del self.requests[place]


class QueueView(Sequence[Request]):
    """A read-only sequence over a list that changes only between steps, and may be long: nothing is copied."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._requests[index]
