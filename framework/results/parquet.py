"""Logs as parquet, where pyarrow is installed. Nested values are kept as JSON text."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ConfigError
from schedlab.framework.results.logs import log_lines, log_path
from schedlab.framework.results.tables import SCHEMAS, SPARSE, Columns, RawColumns, Schema, from_json_lines, to_arrays


def parquet_path(directory: Path, table: str) -> Path:
    return directory / f"{table}.parquet"


def require_pyarrow() -> None:
    if find_spec("pyarrow") is None:
        raise ConfigError("log_format=parquet: pyarrow is not installed; pip install 'schedlab[parquet]'")


def convert_log(directory: Path, table: str) -> None:
    """Turn the log of `table` into parquet, a row group per batch of lines."""
    from pyarrow.parquet import ParquetWriter

    source, schema = log_path(directory, table), SCHEMAS[table]
    types = _arrow_schema(schema)
    with ParquetWriter(parquet_path(directory, table), types) as writer:
        for lines in log_lines(source, whole=True):
            writer.write_table(_arrow_table(schema, types, from_json_lines(schema, lines)))
    source.unlink()


def read_parquet(directory: Path, table: str) -> Columns:
    require_pyarrow()
    from pyarrow.parquet import read_table

    schema = SCHEMAS[table]
    columns = read_table(parquet_path(directory, table)).to_pydict()
    for name in _nested(schema):
        texts = columns.get(name)
        rows = len(columns[next(iter(schema))])
        columns[name] = [SPARSE[name]] * rows if texts is None else [json.loads(text) for text in texts]
    return to_arrays(schema, columns)


def _nested(schema: Schema) -> list[str]:
    return [name for name, kind in schema.items() if kind == "json"]


def _arrow_schema(schema: Schema) -> Any:
    import pyarrow as pa

    types = {"int": pa.int64(), "real": pa.float64(), "time": pa.float64(), "text": pa.string(), "json": pa.string()}
    fields = [pa.field(name, types[kind.rstrip("?")], nullable=kind.endswith("?")) for name, kind in schema.items()]
    return pa.schema(fields)


def _arrow_table(schema: Schema, types: Any, columns: RawColumns) -> Any:
    import pyarrow as pa

    for name in _nested(schema):
        columns[name] = [json.dumps(value, separators=(",", ":")) for value in columns[name]]
    return pa.table(columns, schema=types)
