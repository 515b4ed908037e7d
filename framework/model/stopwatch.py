"""How long a device worked on a step: its own clock where it has one, the host's elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Stopwatch(Protocol):
    def start(self) -> None:
        """What is asked of the device from here on is timed."""

    def stop(self) -> None:
        """What was asked of it up to here is timed."""

    def elapsed_ns(self) -> int:
        """Nanoseconds between the two, once the device has done it; waits if it has not."""


def stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()


class HostStopwatch:
    """Of a device that works while the host waits."""

    def start(self) -> None:
        self._began = time.perf_counter_ns()

    def stop(self) -> None:
        self._ended = time.perf_counter_ns()

    def elapsed_ns(self) -> int:
        return self._ended - self._began


class CudaStopwatch:
    """By two events in the stream, so that the host's own time before and after the device's work does not count."""

    def __init__(self) -> None:
        self._began, self._ended = (_event(), _event())

    def start(self) -> None:
        self._began.record()

    def stop(self) -> None:
        self._ended.record()

    def elapsed_ns(self) -> int:
        self._ended.synchronize()
        return round(1e6 * float(self._began.elapsed_time(self._ended)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
