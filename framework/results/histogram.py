"""Exact statistics of a weighted histogram.

Memory grows with the number of distinct values, never with the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np


class Histogram:
    """Distinct int64 values with positive counts, seen as the sorted array in which each value is repeated."""

    __slots__ = ("counts", "total", "values")

    def __init__(self, counts: Mapping[int, int]) -> None:
        order = sorted(value for value, count in counts.items() if count)
        self.values = np.array(order, dtype=np.int64)
        self.counts = np.array([counts[value] for value in order], dtype=np.int64)
        self.total = sum(counts.values())

    def mean(self) -> float | None:
        if not self.total:
            return None
        total: int = sum(map(mul, self.values.tolist(), self.counts.tolist()))  # of Python's integers: exact
        return total / self.total

    def std(self) -> float | None:
        """Population standard deviation, as `numpy.std`."""
        mean = self.mean()
        if mean is None:
            return None
        return float(np.sqrt(np.sum(self.counts * (self.values - mean) ** 2) / self.total))

    def max(self) -> int | None:
        return int(self.values[-1]) if self.total else None

    def percentiles(self, ranks: Sequence[float]) -> list[float | None]:
        """What `numpy.percentile(expanded, ranks)` gives by its default method (type 7 of Hyndman and Fan)."""
        if not self.total:
            return [None] * len(ranks)
        position = np.asarray(ranks, dtype=np.float64) / 100 * (self.total - 1)
        lower = np.floor(position).astype(np.int64)
        low, high = self._at(lower), self._at(np.minimum(lower + 1, self.total - 1))
        weight = position - lower
        # numpy interpolates from the nearer end; doing the same gives the same bits
        near_low = low + (high - low) * weight
        near_high = high - (high - low) * (1 - weight)
        return [float(v) for v in np.where(weight < 0.5, near_low, near_high)]

    def _at(self, index: np.ndarray) -> np.ndarray:
        """Values at `index` of the expanded array."""
        return self.values[np.searchsorted(np.cumsum(self.counts), index, side="right")]
