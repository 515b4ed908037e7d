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

    def boundary(self) -> int:
        """The same, when an iteration may begin: a clock that replays moves on to the start of the next one."""

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

    def boundary(self) -> int:
        return self._now

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        self._now += modelled_ns

    def idle_until(self, t_ns: int) -> None:
        if t_ns > self._now:
            self._now = t_ns


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

    def boundary(self) -> int:
        return self._now

    def start(self) -> None:
        self._started = time.thread_time_ns()

    def stop(self, modelled_ns: int) -> None:
        self._now += max(time.thread_time_ns() - self._started, 1)

    def idle_until(self, t_ns: int) -> None:
        self._now = max(self._now, t_ns)


class WallClock:
    """Real time since it was first asked; idle time is slept. What an engine prepares before its run takes none."""

    measures = True

    def __init__(self) -> None:
        self._zero: int | None = None

    def now(self) -> int:
        if self._zero is None:
            self._zero = time.monotonic_ns()
        return time.monotonic_ns() - self._zero

    def boundary(self) -> int:
        return self.now()

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        pass

    def idle_until(self, t_ns: int) -> None:
        while (left := t_ns - self.now()) > 0:
            time.sleep(left / 1e9)


class RecordedClock:
    """Replays the logged start and duration of every iteration, so that a measured run can be re-decided exactly.

    After the last of them, when there is nothing to decide any more, time passes by idling alone.
    """

    measures = True

    def __init__(self, starts_ns: Iterable[int], durations_ns: Iterable[int]) -> None:
        self._steps: Iterator[tuple[int, int]] = iter(zip(starts_ns, durations_ns, strict=True))
        self._next = next(self._steps, None)
        self._duration = 0
        self._now = 0

    def now(self) -> int:
        return self._now

    def boundary(self) -> int:
        if self._next is not None:
            start, self._duration = self._next
            if start < self._now:
                raise ConfigError(f"recorded clock: time runs backwards from {self._now} to {start} ns")
            self._now = start
            self._next = next(self._steps, None)
        return self._now

    def start(self) -> None:
        pass

    def stop(self, modelled_ns: int) -> None:
        self._now += self._duration

    def idle_until(self, t_ns: int) -> None:
        if self._next is None:
            self._now = max(self._now, t_ns)
