"""Records of parquet files in batches, by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.files import listed
from schedlab.workloads.records import BATCH, Batch


class Stamp(str):
    """A wall-clock stamp that a file keeps as a timestamp, whatever the unit of its numbers."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Duration:
    """A span that a file keeps as one, in ns."""

    ns: int


def parquet_batches(path: Path, required: Sequence[str]) -> Iterator[Batch]:
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
            columns = {field.name: _values(path, field, part.column(field.name)) for field in part.schema}
            lines = range(first + 1, first + 1 + part.num_rows)
            yield Batch(path, first, lines, columns.__getitem__, keys)
            first += part.num_rows
    except (OSError, ValueError) as error:  # what pyarrow raises for damaged files
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path}: damaged parquet file ({' '.join(str(error).split())})") from None


def _values(path: Path, field: Any, column: Any) -> list[Any]:
    """A column as the values that a text file would have; timestamps and durations keep their kind."""
    import pyarrow as pa

    kind = field.type
    if pa.types.is_timestamp(kind):
        zone = "" if kind.tz is None else "Z"
        stamps_ns = column.cast(pa.timestamp("ns", kind.tz)).cast(pa.int64()).to_pylist()
        return [None if ns is None else Stamp(f"{np.datetime64(ns, 'ns')}{zone}") for ns in stamps_ns]
    if pa.types.is_duration(kind):
        spans_ns = column.cast(pa.duration("ns")).cast(pa.int64()).to_pylist()
        return [None if ns is None else Duration(ns) for ns in spans_ns]
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        raise TraceError(f"{path}: column {field.name} is of type {kind}, expected timestamps, durations or numbers")
    values: list[Any] = column.to_pylist()
    return values
