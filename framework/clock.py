"""Engine time in integer nanoseconds: measured, modelled or replayed. Knows nothing of what a step does.

The engine brackets every iteration with `start` and `stop`; `idle_until` passes time in which nothing runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from schedlab.framework.errors import ConfigError


class Clock(Protocol):
    """`measures`: durations are measured, so a held decision is logged step by step."""

    measures: bool

    def now(self) -> int:
        """Nanoseconds since the run began."""

    def start(self) -> None:
        """An iteration begins."""

    def stop(self, modelled_ns: int) -> None:
        """The iteration ended; its executor modelled or measured `modelled_ns`."""

    def idle_until(self, t_ns: int) -> None:
        """Nothing runs until `t_ns`."""


class VirtualClock:
    """Advances by modelled durations alone."""

    measures = False

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        return self._now

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        self._now += modelled_ns

    def idle_until(self, t_ns: int) -> None:
        self._now = max(self._now, t_ns)


class BusyClock:
    """Advances by the thread CPU time of each iteration and skips idle time: immune to noisy neighbours.

    Valid only where the work runs on the engine's own thread: one torch thread, no accelerator.
    """

    measures = True

    def __init__(self) -> None:
        self._now = 0
        self._started = 0

    def now(self) -> int:
        return self._now

    def start(self) -> None:
        self._started = time.thread_time_ns()

    def stop(self, modelled_ns: int) -> None:
        self._now += max(time.thread_time_ns() - self._started, 1)

    def idle_until(self, t_ns: int) -> None:
        self._now = max(self._now, t_ns)


class WallClock:
    """Real time; idle time is slept."""

    measures = True

    def __init__(self) -> None:
        self._zero = time.monotonic_ns()

    def now(self) -> int:
        return time.monotonic_ns() - self._zero

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        pass

    def idle_until(self, t_ns: int) -> None:
        while (left := t_ns - self.now()) > 0:
            time.sleep(left / 1e9)


class RecordedClock:
    """Replays the logged `now` of every iteration's start, so that a measured run can be re-decided exactly.

    After the last of them, when there is nothing to decide any more, time passes by idling alone.
    """

    measures = True

    def __init__(self, boundaries_ns: Iterable[int]) -> None:
        self._boundaries: Iterator[int] = iter(boundaries_ns)
        self._now = 0
        self._next()

    def _next(self) -> bool:
        following = next(self._boundaries, None)
        if following is None:
            return False
        if following < self._now:
            raise ConfigError(f"recorded clock: time runs backwards from {self._now} to {following} ns")
        self._now = following
        return True

    def now(self) -> int:
        return self._now

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        self._next()

    def idle_until(self, t_ns: int) -> None:
        if not self._next():
            self._now = max(self._now, t_ns)
