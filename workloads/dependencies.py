"""Which requests wait for which: from the parents of each row to the columns of a trace.

A request arrives its think time after the last of its parents has ended and was delivered. `after` is the parent whose
prompt it continues, `also_after` are the others. Requests that wait for one another, directly or not, and those of one
session are a program. File order is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.files import shown
from schedlab.workloads.records import Batch
from schedlab.workloads.soundness import check, request_name, request_names
from schedlab.workloads.trace import BlockIds, Labels, Trace


class Names:
    """Lists of request ids of the rows, end to end: a file has too many of them to keep each as a list."""

    def __init__(self, key: str) -> None:
        self.names: list[str] = []
        self._key = key
        self._counts: array[int] = array("q")

    def add(self, batch: Batch, column: Sequence[object]) -> None:
        """The lists of the next rows; None for none. TraceError for anything else."""
        lists: list[list[str]] = [[] if value is None else value for value in column]  # type: ignore[misc]
        if not (set(map(type, lists)) <= {list} and set(map(type, names := list(chain.from_iterable(lists)))) <= {str}):
            row = next(i for i, v in enumerate(lists) if not (type(v) is list and set(map(type, v)) <= {str}))
            raise batch.fault(row, f"{self._key} is {shown(lists[row])}, expected a list of request ids")
        self._counts.extend(map(len, lists))
        self.names += names

    def skip(self, rows: int) -> None:
        """The next rows have none."""
        self._counts.extend([0] * rows)

    def per_row(self) -> np.ndarray:
        return np.frombuffer(self._counts, dtype=np.int64)


def named_parents(trace: Trace, wanted: Sequence[str], counts: np.ndarray) -> BlockIds:
    """The rows that bear the names in `wanted`, of which row i has `counts[i]`, each once.

    TraceError for a name that no row has, and for one that two have.
    """
    check(trace)
    names = request_names(trace)
    row_of = dict(zip(names, range(len(names)), strict=True))
    child = np.repeat(np.arange(len(trace)), counts)
    try:
        values = np.array([row_of[name] for name in wanted], dtype=np.int64)
    except KeyError:
        place = next(place for place, name in enumerate(wanted) if name not in row_of)
        what = f"waits for {shown(wanted[place])}, which is no request of the file"
        raise fault(trace, int(child[place]), what) from None
    return _once(BlockIds(np.concatenate([[0], np.cumsum(counts)]), values, 1), child)


def _once(parents: BlockIds, child: np.ndarray) -> BlockIds:
    """Without what a row names again."""
    edge = child * max(len(parents), 1) + parents.values
    first = np.sort(np.unique(edge, return_index=True)[1])
    if len(first) == len(child):
        return parents
    counts = np.bincount(child[first], minlength=len(parents))
    return BlockIds(np.concatenate([[0], np.cumsum(counts)]), parents.values[first], 1)


def fault(trace: Trace, row: int, what: str) -> TraceError:
    return TraceError(f"{trace.provenance.path or trace.name}: row {trace.source_row[row]} {what}")


def with_parents(trace: Trace, parents: BlockIds, think_ns: np.ndarray) -> Trace:
    """`trace` with each row waiting for all of `parents`, whose values are rows, and then for `think_ns`.

    The parent whose prompt a row continues is the last in its own session, else the first. Rows that have parents and
    no arrival of their own, or one that precedes a parent's, are placed at their earliest possible arrival; that is no
    time at which they arrive. TraceError for a circle.
    """
    depth = np.empty(len(trace), dtype=np.int64)
    levels = in_levels(parents, lambda circle: _circle(trace, circle))
    for level, rows in enumerate(levels):
        depth[rows] = level
    after, others = _continued(trace, parents)
    tied = after >= 0
    think = np.where(tied, np.maximum(think_ns, 0), -1)
    trace = replace(trace, after=after if tied.any() else None, think_ns=think if tied.any() else None)
    if len(others.values) or _leaves_session(trace, after):
        columns = {"depth": depth, "program": programs(trace, parents)}
        trace = replace(trace, also_after=others if len(others.values) else None, **columns)  # type: ignore[arg-type]
    return _placed(trace, parents, levels)


def depths(trace: Trace) -> np.ndarray:
    """How many requests are on the longest chain before each, int64 [N], by the ties that are left in `trace`."""
    depth = np.zeros(len(trace), dtype=np.int64)
    if trace.after is None:
        return depth
    tied = trace.after >= 0
    parents = BlockIds(np.concatenate([[0], np.cumsum(tied)]), trace.after[tied], 1)  # of one's own level, the last
    for level, rows in enumerate(in_levels(parents, lambda circle: _circle(trace, circle))):
        depth[rows] = level
    return depth if trace.depth is None else np.maximum(depth, trace.depth)


def _leaves_session(trace: Trace, after: np.ndarray) -> bool:
    """Whether any row follows one of another session, or of none: else sessions say all that programs would."""
    if trace.session is None:
        return bool((after >= 0).any())
    codes = trace.session.codes
    return bool(((after >= 0) & ((codes < 0) | (codes != codes[after]))).any())


def in_levels(parents: BlockIds, circle: Callable[[list[int]], Exception]) -> list[np.ndarray]:
    """Rows by the number of requests on the longest chain before them; all parents of a row stand in earlier levels.

    Raises what `circle` makes of rows that wait for each other.
    """
    n = len(parents)
    by_parent = np.argsort(parents.values, kind="stable")
    starts = np.searchsorted(parents.values[by_parent], np.arange(n + 1))
    children = BlockIds(starts, np.repeat(np.arange(n), parents.counts)[by_parent], 1)
    waiting, levels = parents.counts, [np.flatnonzero(parents.counts == 0)]
    while len(levels[-1]):
        reached, times = np.unique(children.take(levels[-1]).values, return_counts=True)
        waiting[reached] -= times
        levels.append(reached[waiting[reached] == 0])
    if waiting.any():
        raise circle(_some_circle(parents, waiting))
    return levels[:-1]


def _some_circle(parents: BlockIds, waiting: np.ndarray) -> list[int]:
    """Rows of which each waits for the next, and the last for the first."""
    row, path = int(np.argmax(waiting > 0)), list[int]()
    while row not in path:
        path.append(row)
        row = next(p for p in parents.row(row).tolist() if waiting[p])
    return path[path.index(row) :]


def _circle(trace: Trace, rows: list[int]) -> TraceError:
    numbers = [int(trace.source_row[row]) for row in rows]
    path = " → ".join(map(str, [*numbers[:8], *(["…"] if len(numbers) > 8 else []), numbers[0]]))
    return fault(trace, rows[0], f"waits for itself: {path}")


def _continued(trace: Trace, parents: BlockIds) -> tuple[np.ndarray, BlockIds]:
    """`after`, and the parents beside it."""
    n, counts = len(trace), parents.counts
    child = np.repeat(np.arange(n), counts)
    after = np.full(n, -1, dtype=np.int64)
    after[counts > 0] = parents.values[parents.offsets[:-1][counts > 0]]
    if trace.session is not None:
        codes = trace.session.codes
        own = (codes[child] >= 0) & (codes[child] == codes[parents.values])
        after[child[own]] = parents.values[own]  # the last of a row stays
    other = parents.values != after[child]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(child[other], minlength=n))])
    return after, BlockIds(offsets, parents.values[other], 1)


def programs(trace: Trace, parents: BlockIds) -> Labels | None:
    """The program of each row, called after its first row's session, or request; none for a request on its own."""
    n = len(trace)
    ends = [(np.repeat(np.arange(n), parents.counts), parents.values)]
    if trace.session is not None:
        _, first, place = np.unique(trace.session.codes, return_index=True, return_inverse=True)
        named = np.flatnonzero(trace.session.codes >= 0)
        ends.append((named, first[place[named]]))
    leader = _components(n, np.concatenate([a for a, _ in ends]), np.concatenate([b for _, b in ends]))
    sizes = np.bincount(leader, minlength=n)
    alone = sizes[leader] == 1
    if trace.session is not None:
        alone &= trace.session.codes < 0
    if alone.all():
        return None
    leaders, code = np.unique(np.where(alone, n, leader), return_inverse=True)
    names = _program_names(trace, leaders[leaders < n].tolist())
    return Labels(np.where(alone, -1, code), tuple(names))


def _program_names(trace: Trace, leaders: Sequence[int]) -> list[str]:
    own = [request_name(trace, row) for row in leaders]
    if trace.session is None:
        return own
    by_session = [trace.session[row] or name for row, name in zip(leaders, own, strict=True)]
    return by_session if len(set(by_session)) == len(by_session) else own


def _components(n: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The lowest row that each is connected to, int64 [n]: neighbours take over the lower label until all agree."""
    label = np.arange(n)
    while True:
        low, high = np.minimum(label[a], label[b]), np.maximum(label[a], label[b])
        apart = low != high
        if not apart.any():
            return label
        np.minimum.at(label, high[apart], low[apart])
        while not np.array_equal(further := label[label], label):
            label = further


def _placed(trace: Trace, parents: BlockIds, levels: Sequence[np.ndarray]) -> Trace:
    """No row stands before a parent; rows without a stamp stand where they could begin at the earliest."""
    if trace.think_ns is None:
        return trace
    arrival, think = trace.arrival_ns.copy(), trace.think_ns
    stamped = np.ones(len(trace), dtype=bool) if trace.stamped is None else trace.stamped.astype(bool)
    if not stamped[levels[0]].all():
        row = int(levels[0][np.argmin(stamped[levels[0]])])
        raise fault(trace, row, "has neither an arrival time nor a request to wait for")
    for rows in levels[1:]:
        mine = parents.take(rows)
        earliest = np.maximum.reduceat(arrival[mine.values], mine.offsets[:-1])
        arrival[rows] = np.where(stamped[rows], np.maximum(arrival[rows], earliest), earliest + think[rows])
    return replace(trace, arrival_ns=arrival, stamped=None if stamped.all() else stamped)
