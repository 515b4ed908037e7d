"""From the batches of a reader to a `Trace`: grows columns, then sorts, links turns, counts failures, re-bases.

Knows no file format. Memory is the columns themselves: they grow in place and are viewed by numpy without a copy.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.files import sha256
from schedlab.workloads.records import Batch
from schedlab.workloads.trace import BlockIds, Labels, Provenance, Trace
from schedlab.workloads.values import IdInterner


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
        return np.array([-1 if v is None else number.setdefault(v, len(number)) for v in column], dtype=np.int64)

    def add_ids(
        self, batch: Batch, lists: Sequence[object], widths: Sequence[Sequence[int]] | None = None
    ) -> np.ndarray:
        """Block ids of the rows about to be added; returns their counts, int64, -1 where a row has none."""
        counts = np.array([len(x) if type(x) is list else -1 if x is None else -2 for x in lists], dtype=np.int64)
        if (counts == -2).any():
            row = int(np.argmax(counts == -2))
            raise batch.fault(row, f"block ids are {lists[row]!r}, expected a list")
        self._id_values.extend(self._interned(batch, lists))
        _pad(self._id_counts, self.rows, 0)
        self._id_counts.frombytes(np.maximum(counts, 0).tobytes())
        if widths is not None:
            self._id_widths.extend(chain.from_iterable(widths))
        return counts

    def _interned(self, batch: Batch, lists: Sequence[object]) -> Iterable[int]:
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


def finish(trace: Trace, *, keep_failed: bool = False, strict: bool = False, wall_clock: bool = False) -> Trace:
    """A reader's last step: failures counted, order checked, turns linked, time from the first kept row."""
    trace = trace.where(trace.prompt_tokens > 0, empty_prompt=0)
    if not keep_failed:
        trace = trace.where(~trace.failed, no_output=0)
    if not len(trace):
        skipped = ", ".join(f"{n} {name}" for name, n in trace.provenance.counts.items())
        raise TraceError(f"{trace.provenance.path}: no row with a prompt and an output is left ({skipped})")
    trace = link_turns(trace)
    backwards = np.flatnonzero(np.diff(trace.arrival_ns) < 0)
    if strict and len(backwards):
        row = trace.source_row[backwards[0] + 1]
        raise TraceError(f"{trace.provenance.path}: row {row} arrives before the row above it; strict forbids it")
    ordered = trace.sorted()
    return rebase(ordered.with_columns(provenance=replace(ordered.provenance, wall_clock=wall_clock)))


def rebase(trace: Trace) -> Trace:
    """Time from the first row; the provenance keeps where that zero lay."""
    zero = int(trace.arrival_ns[0]) if len(trace) else 0
    if not zero:
        return trace
    moved = replace(trace.provenance, origin_ns=trace.provenance.origin_ns + zero)
    return trace.with_columns(arrival_ns=trace.arrival_ns - zero, provenance=moved)


def link_turns(trace: Trace) -> Trace:
    """Numbers the turns of each session and ties those with a think time to the turn before.

    Turns stand in the order of `turn` where the file has it, else of arrival where all are stamped, else of the file.
    """
    if trace.session is None:
        return trace
    n = len(trace)
    key = trace.turn if trace.turn is not None else trace.arrival_ns if trace.stamped is None else np.zeros(n, np.int64)
    order = np.lexsort((np.arange(n), key, trace.session.codes))
    codes = trace.session.codes[order]
    follows = np.concatenate([[False], (codes[1:] == codes[:-1]) & (codes[1:] >= 0)])
    starts = np.maximum.accumulate(np.where(follows, 0, np.arange(n)))
    turn, after = np.empty(n, np.int64), np.full(n, -1, dtype=np.int64)
    turn[order] = np.arange(n) - starts
    after[order[follows]] = order[np.flatnonzero(follows) - 1]
    return _place_unstamped(replace(trace, turn=turn), after)


def _place_unstamped(trace: Trace, previous: np.ndarray) -> Trace:
    """Keeps the ties that have a think time, and gives rows without a stamp their earliest possible arrival."""
    if trace.think_ns is not None:
        tied = (previous >= 0) & (trace.think_ns >= 0)
        after, think = np.where(tied, previous, -1), np.where(tied, trace.think_ns, -1)
        trace = replace(trace, after=after, think_ns=think) if tied.any() else replace(trace, think_ns=None)
    if trace.stamped is None:
        return trace
    stamped = trace.stamped.astype(bool)
    if stamped.all():
        return replace(trace, stamped=None)
    arrival = trace.arrival_ns.copy()
    assert trace.turn is not None
    missing = np.flatnonzero(~stamped)
    for row in missing[np.argsort(trace.turn[missing], kind="stable")].tolist():
        before = -1 if trace.after is None else int(trace.after[row])
        if before < 0 or trace.think_ns is None:
            where = f"{trace.provenance.path}: row {trace.source_row[row]}"
            raise TraceError(f"{where} has neither an arrival time nor a delay after a previous turn")
        arrival[row] = arrival[before] + trace.think_ns[row]
    return replace(trace, arrival_ns=arrival, stamped=stamped)
