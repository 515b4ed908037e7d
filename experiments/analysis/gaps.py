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
    together = gaps_together(run, first_ns, end_ns)
    yield _Streams(histories(run), first_ns, end_ns).gaps() if together is None else together


# ---- streams ----


def gaps_together(run: RunTables, first_ns: np.ndarray, end_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """What `_Streams` finds, from steps and requests alone; None where not every row decodes all or none of decoding.

    Requests decode between their first token and their end at most, so that this is so where each row decodes as many
    as are between them. `first_ns` and `end_ns`: when the first and the last boundary of each row ended, int64 [R].
    """
    steps, requests = run.steps, run.requests
    emitted = ~np.isnan(requests["first_token_s"])
    token_ns, finished_ns = (np.rint(requests[name][emitted] * NS) for name in ("first_token_s", "finished_s"))
    first, stop = np.searchsorted(end_ns, token_ns), np.searchsorted(steps["now_ns"], finished_ns)
    if not np.array_equal(end_ns.take(first, mode="clip"), token_ns):
        return None
    rows = np.flatnonzero(steps["decode_requests"] > 0)
    low = np.searchsorted(rows, first + 1)
    high = np.maximum(np.searchsorted(rows, stop), low)
    tokens = np.append(0, np.cumsum(steps["repeat"][rows]))
    if not (
        np.array_equal(_covering(low, high, len(rows)), steps["decode_requests"][rows])
        and np.array_equal(1 + tokens[high] - tokens[low], requests["output_tokens"][emitted])
    ):
        return None
    begun = low < high
    opening = rows[low[begun]]
    shared = np.flatnonzero(_covering(low[begun] + 1, high[begun], len(rows)))
    since_ns = np.concatenate([end_ns[rows[shared - 1]], token_ns[begun].astype(np.int64)])
    when_ns = first_ns[np.concatenate([rows[shared], opening])]
    return when_ns, when_ns - since_ns


def _covering(low: np.ndarray, high: np.ndarray, length: int) -> np.ndarray:
    """How many of the intervals [low, high) hold each of 0 .. length - 1; int64 [length]."""
    change = np.bincount(low, minlength=length + 1) - np.bincount(high, minlength=length + 1)
    return np.asarray(np.cumsum(change)[:length])


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
