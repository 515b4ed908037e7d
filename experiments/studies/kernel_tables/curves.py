"""Interpolation in measured times: logarithmic on both axes, as times are near powers of their sizes piece by piece."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedlab.framework.errors import ConfigError

Numbers = Sequence[float] | np.ndarray
REACH = 2.0
"""How far beyond a table's range a size may lie, as a factor."""


@dataclass(frozen=True)
class Curve:
    """Times at increasing sizes. `power` is how they grow beyond the last size: 1 linearly, 2 with its square.

    log_sizes, log_us : float64 [points], increasing sizes
    """

    log_sizes: np.ndarray
    log_us: np.ndarray
    power: float = 1.0

    @classmethod
    def of(cls, sizes: Numbers, times_us: Numbers, power: float = 1.0) -> Curve:
        """Of points in any order; the least time counts where a size was measured more than once."""
        best: dict[float, float] = {}
        for size, us in zip(map(float, sizes), map(float, times_us), strict=True):
            best[size] = min(us, best.get(size, math.inf))
        ordered = sorted(best)
        return cls(np.log(ordered), np.log([best[size] for size in ordered]), power)

    @property
    def most(self) -> float:
        """The largest size that is answered for."""
        return math.exp(float(self.log_sizes[-1])) * REACH

    def log_at(self, size: float) -> float:
        """log µs at `size`; below the first size its time, which is all overhead there.

        ConfigError for a size more than `REACH` times the last.
        """
        x = math.log(size)
        last = float(self.log_sizes[-1])
        if size > self.most * (1 + 1e-9):
            raise ConfigError(f"kernel tables: measured up to a size of {math.exp(last):.0f}, found {size:g}")
        if x > last:
            return float(self.log_us[-1]) + self.power * (x - last)
        return float(np.interp(x, self.log_sizes, self.log_us))

    def __call__(self, size: float) -> float:
        """µs."""
        return math.exp(self.log_at(size))


def neighbours(grid: Sequence[int], value: float, what: str) -> list[tuple[int, float]]:
    """The grid points around `value` and their weights, by logarithms: the first alone below the grid, the line through
    the last two above it.

    ConfigError for a value further than `REACH` beyond either end.
    """
    if not grid[0] / REACH <= value <= grid[-1] * REACH:
        reach = f"{grid[0] / REACH:g} to {grid[-1] * REACH:g}"
        raise ConfigError(f"kernel tables: {what}: expected {reach}, found {value:g}")
    i = min(bisect_left(grid, value), len(grid) - 1)
    if i == 0 or grid[i] == value:
        return [(grid[i], 1.0)]
    low, high = grid[i - 1], grid[i]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


@dataclass(frozen=True)
class Surface:
    """A curve at each value of a second size, such as the batch; interpolated between them and extended beyond."""

    curves: Mapping[int, Curve]
    what: str

    def answers(self, value: float, size: float) -> bool:
        """Whether both lie within reach of what was measured: larger values may have been measured at fewer sizes."""
        grid = sorted(self.curves)
        if value > grid[-1] * REACH:
            return False
        return all(size <= self.curves[at].most for at, _ in neighbours(grid, value, self.what))

    def __call__(self, value: float, size: float) -> float:
        """µs."""
        around = neighbours(sorted(self.curves), value, self.what)
        return math.exp(sum(weight * self.curves[at].log_at(size) for at, weight in around))
