"""Plain tables: csv, JSON lines or parquet with columns named as one likes (`columns`: ours -> the file's).

Ours are prompt_tokens and output_tokens, and optionally arrival, request_id, session, turn, think, client, model, kind,
priority, deadline, slo, max_tokens and block ids (`ids`, of `block_size` tokens, ceil(prompt / block_size) of them).
Times are numbers in `time_unit`, or wall-clock stamps where that is not given. Never detected: name the format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.builder import Builder, check_id_counts, finish, ignoring
from schedlab.workloads.files import listed, open_text
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import BATCH, Batch, csv_batches, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import MAX_TOKENS, integers, stamps

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope", "columns"})
REQUIRED = ("prompt_tokens", "output_tokens")
NAMES = ("request_id", "session", "client", "model", "kind", "slo")
NUMBERS = ("turn", "max_tokens")
SPANS = {"think": "think_ns", "deadline": "deadline_ns"}
OURS = {*REQUIRED, *NAMES, *NUMBERS, *SPANS, "arrival", "priority", "ids"}


def matches(record: Mapping[str, Any]) -> bool:
    return False


def read(path: Path, options: ReadOptions) -> Trace:
    unknown = options.columns.keys() - OURS
    if unknown:
        raise ConfigError(f"columns names {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(OURS))}")
    theirs = {ours: options.columns.get(ours, ours) for ours in OURS}
    builder, seen = Builder(), set[str]()
    for batch in batches(path, [theirs[name] for name in REQUIRED] + list(options.columns.values())):
        seen |= batch.keys
        _add(builder, batch, theirs, options)
    trace = ignoring(builder.trace(path, "table", options.block_size or 0), seen - set(theirs.values()))
    if trace.ids is not None:
        trace = scoped(trace, options.hash_scope or "global")
    wall_clock = options.time_unit is None and trace.stamped is None
    return finish(trace, options, wall_clock=wall_clock)


def batches(path: Path, required: list[str]) -> Iterator[Batch]:
    """By the file's content: parquet by its magic number, JSON lines by the first brace, else csv."""
    with path.open("rb") as file:
        if file.read(4) == b"PAR1":
            return parquet_batches(path, required)
    with open_text(path) as text:
        is_json = next((line for line in text if not line.isspace()), "").lstrip().startswith("{")
    return json_batches(path, required) if is_json else csv_batches(path, required)


def parquet_batches(path: Path, required: list[str]) -> Iterator[Batch]:
    """Batches of a parquet file; the line of a row is its number from 1. Needs `pyarrow`."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError(f"{path}: is parquet; install the extra schedlab[parquet] to read it") from None
    try:
        file = parquet.ParquetFile(path)
        keys, first = frozenset(file.schema_arrow.names), 0
        missing = [name for name in required if name not in keys]
        if missing:
            raise TraceError(f"{path}: no column {listed(missing)}; found {listed(sorted(keys))}")
        for part in file.iter_batches(BATCH):
            columns = part.to_pydict()
            lines = range(first + 1, first + 1 + part.num_rows)
            yield Batch(path, first, lines, columns.__getitem__, keys)
            first += part.num_rows
    except OSError as error:  # what pyarrow raises for damaged files
        raise TraceError(f"{path}: damaged parquet file ({error})") from None


def _add(builder: Builder, batch: Batch, theirs: Mapping[str, str], options: ReadOptions) -> None:
    has = {ours for ours, name in theirs.items() if batch.has(name)}
    prompt = batch.counts(theirs["prompt_tokens"])
    columns: dict[str, Any] = {"prompt_tokens": prompt, "output_tokens": batch.counts(theirs["output_tokens"])}
    columns |= {ours: batch.labels(theirs[ours]) for ours in NAMES if ours in has}
    columns |= {ours: batch.parse(theirs[ours], integers) for ours in NUMBERS if ours in has}
    if "priority" in has:
        columns["priority"] = batch.parse(theirs["priority"], lambda v: integers(v, -MAX_TOKENS, absent=0))
    for ours in SPANS.keys() & has:
        columns[SPANS[ours]] = batch.optional_times(theirs[ours], _unit(ours, options))
    if "arrival" in has:
        columns["arrival_ns"] = _arrival(batch, theirs["arrival"], options)
    if "ids" in has:
        if options.block_size is None:
            raise ConfigError(f"{batch.path}: block ids ({theirs['ids']}) need block_size, the tokens each stands for")
        counts = builder.add_ids(batch, batch.column(theirs["ids"]))
        check_id_counts(batch, counts, prompt, options.block_size, floor=False)
    builder.add(len(batch), source_row=batch.rows(), **columns)


def _unit(name: str, options: ReadOptions) -> str:
    if options.time_unit is None:
        raise ConfigError(f"a table with {name} needs time_unit (ns, us, ms or s)")
    return options.time_unit


def _arrival(batch: Batch, name: str, options: ReadOptions) -> np.ndarray:
    if options.time_unit is not None:
        return batch.times(name, options.time_unit)
    try:
        return batch.parse(name, stamps)[0]
    except TraceError as error:
        raise TraceError(f"{error}; numbers need time_unit (ns, us, ms or s)") from None
