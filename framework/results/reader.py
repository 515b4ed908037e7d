"""Reads a run directory back, whole or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ConfigError
from schedlab.framework.results.logs import log_lines, log_path, partial_path
from schedlab.framework.results.parquet import parquet_path, read_parquet
from schedlab.framework.results.tables import (
    SCHEMAS,
    Columns,
    RunTables,
    Schema,
    from_json_lines,
    join_columns,
    to_arrays,
)


def read_run(directory: str | Path) -> RunTables:
    """What the run in `directory` left. Raises ConfigError if it is not a run directory.

    A run that was killed has status `interrupted` and tables that end with its last flush.
    """
    directory = Path(directory)
    result = _read_json(directory / "result.json")
    if result is None:
        raise ConfigError(f"{directory}: not a run directory, there is no result.json")

    def load(table: str) -> Columns:
        if table != "requests" and result.get("replicas"):
            raise ConfigError(f"{directory}: the {table} of a fleet are its replicas', in {directory}/replicas/")
        return load_table(directory, table, result["record"], whole=result["status"] == "finished")

    return RunTables(
        status=result["status"],
        summary=result["summary"],
        digest=result["digest"],
        result=result,
        load=load,
        manifest=_read_json(directory / "manifest.json"),
        vllm_bench=_read_json(directory / "vllm_bench.json"),
    )


def load_table(directory: Path, table: str, record: str, *, whole: bool) -> Columns:
    """Columns of one table. `whole`: the run says that it is complete, so a torn log is an error."""
    path, partial = log_path(directory, table), partial_path(directory, table)
    if record == "summary":
        raise ConfigError(f"{directory}: no {table}, the run was recorded with record=summary; run with record=full")
    if parquet_path(directory, table).is_file():
        return read_parquet(directory, table)
    if path.is_file():
        return _read_log(path, SCHEMAS[table], whole=whole)
    if partial.is_file() and not whole:
        return _read_log(partial, SCHEMAS[table], whole=False)
    raise ConfigError(f"{path}: the {table} of the run are missing")


def _read_log(path: Path, schema: Schema, *, whole: bool) -> Columns:
    batches = log_lines(path, whole=whole)
    try:
        return join_columns(schema, [to_arrays(schema, from_json_lines(schema, lines)) for lines in batches])
    except KeyError as missing:
        raise ConfigError(f"{path}: rows have no {missing}; another version of schedlab wrote them") from None


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON, {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object, found a JSON {type(content).__name__}")
    return content
