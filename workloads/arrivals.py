"""Arrival processes: endless streams of times in seconds, drawn in chunks.

Renewal processes are given by their rate (arrivals a second) and the shape of their gaps; `RateCurve` bends any of them
to a rate that changes with time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from schedlab.framework.errors import ConfigError

CHUNK = 4096


class Arrivals(Protocol):
    """A process; `times` yields non-decreasing float64 seconds in chunks, without end unless the process ends."""

    def times(self, rng: np.random.Generator) -> Iterator[np.ndarray]: ...


def first_arrivals(process: Arrivals, rng: np.random.Generator, count: int) -> np.ndarray:
    """The first `count` times of a process, float64 seconds."""
    parts, have = [], 0
    for chunk in process.times(rng):
        parts.append(chunk)
        have += len(chunk)
        if have >= count:
            return np.concatenate(parts)[:count]
    raise ConfigError(f"workload.arrivals: the process ends after {have} arrivals, {count} are needed")


class Renewal:
    """Independent gaps of one distribution. A subclass gives `gaps` of mean 1 and has a `rate`."""

    rate: float

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """float64 [n], mean 1."""
        raise NotImplementedError

    def check(self, **positive: float) -> None:
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{type(self).__name__}.{name}={value}, expected a finite number above 0")

    def times(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        last = 0.0
        while True:
            times = last + np.cumsum(self.gaps(rng, CHUNK)) / self.rate
            last = float(times[-1])
            yield times


@dataclass
class Poisson(Renewal):
    """Memoryless arrivals."""

    rate: float

    def __post_init__(self) -> None:
        self.check(rate=self.rate)

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.standard_exponential(n)


@dataclass
class Gamma(Renewal):
    """Gamma gaps of coefficient of variation `cv`: shape 1/cv², so cv 1 is Poisson and above 1 is bursty.

    vLLM's `burstiness` is the shape: cv = 1 / sqrt(burstiness).
    """

    rate: float
    cv: float

    def __post_init__(self) -> None:
        self.check(rate=self.rate, cv=self.cv)

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.gamma(1 / self.cv**2, self.cv**2, n)


@dataclass
class Weibull(Renewal):
    """Weibull gaps of the given shape, scaled to the rate: their mean is scale · Γ(1 + 1/shape)."""

    rate: float
    shape: float

    def __post_init__(self) -> None:
        self.check(rate=self.rate, shape=self.shape)

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.weibull(self.shape, n) / math.gamma(1 + 1 / self.shape)


@dataclass
class Constant(Renewal):
    """Equal gaps."""

    rate: float

    def __post_init__(self) -> None:
        self.check(rate=self.rate)

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.ones(n)


@dataclass
class AllAtOnce:
    """Everything at time 0, as in offline throughput: `count` requests, or as many as the workload has."""

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"AllAtOnce.count={self.count}, expected null or at least 1")

    def times(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        if self.count is not None:
            yield np.zeros(self.count)
        while self.count is None:
            yield np.zeros(CHUNK)


@dataclass
class RateCurve:
    """A renewal process whose rate follows a curve; it ends with the curve.

    points : (time in s, rate) in order of time. `shape` linear joins them (ramps); step holds each until the next.
    gaps   : the process to bend; its own rate is ignored. Arrival k comes where the integral of the rate equals the
             k-th arrival of the process at rate 1 (time rescaling), which for Poisson is exact.
    """

    points: Sequence[Sequence[float]]
    gaps: Renewal
    shape: str = "linear"

    def __post_init__(self) -> None:
        points = np.array([tuple(p) for p in self.points], dtype=float)
        if points.ndim != 2 or points.shape[1] != 2 or len(points) < 2:
            raise ConfigError(f"RateCurve.points={self.points}, expected at least two (time, rate) pairs")
        if (np.diff(points[:, 0]) < 0).any() or not np.isfinite(points).all() or (points < 0).any():
            raise ConfigError(f"RateCurve.points={self.points}, expected finite, at least 0, and in order of time")
        if self.shape not in ("linear", "step"):
            raise ConfigError(f"RateCurve.shape={self.shape}, expected linear or step")
        start, stop = points[:-1], points[1:]
        self._from_s, self._length = start[:, 0], stop[:, 0] - start[:, 0]
        self._rate = start[:, 1]
        self._slope = (stop[:, 1] - start[:, 1]) / np.where(self._length > 0, self._length, 1)
        if self.shape == "step":
            self._slope = np.zeros_like(self._slope)
        expected = self._rate * self._length + self._slope * self._length**2 / 2
        self._expected = np.concatenate([[0.0], np.cumsum(expected)])

    def times(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        last = 0.0
        while last < self._expected[-1]:
            unit = last + np.cumsum(self.gaps.gaps(rng, CHUNK))
            last = float(unit[-1])
            yield self._inverse(unit[unit < self._expected[-1]])

    def _inverse(self, counts: np.ndarray) -> np.ndarray:
        """Times at which the expected number of arrivals reaches `counts`."""
        part = np.searchsorted(self._expected, counts, side="right") - 1
        rest, rate, slope = counts - self._expected[part], self._rate[part], self._slope[part]
        # rate·t + slope·t²/2 = rest, in the form that does not cancel for small slopes
        root = rate + np.sqrt(np.maximum(rate**2 + 2 * slope * rest, 0))
        return self._from_s[part] + np.where(root > 0, 2 * rest / np.where(root > 0, root, 1), 0)
