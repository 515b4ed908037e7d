"""Requests in the order of an integer each, so that any of them can leave or come back at its place. Knows no more."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import overload

from schedlab.framework.request import EngineRequest, Request


class Lineup:
    """`requests` in ascending order of the keys that they were added with; the list object is always the same one.

    `view` is what a policy sees of it. `freeze` gives the views handed out so far the contents of this moment for good.
    """

    __slots__ = ("_keys", "requests", "view")

    def __init__(self) -> None:
        self._keys: list[int] = []
        self.requests: list[EngineRequest] = []
        self.view = View(self.requests)

    def freeze(self) -> None:
        """Something is about to leave in the middle of a step: views of it stay as they are."""
        self.view.keep()
        self.view = View(self.requests)

    def add(self, key: int, request: EngineRequest) -> None:
        """Put `request` in its place; usually the last."""
        if not self._keys or key > self._keys[-1]:
            self._keys.append(key)
            self.requests.append(request)
        else:
            place = bisect_left(self._keys, key)
            self._keys.insert(place, key)
            self.requests.insert(place, request)

    def remove(self, key: int) -> None:
        """Take out the request that was added with `key`."""
        place = bisect_left(self._keys, key)
        del self._keys[place]
        del self.requests[place]


class View(Sequence[Request]):
    """A read-only sequence over the engine's own list, or, once kept, over what that list was."""

    __slots__ = ("_requests",)

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def keep(self) -> None:
        """Stay as it is now, whatever happens to the list."""
        self._requests = tuple(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests))  # the list may lose who is walked over

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._requests[index]


class QueueView(View):
    """A view of a list that changes only between steps, and may be long: walking over it copies nothing."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
