"""The one internal record of a workload: columns of numpy arrays, one entry a request.

Knows what a request is before an engine sees it: when it is meant to arrive, how long it is, what its prompt is made
of, whose turn it is. Knows no file format (readers/), no choice of rows (select.py), no arrival process (arrivals.py).
Times are integer nanoseconds from the trace's own zero; in an optional column -1 stands for "none" (not in `priority`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypeAlias

import numpy as np

from schedlab.framework.request import SLO

Column: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """A column of names: `names[codes[i]]`, or none where the code is -1."""

    codes: np.ndarray
    names: tuple[str, ...]

    @classmethod
    def of(cls, values: Iterable[str | None]) -> Self:
        """Names numbered in order of first appearance."""
        number: dict[str, int] = {}
        codes = [-1 if v is None else number.setdefault(v, len(number)) for v in values]
        return cls(np.array(codes, dtype=np.int64), tuple(number))

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return (self.codes,)

    def __getitem__(self, row: int) -> str | None:
        code = int(self.codes[row])
        return None if code < 0 else self.names[code]

    def take(self, rows: np.ndarray | slice) -> Labels:
        return Labels(self.codes[rows], self.names)

    def tolist(self) -> list[str | None]:
        names = (*self.names, None)  # -1 reaches the None
        return [names[c] for c in self.codes.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class BlockIds:
    """Ragged ids of the prompts: row i has `values[offsets[i]:offsets[i + 1]]`.

    Each id stands for `width` tokens, the last of a row for what is left of the prompt; with `widths` (same length as
    `values`) each stands for its own number. An id equals an equal id of equal width after equal ids, in one scope.
    """

    offsets: Column
    values: Column
    width: int
    widths: Column | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        arrays = (self.offsets, self.values, self.widths)
        return tuple(array for array in arrays if array is not None)

    @property
    def counts(self) -> Column:
        return np.diff(self.offsets)

    def row(self, row: int) -> Column:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def row_widths(self, row: int) -> Column:
        assert self.widths is not None
        return self.widths[self.offsets[row] : self.offsets[row + 1]]

    def take(self, rows: np.ndarray | slice) -> BlockIds:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._slice(start, max(start, stop))
            rows = np.arange(start, stop, step)
        counts = self.counts[rows]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        where = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][rows] - offsets[:-1], counts)
        return BlockIds(offsets, self.values[where], self.width, None if self.widths is None else self.widths[where])

    def _slice(self, start: int, stop: int) -> BlockIds:
        first, last = self.offsets[start], self.offsets[stop]
        widths = None if self.widths is None else self.widths[first:last]
        return BlockIds(self.offsets[start : stop + 1] - first, self.values[first:last], self.width, widths)

    def token_widths(self, prompt_tokens: Column) -> Column:
        """Tokens that each of `values` stands for, int64 [len(values)]; the last of a row may be narrower."""
        if self.widths is not None:
            return self.widths
        widths = np.full(len(self.values), self.width, dtype=np.int64)
        some = self.counts > 0
        last = self.offsets[1:][some] - 1
        before = (self.counts[some] - 1) * self.width
        widths[last] = np.minimum(self.width, prompt_tokens[some] - before)
        return widths


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trace comes from and what was done to it.

    `origin_ns` is the recorded time of the trace's zero: since 1970 on a wall clock, else on the file's own scale.
    `assumed` says what was taken for granted. `counts` are rows skipped, moved or changed, by named reason.
    """

    path: str | None = None
    format: str = "synthetic"
    sha256: str | None = None
    origin_ns: int = 0
    wall_clock: bool = False
    assumed: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    prompt_seed: int | None = None

    @property
    def origin(self) -> str:
        return str(np.datetime64(self.origin_ns, "ns")) if self.wall_clock else f"{self.origin_ns / 1e9:.9g} s"

    def counted(self, **counts: int) -> Provenance:
        """With counts added; zeros leave no trace."""
        total = dict(self.counts)
        for name, number in counts.items():
            if number:
                total[name] = total.get(name, 0) + int(number)
        return replace(self, counts=total)

    def assuming(self, *statements: str) -> Provenance:
        return replace(self, assumed=self.assumed + tuple(s for s in statements if s not in self.assumed))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests; in order of arrival, ties in file order, once `sorted`.

    source_row    : 0-based number of the record in its source
    arrival_ns    : intended arrival
    prompt_tokens, output_tokens : lengths; an output of 0 is a recorded failure (see `failed`)
    ids, scope    : block ids, and the namespace in which they mean something (none: one for the whole trace)
    session, turn : the conversation, and the turn's number in it from 0
    after, think_ns : index of the request after whose end this one follows by `think_ns`; -1: not tied to another
    also_after    : indices of further requests whose ends a tied one waits for (see dependencies.py)
    program, depth : the requests that wait for one another and its sessions; how many of them came before, in a chain
    stamped       : False where the file gives no arrival and `arrival_ns` is only a lower bound, from think times
    deadline_ns, abort_ns : counted from the arrival
    slo           : name of the SLO class
    tokens        : the prompts themselves, where known: ids of width 1
    content_row   : what an unshared prompt is generated from, where that is not `source_row`
    grows         : True where the prompt is the previous turn's prompt, what was generated, and new tokens
    preparation_ns, delivery_ns : stages before a request is visible and after its last token
    sampling      : sampling parameters as JSON
    An output of -1 is unknown: the request is live.
    """

    name: str
    source_row: Column
    arrival_ns: Column
    prompt_tokens: Column
    output_tokens: Column
    ids: BlockIds | None = None
    scope: Labels | None = None
    request_id: Labels | None = None
    session: Labels | None = None
    turn: Column | None = None
    after: Column | None = None
    think_ns: Column | None = None
    also_after: BlockIds | None = None
    program: Labels | None = None
    depth: Column | None = None
    stamped: np.ndarray | None = None
    client: Labels | None = None
    model: Labels | None = None
    kind: Labels | None = None
    priority: Column | None = None
    deadline_ns: Column | None = None
    abort_ns: Column | None = None
    max_tokens: Column | None = None
    slo: Labels | None = None
    tokens: BlockIds | None = None
    content_row: Column | None = None
    grows: np.ndarray | None = None
    preparation_ns: Column | None = None
    delivery_ns: Column | None = None
    sampling: Labels | None = None
    slo_classes: Mapping[str, SLO] = field(default_factory=dict)
    provenance: Provenance = Provenance()

    def __post_init__(self) -> None:
        for name, column in self.columns():
            assert len(column) == len(self.source_row), f"column {name}: {len(column)} rows of {len(self.source_row)}"

    def __len__(self) -> int:
        return len(self.source_row)

    def columns(self) -> Iterator[tuple[str, np.ndarray | Labels | BlockIds]]:
        """The columns that are present, by name."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray | Labels | BlockIds):
                yield f.name, value

    @property
    def failed(self) -> np.ndarray:
        """bool [N]: recorded without output."""
        failed: np.ndarray = self.output_tokens == 0
        return failed

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_ns[-1] - self.arrival_ns[0]) / 1e9 if len(self) else 0.0

    @property
    def mean_rate(self) -> float:
        """Arrivals per second over the span; infinite when all arrive at once."""
        return len(self) / self.span_s if self.span_s else float("inf")

    def with_columns(self, **changes: object) -> Trace:
        return replace(self, **changes)  # type: ignore[arg-type]

    def counted(self, **counts: int) -> Trace:
        """With `counts` added to the provenance."""
        return replace(self, provenance=self.provenance.counted(**counts))

    def assuming(self, *statements: str) -> Trace:
        return replace(self, provenance=self.provenance.assuming(*statements))

    def take(self, rows: np.ndarray | slice) -> Trace:
        """These rows, in this order. A follower of a row left out follows what that row followed."""
        chosen = {name: column.take(rows) if not isinstance(column, np.ndarray) else column[rows]
                  for name, column in self.columns()}  # fmt: skip
        if self.after is not None:
            kept = np.arange(len(self))[rows]
            chosen["after"] = _relink(self.after, kept)
            if self.also_after is not None:
                chosen |= _relink_others(self, self.also_after.take(kept), kept)
        return replace(self, **chosen)  # type: ignore[arg-type]

    def where(self, keep: np.ndarray, reason: str) -> Trace:
        """The rows where `keep`; the others are counted under `reason`."""
        if keep.all():
            return self
        return self.take(np.flatnonzero(keep)).counted(**{reason: len(self) - int(keep.sum())})

    def sorted(self) -> Trace:
        """In order of arrival, ties as they stand. Counts `inversions`: neighbours that stood the wrong way round."""
        inversions = int(np.count_nonzero(np.diff(self.arrival_ns) < 0))
        if not inversions:
            return self
        return self.take(np.argsort(self.arrival_ns, kind="stable")).counted(inversions=inversions)

    def chunks(self, size: int = 4096) -> Iterator[Trace]:
        """Consecutive parts that share memory with this trace; links between requests are left out of them."""
        whole = replace(self, after=None, think_ns=None, also_after=None)
        for start in range(0, len(self), size):
            yield whole.take(slice(start, start + size))

    def equals(self, other: Trace) -> bool:
        """Same requests: every column equal, names and ids included. Provenance is not compared."""
        mine, theirs = dict(self.columns()), dict(other.columns())
        return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)


def _relink(after: Column, kept: Column) -> Column:
    """Predecessors among `kept`, as indices into it; follows the chain past rows left out."""
    return _past_lost(after, kept, after[kept].copy())


def _past_lost(after: Column, kept: Column, target: Column) -> Column:
    """The rows `target` as indices into `kept`; one that is left out stands for what it follows, and so on."""
    new_index = np.full(len(after) + 1, -1, dtype=np.int64)
    new_index[kept] = np.arange(len(kept))
    while True:
        lost = (target >= 0) & (new_index[target] < 0)
        if not lost.any():
            return new_index[target]  # target -1 reads the last entry, which stays -1
        target[lost] = after[target[lost]]


def _relink_others(trace: Trace, others: BlockIds, kept: Column) -> dict[str, Any]:
    """The predecessors among `kept`. Where only further ones are left, the first takes the place of `after`."""
    assert trace.after is not None
    after = _relink(trace.after, kept)
    child = np.repeat(np.arange(len(kept)), others.counts)
    found = _past_lost(trace.after, kept, others.values.copy())
    there = found >= 0
    child, found = child[there], found[there]
    lone = np.unique(child[after[child] < 0], return_index=True)
    after[lone[0]] = found[after[child] < 0][lone[1]]
    pairs = np.unique(np.stack([child, found])[:, found != after[child]], axis=1)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(pairs[0], minlength=len(kept)))])
    changes: dict[str, Any] = {"after": after, "also_after": BlockIds(offsets, pairs[1], 1) if pairs.size else None}
    if trace.grows is not None and len(lone[0]):
        grows = trace.grows[kept].copy()
        grows[lone[0]] = False
        changes["grows"] = grows
    return changes


def ragged(rows: Sequence[Sequence[int]], width: int = 1) -> BlockIds:
    """Rows of numbers end to end."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return BlockIds(offsets, np.fromiter((v for row in rows for v in row), np.int64, int(offsets[-1])), width)


def _same(a: np.ndarray | Labels | BlockIds, b: np.ndarray | Labels | BlockIds) -> bool:
    if isinstance(a, Labels):
        return isinstance(b, Labels) and a.tolist() == b.tolist()
    if isinstance(a, BlockIds):
        return isinstance(b, BlockIds) and _same_ids(a, b)
    return isinstance(b, np.ndarray) and np.array_equal(a, b)


def _same_ids(a: BlockIds, b: BlockIds) -> bool:
    if a.width != b.width or (a.widths is None) != (b.widths is None):
        return False
    pairs = [(a.offsets, b.offsets), (a.values, b.values)]
    if a.widths is not None and b.widths is not None:
        pairs.append((a.widths, b.widths))
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def concatenate(parts: Sequence[Trace]) -> Trace:
    """One trace of several, in the order given; columns that some lack are "none" there. Links stay within a part."""
    assert parts, "nothing to concatenate"
    first = parts[0]
    parts = [_shifted(part, start) for part, start in zip(parts, _starts(parts), strict=True)]
    names = dict.fromkeys(name for part in parts for name, _ in part.columns())
    columns = {name: _join(name, parts) for name in names}
    classes = {name: slo for part in parts for name, slo in part.slo_classes.items()}
    return Trace(name=first.name, provenance=first.provenance, slo_classes=classes, **columns)  # type: ignore[arg-type]


def _starts(parts: Sequence[Trace]) -> list[int]:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])[:-1]]).tolist()  # type: ignore[no-any-return]


def _shifted(trace: Trace, start: int) -> Trace:
    """With links to rows that begin at `start`."""
    if trace.after is None or not start:
        return trace
    also = trace.also_after
    return replace(
        trace, after=np.where(trace.after < 0, -1, trace.after + start),
        also_after=None if also is None else BlockIds(also.offsets, also.values + start, 1),
    )  # fmt: skip


def _join(name: str, parts: Sequence[Trace]) -> np.ndarray | Labels | BlockIds:
    sample = next(c for part in parts if (c := getattr(part, name)) is not None)
    if isinstance(sample, Labels):
        return Labels.of(v for part in parts for v in (getattr(part, name) or [None] * len(part)))
    columns: list[Any] = [
        _absent(name, sample, len(part)) if (c := getattr(part, name)) is None else c for part in parts
    ]
    return _join_ids(columns) if isinstance(sample, BlockIds) else np.concatenate(columns)


def _absent(name: str, like: Any, rows: int) -> np.ndarray | BlockIds:
    """What a column that a trace lacks says of each of its rows."""
    if isinstance(like, BlockIds):
        return BlockIds(np.zeros(rows + 1, dtype=np.int64), np.empty(0, dtype=np.int64), like.width)
    return np.full(rows, {"stamped": True, "grows": False, "priority": 0}.get(name, -1), dtype=like.dtype)


def _join_ids(parts: Sequence[BlockIds]) -> BlockIds:
    assert len({part.width for part in parts if len(part.values)}) <= 1, "block ids of different widths"
    offsets = np.concatenate([[0], np.cumsum(np.concatenate([part.counts for part in parts]))])
    widths = None
    if any(part.widths is not None for part in parts):
        widths = np.concatenate([part.widths for part in parts if part.widths is not None])
    return BlockIds(offsets, np.concatenate([part.values for part in parts]), parts[0].width, widths)
