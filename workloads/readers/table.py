"""Plain tables: csv, JSON lines or parquet with columns named as one likes (`columns`: ours -> the file's).

Ours are prompt_tokens and output_tokens, and optionally arrival, request_id, session, turn, think, client, model, kind,
priority, deadline, abort, slo, max_tokens and block ids (`ids`, of `block_size` tokens, ceil(prompt / block_size) of
them). Times are numbers in `time_unit`, or wall-clock stamps where that is not given; a parquet column of timestamps or
durations is read as what it is. `deadline` and `abort` are spans from the arrival, `deadline_at` and `abort_at` times
on the file's clock. Never detected: name the format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.builder import Builder, check_id_counts, finish, ignoring
from schedlab.workloads.files import open_text
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.parquet import Duration, Stamp, parquet_batches
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import Batch, csv_batches, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import MAX_TOKENS, UNITS, integers, stamps, times

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope", "columns", "priority_order", "max_span_s"})
REQUIRED = ("prompt_tokens", "output_tokens")
NAMES = ("request_id", "session", "client", "model", "kind", "slo")
NUMBERS = ("turn", "max_tokens")
ENDS = {"deadline": "deadline_ns", "abort": "abort_ns"}
"""Spans from the arrival, and as NAME_at times on the file's clock."""
OURS = {*REQUIRED, *NAMES, *NUMBERS, *ENDS, *(f"{name}_at" for name in ENDS), "arrival", "think", "priority", "ids"}


def matches(record: Mapping[str, Any]) -> bool:
    return False


def read(path: Path, options: ReadOptions) -> Trace:
    unknown = options.columns.keys() - OURS
    if unknown:
        raise ConfigError(f"columns names {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(OURS))}")
    theirs = {ours: options.columns.get(ours, ours) for ours in OURS}
    builder, seen, stamped = Builder(), set[str](), options.time_unit is None
    for batch in batches(path, [theirs[name] for name in REQUIRED] + list(options.columns.values())):
        seen |= batch.keys
        _add(builder, batch, theirs, options)
        stamped |= batch.has(theirs["arrival"]) and any(type(v) is Stamp for v in batch.column(theirs["arrival"]))
    trace = ignoring(builder.trace(path, "table", options.block_size or 0), seen - set(theirs.values()))
    if trace.ids is not None:
        trace = scoped(trace, options.hash_scope or "global")
    return finish(trace, options, wall_clock=stamped and trace.stamped is None)


def batches(path: Path, required: list[str]) -> Iterator[Batch]:
    """By the file's content: parquet by its magic number, JSON by the first brace, else csv."""
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return parquet_batches(path, required)
    with open_text(path) as text:
        is_json = next((line for line in text if not line.isspace()), "").lstrip().startswith(("{", "["))
    return json_batches(path, required) if is_json else csv_batches(path, required)


def _add(builder: Builder, batch: Batch, theirs: Mapping[str, str], options: ReadOptions) -> None:
    has = {ours for ours, name in theirs.items() if batch.has(name)}
    prompt = batch.counts(theirs["prompt_tokens"])
    columns: dict[str, Any] = {"prompt_tokens": prompt, "output_tokens": batch.counts(theirs["output_tokens"])}
    columns |= {ours: batch.labels(theirs[ours]) for ours in NAMES if ours in has}
    columns |= {ours: batch.parse(theirs[ours], integers) for ours in NUMBERS if ours in has}
    if "priority" in has:
        priority = batch.parse(theirs["priority"], lambda v: integers(v, -MAX_TOKENS, absent=0))
        columns["priority"] = priority if options.priority_order == "larger_first" else -priority
    if "think" in has:
        columns["think_ns"] = _spans(batch, theirs["think"], "think", options)
    if "arrival" in has:
        columns["arrival_ns"] = _clock_times(batch, theirs["arrival"], options, range(len(batch)))
    for name in ENDS:
        if has & {name, f"{name}_at"}:
            columns[ENDS[name]] = _until(batch, name, has, theirs, columns.get("arrival_ns"), options)
    if "ids" in has:
        if options.block_size is None:
            raise ConfigError(f"{batch.path}: block ids ({theirs['ids']}) need block_size, the tokens each stands for")
        counts = builder.add_ids(batch, batch.column(theirs["ids"]))
        check_id_counts(batch, counts, prompt, options.block_size, floor=False)
    builder.add(len(batch), source_row=batch.rows(), **columns)


def _until(
    batch: Batch, name: str, has: Collection[str], theirs: Mapping[str, str], arrival: np.ndarray | None,
    options: ReadOptions,
) -> np.ndarray:  # fmt: skip
    """A deadline or an abort, ns from the arrival; -1 where a row has none."""
    by_clock = f"{name}_at"
    if name in has and by_clock in has:
        raise ConfigError(f"{batch.path}: has {theirs[name]} and {theirs[by_clock]}; expected one of the two")
    if name in has:
        span = _spans(batch, theirs[name], name, options)
        if (far := span > round(options.max_span_s * 1e9)).any():
            row, limit = int(np.argmax(far)), f"max_span_s={options.max_span_s:g}"
            raise batch.fault(
                row, f"{theirs[name]} is {span[row] / 1e9:g} s after the arrival, above {limit}; "
                f"columns.{by_clock} reads times on the file's clock, a larger max_span_s such spans"
            )  # fmt: skip
        return span
    if arrival is None:
        raise ConfigError(f"{batch.path}: {theirs[by_clock]} is a time on the file's clock, and there are no arrivals")
    some = [row for row, value in enumerate(batch.column(theirs[by_clock])) if value is not None and value != ""]
    span = np.full(len(batch), -1, dtype=np.int64)
    if some:
        span[some] = _clock_times(batch, theirs[by_clock], options, some) - arrival[some]
    if (early := span[some] < 0).any():
        row = some[int(np.argmax(early))]
        raise batch.fault(row, f"{theirs[by_clock]} lies before the arrival; {name} reads spans from the arrival on")
    return span


def _spans(batch: Batch, name: str, ours: str, options: ReadOptions) -> np.ndarray:
    """ns, -1 where a row has none; numbers are in `time_unit`."""
    column = batch.column(name)
    if any(type(value) is Duration for value in column):
        for row, value in enumerate(column):
            if value is not None and value.ns < 0:
                raise batch.fault(row, f"{name} is {value.ns} ns, expected a span of at least 0")
        return np.array([-1 if value is None else value.ns for value in column], dtype=np.int64)
    if options.time_unit is None:
        raise ConfigError(f"a table with {ours} needs time_unit (ns, us, ms or s)")
    return batch.optional_times(name, options.time_unit)


def _clock_times(batch: Batch, name: str, options: ReadOptions, rows: Sequence[int]) -> np.ndarray:
    """Times of `rows` on the file's clock, ns: numbers in `time_unit`, or stamps."""
    column = [batch.column(name)[row] for row in rows]
    if options.time_unit is not None and not any(type(value) is Stamp for value in column):
        scale = UNITS[options.time_unit]
        return batch.parse(name, lambda v: times(v, scale), column, rows)
    plain = [str(value) if type(value) is Stamp else value for value in column]
    try:
        return batch.parse(name, stamps, plain, rows)[0]
    except TraceError as error:
        raise TraceError(f"{error}; numbers need time_unit (ns, us, ms or s)") from None
