"""From the batches of a reader to a `Trace`: grows columns, then sorts, links turns, counts failures, re-bases.

Memory is the columns themselves: they grow in place and are viewed by numpy without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.files import sha256, shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch
from schedlab.workloads.trace import BlockIds, Labels, Provenance, Trace
from schedlab.workloads.values import IdInterner

Columns = Mapping[str, "np.ndarray | Sequence[str | None]"]
FORBIDDEN = "strict forbids it"


class Builder:
    """Columns that grow by batches. A column first seen late is -1 (or no name) in the rows before."""

    def __init__(self) -> None:
        self.rows = 0
        self._numbers: dict[str, array[int]] = {}
        self._names: dict[str, dict[str, int]] = {}
        self._id_counts: array[int] = array("q")
        self._id_values: array[int] = array("q")
        self._id_widths: array[int] = array("q")
        self._intern = IdInterner()

    def add(self, rows: int, **columns: np.ndarray | Sequence[str | None]) -> None:
        """`rows` more rows: arrays are numbers, sequences are names."""
        for name, column in columns.items():
            if not isinstance(column, np.ndarray):
                column = self._coded(name, column)
            mine = self._numbers.setdefault(name, array("q"))
            _pad(mine, self.rows)
            mine.frombytes(column.astype(np.int64, copy=False).tobytes())
        self.rows += rows

    def _coded(self, name: str, column: Sequence[str | None]) -> np.ndarray:
        number = self._names.setdefault(name, {})
        for value in dict.fromkeys(column):
            if value is not None:
                number.setdefault(value, len(number))
        return np.array([-1 if value is None else number[value] for value in column], dtype=np.int64)

    def add_ids(
        self, batch: Batch, lists: Sequence[object], widths: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        """Block ids of the rows about to be added; returns their counts, int64, -1 where a row has none."""
        counts = np.array([len(x) if type(x) is list else -1 if x is None else -2 for x in lists], dtype=np.int64)
        if (counts == -2).any():
            row = int(np.argmax(counts == -2))
            raise batch.fault(row, f"block ids are {shown(lists[row])}, expected a list")
        self._id_values.frombytes(self._interned(batch, lists).tobytes())
        _pad(self._id_counts, self.rows, 0)
        self._id_counts.frombytes(np.maximum(counts, 0).tobytes())
        if widths is not None:
            self._id_widths.extend(chain.from_iterable(widths))
        return counts

    def _interned(self, batch: Batch, lists: Sequence[object]) -> np.ndarray:
        present: list[list[object]] = [x if type(x) is list else [] for x in lists]
        try:
            return self._intern(list(chain.from_iterable(present)))
        except ValueError:
            for row, ids in enumerate(present):
                try:
                    self._intern(ids)
                except ValueError as error:
                    raise batch.fault(row, str(error)) from None
            raise

    def trace(self, path: Path, format: str, width: int = 0) -> Trace:
        """All rows as they were added; `width` is what a block id stands for (0: no ids, or widths of their own)."""
        if not self.rows:
            raise TraceError(f"{path}: has no rows")
        columns: dict[str, object] = {}
        if "arrival_ns" not in self._numbers:  # lengths only
            columns |= {"arrival_ns": np.zeros(self.rows, np.int64), "stamped": np.zeros(self.rows, bool)}
        for name, numbers in self._numbers.items():
            _pad(numbers, self.rows)
            view = np.frombuffer(numbers, dtype=np.int64)
            columns[name] = Labels(view, tuple(self._names[name])) if name in self._names else view
        if len(self._id_values):
            columns["ids"] = self._ids(width)
        provenance = Provenance(path=str(path), format=format, sha256=sha256(path))
        return Trace(name=path.name, provenance=provenance, **columns)  # type: ignore[arg-type]

    def _ids(self, width: int) -> BlockIds:
        _pad(self._id_counts, self.rows, 0)
        offsets = np.zeros(self.rows + 1, dtype=np.int64)
        np.cumsum(np.frombuffer(self._id_counts, dtype=np.int64), out=offsets[1:])
        widths = np.frombuffer(self._id_widths, dtype=np.int64) if len(self._id_widths) else None
        return BlockIds(offsets, np.frombuffer(self._id_values, dtype=np.int64), width, widths)


def build(
    path: Path, format: str, batches: Iterable[Batch], columns: Callable[[Batch], Columns], known: Iterable[str]
) -> Trace:
    """A trace without block ids: what `columns` makes of each batch. Keys not `known` are said to be ignored."""
    builder, seen = Builder(), set[str]()
    for batch in batches:
        seen |= batch.keys
        builder.add(len(batch), source_row=batch.rows(), **columns(batch))
    return ignoring(builder.trace(path, format), seen - set(known))


def ignoring(trace: Trace, keys: Iterable[str]) -> Trace:
    names = ", ".join(sorted(keys))
    return trace.assuming(f"ignored: {names}") if names else trace


def _pad(column: array[int], rows: int, value: int = -1) -> None:
    if len(column) < rows:
        column.extend([value] * (rows - len(column)))


def check_id_counts(batch: Batch, counts: np.ndarray, prompt_tokens: np.ndarray, width: int, floor: bool) -> None:
    """Ids must cover the prompt: ceil(prompt / width) of them, or floor where the format drops the partial tail."""
    expected = prompt_tokens // width if floor else -(-prompt_tokens // width)
    wrong = np.flatnonzero((counts >= 0) & (counts != expected))
    if not len(wrong):
        return
    row = int(wrong[0])
    found, prompt = int(counts[row]), int(prompt_tokens[row])
    raise batch.fault(
        row, f"{found} block ids for a prompt of {prompt} tokens, expected {int(expected[row])} of {width} tokens; "
        f"{_fitting_widths(found, prompt, floor)}"
    )  # fmt: skip


def _fitting_widths(found: int, prompt: int, floor: bool) -> str:
    if floor:
        low, high = prompt // (found + 1) + 1, prompt // found if found else prompt + 1
    else:
        low, high = -(-prompt // found) if found else 1, (-(-prompt // (found - 1)) - 1 if found > 1 else prompt)
    if (not found and not floor) or low > high:
        return "no block size fits"
    return f"block sizes {low} to {high} would fit" if low < high else f"block size {low} would fit"


def finish(trace: Trace, options: ReadOptions, *, wall_clock: bool = False, by_session: bool = False) -> Trace:
    """A reader's last step: failures counted, order checked, turns linked, time from the first kept row.

    `by_session` files bring one session after another, so that their order is no sign of a fault.
    """
    trace = link_turns(skip_failures(trace, options))
    trace = replace(trace, provenance=replace(trace.provenance, wall_clock=wall_clock))
    backwards = np.flatnonzero(np.diff(trace.arrival_ns) < 0)
    if len(backwards) and by_session:
        return rebase(replace(trace.sorted(), provenance=trace.provenance))
    if len(backwards) and options.strict:
        row = trace.source_row[backwards[0] + 1]
        raise TraceError(f"{trace.provenance.path}: row {row} arrives before the row above it; {FORBIDDEN}")
    return rebase(trace.sorted())


def skip_failures(trace: Trace, options: ReadOptions) -> Trace:
    """Without rows that have no prompt, nor (unless kept) those that have no output; both counted."""
    if not options.keep_empty:
        trace = trace.where(trace.prompt_tokens > 0, "empty_prompt")
    if not (options.keep_failed or options.keep_empty):
        trace = trace.where(~trace.failed, "no_output")
    if not len(trace):
        skipped = ", ".join(f"{n} {name}" for name, n in trace.provenance.counts.items())
        raise TraceError(f"{trace.provenance.path}: no row with a prompt and an output is left ({skipped})")
    return trace


def think_from_gaps(trace: Trace, service_ns: np.ndarray, options: ReadOptions) -> Trace:
    """With think times of turns: distance from the turn before less its service time; -1 where that is unknown.

    `service_ns` is int64 [N], -1 where a request's duration is not known.
    """
    previous = previous_turns(trace)
    known = (previous >= 0) & (service_ns[previous] >= 0)
    gap = trace.arrival_ns - trace.arrival_ns[previous] - service_ns[previous]
    return thinking(trace, gap, known, options)


def thinking(trace: Trace, gap_ns: np.ndarray, known: np.ndarray, options: ReadOptions) -> Trace:
    """With think times `gap_ns` where `known`, int64 and bool [N].

    A turn that began before the one before it had ended has none: it follows at once, counted as `overlapping_turns`,
    or is refused under `strict`.
    """
    overlaps = known & (gap_ns < 0)
    if options.strict and overlaps.any():
        row = trace.source_row[np.argmax(overlaps)]
        raise TraceError(f"{trace.provenance.path}: row {row} begins before the turn before has ended; {FORBIDDEN}")
    think = np.where(known, np.where(overlaps, 0, gap_ns), -1)
    return replace(trace, think_ns=think).counted(overlapping_turns=int(overlaps.sum()))


def rebase(trace: Trace) -> Trace:
    """Time from the first row; the provenance keeps where that zero lay."""
    zero = int(trace.arrival_ns[0]) if len(trace) else 0
    if not zero:
        return trace
    moved = replace(trace.provenance, origin_ns=trace.provenance.origin_ns + zero)
    return trace.with_columns(arrival_ns=trace.arrival_ns - zero, provenance=moved)


def previous_turns(trace: Trace) -> np.ndarray:
    """Index of the turn before in each row's session, int64 [N]; -1 for first turns and rows without a session.

    Turns stand in the order of `turn` where the file has it, else of arrival where all are stamped, else of the file.
    """
    n = len(trace)
    previous = np.full(n, -1, dtype=np.int64)
    if trace.session is None:
        return previous
    key = trace.turn if trace.turn is not None else trace.arrival_ns if trace.stamped is None else np.zeros(n, np.int64)
    order = np.lexsort((np.arange(n), key, trace.session.codes))
    codes = trace.session.codes[order]
    follows = np.flatnonzero((codes[1:] == codes[:-1]) & (codes[1:] >= 0)) + 1
    previous[order[follows]] = order[follows - 1]
    return previous


def link_turns(trace: Trace) -> Trace:
    """Numbers the turns of each session from 0, and ties those with a think time to the turn before.

    Ties that the file brings itself (`after`) are kept.
    """
    previous = previous_turns(trace)
    if trace.session is not None:
        backwards = np.flatnonzero((previous >= 0) & (trace.arrival_ns < trace.arrival_ns[previous]))
        if trace.turn is not None and trace.stamped is None and len(backwards):
            row = trace.source_row[backwards[0]]
            raise TraceError(f"{trace.provenance.path}: row {row} is a later turn of its session, but arrives earlier")
        trace = replace(trace, turn=_depth(previous, trace.session.codes))
    return _place_unstamped(trace, previous if trace.after is None else trace.after)


def _depth(previous: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """How many turns precede each row, -1 outside sessions; by pointer doubling, so that long sessions cost little."""
    depth, jump = (previous >= 0).astype(np.int64), previous.copy()
    while (jump >= 0).any():
        depth += np.where(jump >= 0, depth[jump], 0)
        jump = np.where(jump >= 0, jump[jump], -1)
    return np.where(codes < 0, -1, depth)


def _place_unstamped(trace: Trace, previous: np.ndarray) -> Trace:
    """Keeps the ties that have a think time, and gives rows without a stamp their earliest possible arrival."""
    if trace.think_ns is not None:
        tied = (previous >= 0) & (trace.think_ns >= 0)
        after, think = np.where(tied, previous, -1), np.where(tied, trace.think_ns, -1)
        trace = replace(trace, after=after, think_ns=think) if tied.any() else replace(trace, think_ns=None)
    if trace.stamped is None or trace.depth is not None:  # rows of programs have their places
        return trace
    stamped = trace.stamped.astype(bool)
    if stamped.all():
        return replace(trace, stamped=None)
    arrival = np.maximum(trace.arrival_ns, 0)
    missing = np.flatnonzero(~stamped)
    if trace.turn is not None:
        missing = missing[np.argsort(trace.turn[missing], kind="stable")]
    for row in missing.tolist():
        before = -1 if trace.after is None else int(trace.after[row])
        if before < 0 or trace.think_ns is None:
            if not stamped.any():  # a trace of lengths: every session may begin at any time
                continue
            where = f"{trace.provenance.path}: row {trace.source_row[row]}"
            raise TraceError(f"{where} has neither an arrival time nor a delay after a previous turn")
        arrival[row] = arrival[before] + trace.think_ns[row]
    return replace(trace, arrival_ns=arrival, stamped=stamped)
