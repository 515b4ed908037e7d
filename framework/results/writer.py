"""A run directory in the making: logs streamed while the run goes, results at its end.

A run that is killed leaves `.partial` logs that can be read up to their last flush, and a result.json that says
`interrupted`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from schedlab.framework.errors import ConfigError
from schedlab.framework.results.logs import Log, all_paths
from schedlab.framework.results.metrics import Measurement, empty_summary
from schedlab.framework.results.parquet import convert_log, parquet_path, require_pyarrow
from schedlab.framework.results.reader import load_table
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import DecisionRow, decision_line, request_lines, step_lines
from schedlab.framework.results.tables import SCHEMAS, Columns, Flat, RunTables

FLUSH_S = 1.0
"""How much of a run a kill may cost, about."""
MAX_ROWS = 2048
"""Rows that are buffered at most, however fast they come."""
LINES: Mapping[str, Callable[[Flat], str]] = {"requests": request_lines, "steps": step_lines}


class RunWriter(Recorder):
    """A recorder that writes a run directory.

    `record` is `full`, or `summary` for results without logs; `log_format` is `jsonl` or, with pyarrow, `parquet`
    (converted when the run has ended). Memory stays at about a hundred bytes a request. Results of an earlier run in
    the same directory are replaced. As a context manager it marks a run that raises as failed or interrupted.
    A subclass may log some of the tables only.
    """

    logged: tuple[str, ...] = tuple(SCHEMAS)

    def __init__(
        self,
        directory: str | Path,
        measurement: Measurement,
        *,
        record: str = "full",
        log_format: str = "jsonl",
        config_hash: str | None = None,
    ) -> None:
        super().__init__(measurement)
        _check_option("record", record, ("full", "summary"))
        _check_option("log_format", log_format, ("jsonl", "parquet"))
        if log_format == "parquet":
            require_pyarrow()
        self.record = record
        self.directory = Path(directory)
        self._log_format = log_format
        self._config_hash = config_hash
        self._limit = 16
        self._flushed_at = time.monotonic()
        self._ended = False
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_result("interrupted", {"error": "the run did not get to its end"})
        _remove_logs(self.directory)
        tables = self.logged if record == "full" else ()
        self._thread = ThreadPoolExecutor(1, "logs")
        self._logs = {table: Log(self.directory, table, self._thread) for table in tables}

    def flush(self) -> None:
        """Fold what is buffered and make it readable on disk."""
        super().flush()
        for log in self._logs.values():
            log.settle()

    def _fold(self) -> None:
        """Fold what is buffered, to be on disk soon; the buffers are sized to do so about once a second."""
        super()._fold()
        for log in self._logs.values():
            log.sync()
        now = time.monotonic()
        elapsed, self._flushed_at = now - self._flushed_at, now
        if elapsed < FLUSH_S / 2:
            self._limit = min(2 * self._limit, MAX_ROWS)
        elif elapsed > FLUSH_S:
            self._limit = max(self._limit // 2, 1)

    def close(self, *, backlog_end: int, counters: Mapping[str, int]) -> RunTables:
        tables = super().close(backlog_end=backlog_end, counters=counters)
        self._close_logs(whole=True)
        if self._log_format == "parquet":
            for table in self._logs:
                convert_log(self.directory, table)
        write_json(self.directory / "vllm_bench.json", tables.vllm_bench)
        tables.result = self._write_result(tables.status, tables.result)
        return tables

    def fail(self, error: BaseException | str, status: str = "failed") -> None:
        """End a run that cannot go on: logs stay partial, result.json carries the error."""
        with suppress(OSError):  # what the disk does not take any more is lost; what ended the run is still told
            if not self._ended:
                self._decisions.complete()
                self.flush()
        with suppress(OSError):
            self._close_logs(whole=False)
        result = {"error": str(error) or type(error).__name__}
        try:
            self._write_result(status, result)
        except OSError:  # a full disk has no room for a second file; the room of the first is its own
            _put(self.directory / "result.json", as_json(self._result(status, result)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    def _close_logs(self, *, whole: bool) -> None:
        """Close all logs, whatever goes wrong with one of them; what did is raised, and its log stays partial."""
        self._ended = True
        with ExitStack() as stack:
            stack.callback(self._thread.shutdown)
            for log in self._logs.values():
                stack.callback(log.close, whole=whole)

    def _write_result(self, status: str, result: Mapping[str, Any]) -> dict[str, Any]:
        whole = self._result(status, result)
        write_json(self.directory / "result.json", whole)
        return whole

    def _result(self, status: str, result: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"digest": None, "record": self.record, "summary": empty_summary(), "error": None}
        return {"status": status, "config_hash": self._config_hash, **defaults, **result}

    def _keep(self, table: str, flat: Flat) -> None:
        if self._logs:
            self._logs[table].write(LINES[table](flat))

    def _keep_decisions(self, rows: Sequence[DecisionRow]) -> None:
        if self._logs:
            self._logs["decisions"].write("".join(map(decision_line, rows)))

    def _load(self, table: str) -> Columns:
        return load_table(self.directory, table, self.record, whole=True)


def _check_option(key: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(options)}")


def _remove_logs(directory: Path) -> None:
    """An earlier run's logs must never be read as this one's; its result has been replaced by then."""
    paths = [path for table in SCHEMAS for path in (*all_paths(directory, table), parquet_path(directory, table))]
    for path in (*paths, directory / "vllm_bench.json"):
        path.unlink(missing_ok=True)


def as_json(content: Any) -> str:
    """The text of a JSON file; NaN and infinity are refused, since they are none."""
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def write_json(path: Path, content: Any) -> None:
    """Replace `path` in one go."""
    write_whole(path, as_json(content))


def _put(path: Path, text: str) -> None:
    """Write over the file at `path` where it lies; no link is followed."""
    with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "w", encoding="utf-8") as file:
        file.write(text)
        file.truncate()


def write_whole(path: Path, text: str) -> None:
    """Replace `path` in one go: whoever reads it, and whenever this process ends, finds the old text or the new."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link there would be followed
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # the one that was asked for
        raise


def folder_within(directory: Path, name: str) -> Path:
    """The folder `name` of a run, made where it is missing. ConfigError for a link: what is written stays inside."""
    path = directory / name
    if path.is_symlink():
        raise ConfigError(f"{path}: is a link, expected a folder of the run; remove it or write elsewhere")
    path.mkdir(parents=True, exist_ok=True)
    return path


def not_a_link(path: Path) -> Path:
    """`path`, to be written anew: a link that lies there is removed instead of followed."""
    if path.is_symlink():
        path.unlink()
    return path
