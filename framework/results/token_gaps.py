"""Gaps between a request's tokens, counted at a microsecond's resolution as they come."""

from __future__ import annotations

from collections.abc import Iterable


class TokenGaps:
    """`measured` counts the gaps of the measured window by microseconds; those outside are counted apart.

    `inside` says where the steps that are reported next lie.
    """

    __slots__ = ("_counts", "_outside", "measured")

    def __init__(self) -> None:
        self.measured: dict[int, int] = {}
        self._outside: dict[int, int] = {}
        self._counts = self.measured

    @property
    def inside(self) -> bool:
        return self._counts is self.measured

    @inside.setter
    def inside(self, inside: bool) -> None:
        self._counts = self.measured if inside else self._outside

    def add(self, gap_ns: int, count: int) -> None:
        us = (gap_ns + 500) // 1000
        self._counts[us] = self._counts.get(us, 0) + count

    def add_each(self, gaps_ns: Iterable[int], count: int) -> None:
        """`count` gaps of each length."""
        counts = self._counts
        for gap_ns in gaps_ns:
            us = (gap_ns + 500) // 1000
            counts[us] = counts.get(us, 0) + count
