"""Plain tables: csv, JSON lines or parquet with columns named as one likes (`columns`: ours -> the file's).

Ours are prompt_tokens and output_tokens, and optionally arrival, request_id, parents, session, turn, think, end,
duration, client, model, kind, priority, deadline, abort, slo, max_tokens and block ids (`ids`, of `block_size` tokens,
ceil(prompt / block_size) of them). A name with dots is a path into JSON objects and lists (`usage.prompt_tokens`). A
row waits for the ends of all of its `parents` (a list of request ids; in a csv separated by spaces) and then for
`think`. With `end` or `duration`, and no `think`, what lay between the end of a turn and the next is the think time.
Times are numbers in `time_unit`, or wall-clock stamps where that is not given; a parquet column of timestamps or
durations is read as what it is. `deadline` and `abort` are spans from the arrival, `deadline_at` and `abort_at` times
on the file's clock. Never detected: name the format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.builder import Builder, check_id_counts, finish, ignoring, skip_failures, think_from_gaps
from schedlab.workloads.calls import Calls
from schedlab.workloads.dependencies import Names, named_parents, with_parents
from schedlab.workloads.files import check_regular, open_text
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.parquet import Duration, Stamp, parquet_batches
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import Batch, csv_batches, json_batches
from schedlab.workloads.trace import BlockIds, Trace
from schedlab.workloads.values import MAX_TOKENS, UNITS, integers, is_stamp, stamps, times

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope", "columns", "priority_order", "max_span_s"})
REQUIRED = ("prompt_tokens", "output_tokens")
NAMES = ("request_id", "session", "client", "model", "kind", "slo")
NUMBERS = ("turn", "max_tokens")
ENDS = {"deadline": "deadline_ns", "abort": "abort_ns"}
"""Spans from the arrival, and as NAME_at times on the file's clock."""
SERVICE = ("end", "duration")
OTHERS = ("arrival", "think", "priority", "ids", "parents")
OURS = {*REQUIRED, *NAMES, *NUMBERS, *ENDS, *(f"{name}_at" for name in ENDS), *SERVICE, *OTHERS}


def matches(record: Mapping[str, Any]) -> bool:
    return False


def read(path: Path, options: ReadOptions) -> Trace:
    unknown = options.columns.keys() - OURS
    if unknown:
        raise ConfigError(f"columns names {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(OURS))}")
    theirs = {ours: options.columns.get(ours, ours) for ours in OURS}
    builder, seen, links = Builder(), set[str](), Links(stamped=options.time_unit is None)
    for batch in batches(path, [theirs[name] for name in REQUIRED] + list(options.columns.values())):
        seen |= batch.keys
        _add(builder, batch, theirs, options)
        links.add(batch, theirs, options)
    known = {part for name in theirs.values() for part in (name, name.partition(".")[0])}
    trace = links.tie(ignoring(builder.trace(path, "table", options.block_size or 0), seen - known), options)
    if trace.ids is not None:
        trace = scoped(trace, options.hash_scope or "global")
    return finish(trace, options, wall_clock=links.stamped and trace.stamped is None)


@dataclass
class Links:
    """What rows say of others: whom they wait for, and when they ended. `stamped`: arrivals are of a wall clock."""

    stamped: bool
    parents: Names = field(default_factory=lambda: Names("parents"))
    service_ns: list[np.ndarray] = field(default_factory=list)

    def add(self, batch: Batch, theirs: Mapping[str, str], options: ReadOptions) -> None:
        arrival, parents = theirs["arrival"], theirs["parents"]
        self.stamped |= batch.has(arrival) and _of_wall_clock(batch.column(arrival))
        if batch.has(parents):
            self.parents.add(batch, [_parents(value) for value in batch.column(parents)])
        else:
            self.parents.skip(len(batch))
        self.service_ns.append(_service(batch, theirs, options))

    def tie(self, trace: Trace, options: ReadOptions) -> Trace:
        service = np.concatenate(self.service_ns)
        if self.parents.names:
            parents = named_parents(trace, self.parents.names, self.parents.per_row())
            if trace.think_ns is not None:
                return with_parents(trace, parents, trace.think_ns)
            return _recorded_calls(trace, parents, service).tie(trace, options)
        if trace.session is None or trace.think_ns is not None or not (service >= 0).any():
            return trace
        statement = "think time of a turn: what lay between its arrival and the end of the turn before"
        trace = think_from_gaps(skip_failures(trace, options), service[_kept(trace, options)], options)
        return trace.assuming(statement)


def _kept(trace: Trace, options: ReadOptions) -> np.ndarray:
    """The rows that are no failures, as `skip_failures` leaves them."""
    return skip_failures(trace.with_columns(source_row=np.arange(len(trace))), options).source_row


def _recorded_calls(trace: Trace, parents: BlockIds, service_ns: np.ndarray) -> Calls:
    """Rows with parents and no think time: what lay between, where ends are known, else nothing."""
    calls = Calls()
    for row, (start, service) in enumerate(zip(trace.arrival_ns.tolist(), service_ns.tolist(), strict=True)):
        calls.add(start, start + max(service, 0))
        calls.parents[row] = parents.row(row).tolist()
    if (service_ns < 0).any():  # an unknown duration would count twice, as a wait and as its service
        calls.end_ns = [max(calls.start_ns)] * len(calls.start_ns)
    return calls


def _parents(value: Any) -> Any:
    """A list of request ids, from a text of them or numbers where it is one."""
    if type(value) is str:
        return value.split()
    return [str(each) if type(each) is int else each for each in value] if type(value) is list else value


def _service(batch: Batch, theirs: Mapping[str, str], options: ReadOptions) -> np.ndarray:
    """ns that a request took from its arrival; -1 where the row does not say."""
    has = {name for name in (*SERVICE, "arrival") if batch.has(theirs[name])}
    if {"end", "duration"} <= has:
        raise ConfigError(f"{batch.path}: has {theirs['end']} and {theirs['duration']}; expected one of the two")
    if "duration" in has:
        return _spans(batch, theirs["duration"], "duration", options)
    if "end" not in has:
        return np.full(len(batch), -1, dtype=np.int64)
    if "arrival" not in has:
        raise ConfigError(f"{batch.path}: {theirs['end']} is a time on the file's clock, and there are no arrivals")
    arrival = _clock_times(batch, theirs["arrival"], options, range(len(batch)))
    return _after_arrival(batch, theirs["end"], "duration", arrival, options)


def batches(path: Path, required: list[str]) -> Iterator[Batch]:
    """By the file's content: parquet by its magic number, JSON by the first brace, else csv."""
    check_regular(path)
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
    return _after_arrival(batch, theirs[by_clock], name, arrival, options)


def _after_arrival(batch: Batch, name: str, span_of: str, arrival: np.ndarray, options: ReadOptions) -> np.ndarray:
    """Times on the file's clock as ns from the arrival; -1 where a row has none."""
    some = [row for row, value in enumerate(batch.column(name)) if value is not None and value != ""]
    span = np.full(len(batch), -1, dtype=np.int64)
    if some:
        span[some] = _clock_times(batch, name, options, some) - arrival[some]
    if (early := span[some] < 0).any():
        row = some[int(np.argmax(early))]
        raise batch.fault(row, f"{name} lies before the arrival; columns.{span_of} reads spans from the arrival on")
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


def _of_wall_clock(column: Sequence[Any]) -> bool:
    """Whether times are stamps, in a parquet column or as text, and not numbers in a unit."""
    first = next((value for value in column if value is not None and value != ""), None)
    return type(first) is Stamp or (type(first) is str and is_stamp(first))


def _clock_times(batch: Batch, name: str, options: ReadOptions, rows: Sequence[int]) -> np.ndarray:
    """Times of `rows` on the file's clock, ns: numbers in `time_unit`, or stamps."""
    column = [batch.column(name)[row] for row in rows]
    if options.time_unit is not None and not _of_wall_clock(column):
        scale = UNITS[options.time_unit]
        return batch.parse(name, lambda v: times(v, scale), column, rows)
    plain = [str(value) if type(value) is Stamp else value for value in column]
    try:
        return batch.parse(name, stamps, plain, rows)[0]
    except TraceError as error:
        raise TraceError(f"{error}; numbers need time_unit (ns, us, ms or s)") from None
