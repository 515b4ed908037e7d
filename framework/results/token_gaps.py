"""Gaps between a request's tokens, counted at a microsecond's resolution as they come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from schedlab.framework.results.tables import integers

if TYPE_CHECKING:
    from schedlab.framework.fast_forward import StandingCost

FOLDED_STEPS = 1 << 16
"""Steps of jumps whose gaps are counted together: a few megabytes, however long the jumps."""


class TokenGaps:
    """`measured` counts the gaps of the measured window by microseconds; those outside are counted apart.

    `inside` says where the steps that are reported next lie.
    """

    __slots__ = ("_counts", "_even", "_even_steps", "_outside", "measured")

    def __init__(self) -> None:
        self.measured: defaultdict[int, int] = defaultdict(int)
        self._outside: defaultdict[int, int] = defaultdict(int)
        self._counts = self.measured
        self._even: list[int] = []
        self._even_steps = 0  # of all of them

    @property
    def inside(self) -> bool:
        return self._counts is self.measured

    @inside.setter
    def inside(self, inside: bool) -> None:
        if inside is not self.inside:
            self.fold()
            self._counts = self.measured if inside else self._outside

    def add(self, gap_ns: int, count: int) -> None:
        self._counts[(gap_ns + 500) // 1000] += count

    def add_each(self, gaps_ns: Iterable[int], count: int) -> None:
        """`count` gaps of each length."""
        counts = self._counts
        for gap_ns in gaps_ns:
            counts[(gap_ns + 500) // 1000] += count

    def add_even(self, count: int, cost: StandingCost, context: int, steps: int) -> None:
        """`count` gaps after each of `steps` steps, which take what `cost` says, from `context` on."""
        self._even += (count, cost.base, cost.slope, cost.shift, context, steps)
        self._even_steps += steps
        if self._even_steps >= FOLDED_STEPS:
            self.fold()

    def fold(self) -> None:
        """Count what `add_even` was given, step by step as if each had been added."""
        rows, self._even, self._even_steps = self._even, [], 0
        if rows:
            for gaps_us, counts in _even_gaps(*integers(rows).reshape(-1, 6).T):
                for gap_us, count in zip(gaps_us.tolist(), counts.tolist(), strict=True):
                    self._counts[gap_us] += count


def _even_gaps(
    count: np.ndarray, base: np.ndarray, slope: np.ndarray, shift: np.ndarray, context: np.ndarray, steps: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(gaps in microseconds, tokens that came after each) of rows of equal steps, at most FOLDED_STEPS at a time."""
    ends = np.cumsum(steps)
    for start in range(0, int(ends[-1]), FOLDED_STEPS):
        step = np.arange(start, min(start + FOLDED_STEPS, ends[-1]))
        row = np.searchsorted(ends, step, side="right")
        ahead = step - (ends - steps)[row]
        gaps_ns = (base[row] + slope[row] * (context[row] + count[row] * ahead)) >> shift[row]
        gaps_us, which = np.unique((gaps_ns + 500) // 1000, return_inverse=True)
        counts = np.zeros(len(gaps_us), dtype=np.int64)
        np.add.at(counts, which, count[row])
        yield gaps_us, counts
