"""The gaps between the tokens of each stream, as `itl` counts them, over engine time: from the logs alone.

A logged row may be a jump over many boundaries; each boundary of it is found again by the rates of the run's manifest.
Nanoseconds of engine time; tables of steps are taken a part at a time, however long the run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from schedlab.experiments.analysis.history import Histories, History, Phase, histories
from schedlab.framework.cost.expand import boundaries
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables

TOGETHER = 1 << 16
"""Steps of jumps that are looked at together, about."""


def longest_gaps(run: RunTables, points: int) -> tuple[np.ndarray, np.ndarray]:
    """The end of each of `points` bins of engine time, and the longest gap that ended in it, 0 where none did; seconds.

    No gap is thinned away: the largest is the run's `itl/max`, but for requests that had not ended with the run.
    """
    steps = run.steps
    if not len(steps["now_ns"]):
        return np.zeros(0), np.zeros(0)
    whole = steps["now_ns"][-1] + steps["duration_ns"][-1]
    edges, longest = np.linspace(0, whole, points + 1)[1:], np.zeros(points)
    for when, gap in gaps(run):
        np.maximum.at(longest, np.searchsorted(edges, when).clip(max=points - 1), gap)
    return edges / NS, longest / NS


def gaps(run: RunTables) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """When gaps ended and how long they were; a gap that several streams share comes once."""
    steps = run.steps
    end_ns = steps["now_ns"] + steps["duration_ns"]
    first_ns, jumps = end_ns.copy(), np.flatnonzero(steps["repeat"] > 1)
    total = np.cumsum(steps["repeat"][jumps])
    for part in np.split(jumps, np.flatnonzero(np.diff(total // TOGETHER)) + 1):
        row, ends = boundaries(run, part)
        first_ns[part] = ends[np.searchsorted(row, part)]
        same = row[1:] == row[:-1]  # who decodes in a jump lives through all of it
        yield ends[1:][same], np.diff(ends)[same]
    yield _Streams(histories(run), first_ns, end_ns).gaps()


# ---- streams ----


class _Streams:
    """Gaps that end with the first boundary of a row, by following every request from token to token.

    `first_ns` and `end_ns`: when the first and the last boundary of each row ended, int64 [R].
    """

    def __init__(self, past: Histories, first_ns: np.ndarray, end_ns: np.ndarray) -> None:
        self._first_ns, self._end_ns = first_ns, end_ns
        listed = np.zeros(len(end_ns), dtype=bool)
        listed[past.list_rows] = True
        self._all_rows = np.flatnonzero((past.decodes > 0) & ~listed)
        self._together = np.zeros(len(self._all_rows) + 1, dtype=np.int64)
        self._rows: list[np.ndarray] = []
        self._gaps: list[np.ndarray] = []
        for history in past.requests:
            self._follow(history)

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """When they ended, and how long they were."""
        at = np.flatnonzero(np.cumsum(self._together)[:-1] > 0)
        rows = self._all_rows[at]
        shared = self._first_ns[rows] - self._end_ns[self._all_rows[at - 1]]
        every = np.concatenate([rows, *self._rows])
        return self._first_ns[every], np.concatenate([shared, *self._gaps])

    def _follow(self, history: History) -> None:
        last: int | None = None
        for phase in history.phases:
            if phase.kind == "prefill" and phase.grants and phase.grants[-1].emits:
                row = phase.grants[-1].row
                if last is not None:
                    self._add(np.array([row]), last)
                last = int(self._end_ns[row])
            elif phase.kind == "decode" and last is not None:
                last = self._decode(history, phase, last)

    def _decode(self, history: History, phase: Phase, last: int) -> int:
        """A phase of decode rows after a token at `last`; returns when its last one was.

        A stream that always decodes with all others shares every gap but the first.
        """
        low, high = np.searchsorted(self._all_rows, (phase.first, phase.stop)).tolist()
        start, stop = (bisect_left(history.listed, row) for row in (phase.first, phase.stop))
        rows = self._all_rows[low:high]
        if start < stop:
            rows = np.union1d(rows, history.listed[start:stop])
            self._add(rows, last)
        elif low < high:
            self._add(rows[:1], last)
            self._together[low + 1] += 1
            self._together[high] -= 1
        return int(self._end_ns[rows[-1]]) if len(rows) else last

    def _add(self, rows: np.ndarray, last: int) -> None:
        """A token at the first boundary of each of `rows`, after one at `last`."""
        self._rows.append(rows)
        self._gaps.append(self._first_ns[rows] - np.append(last, self._end_ns[rows[:-1]]))
