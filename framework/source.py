"""Where the engine's requests come from: the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from schedlab.framework.request import EngineRequest


class Source(Protocol):
    """Open loop, closed loop and sessions in three methods. Times are ns on the engine's clock.

    Requests come out in trace order within one instant; `visible_ns` (arrival plus preparation) is the time of an
    arrival here. `finished` is called once for every terminal state and may add arrivals (a session's next turn).
    """

    def peek(self) -> int | None:
        """Earliest pending `visible_ns`, or None when nothing is pending now."""

    def pop(self, now_ns: int) -> list[EngineRequest]:
        """All pending requests with `visible_ns <= now_ns`, in order."""

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        """`request` reached a terminal state at `now_ns`."""


class ListSource:
    """Open loop over a list of requests in trace order, sorted by `visible_ns`."""

    def __init__(self, requests: list[EngineRequest]) -> None:
        for earlier, later in zip(requests, requests[1:], strict=False):
            if later.visible_ns < earlier.visible_ns:
                raise ValueError(
                    f"requests must be sorted by arrival: {later.request_id} precedes {earlier.request_id}"
                )
        self._requests = requests
        self._next = 0

    def peek(self) -> int | None:
        return self._requests[self._next].visible_ns if self._next < len(self._requests) else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        start = self._next
        while self._next < len(self._requests) and self._requests[self._next].visible_ns <= now_ns:
            self._next += 1
        return self._requests[start : self._next]

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        pass
