"""Weights & Biases as a copy of a run's files: one run, its config, curves, summary, a sample of requests, the files.

Every run is written offline, without key or network; `online` uploads it when it has ended, in a process of its own
that gets so much time and no more. So W&B never fails a run and never holds one up: whatever goes wrong is one warning,
and `wandb sync` uploads later.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schedlab.experiments.analysis import series
from schedlab.experiments.analysis.verdicts import better_when
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.tables import SCHEMAS, Columns, RunTables
from schedlab.framework.results.writer import folder_within

CDF_POINTS = 100
MODES = ("offline", "online", "disabled")
ALIASES = {"": "offline", "dryrun": "offline", "run": "online"}
"""Older words of W&B's for WANDB_MODE, and none."""
WORKLOAD, OUTPUTS = "workload.jsonl*", "outputs.jsonl*"
OWN_FILES = (
    "result.json", "manifest.json", "job.json", "job.log", "error.txt", "vllm_bench.json", "timeline.json",
    *(f"{table}.{ending}" for table in SCHEMAS for ending in ("jsonl*", "parquet")), WORKLOAD, OUTPUTS,
    "comparison.json", "comparison.md", "verdicts.json", "verdicts.md", "plots/*.png", "plots/*.svg",
)  # fmt: skip
"""Patterns of what schedlab writes into a run's or a sweep's directory."""
TABLE_COLUMNS = (
    "request_id", "client", "slo", "status", "arrival_s", "first_scheduled_s", "first_token_s", "finished_s",
    "prompt_tokens", "output_tokens", "cached_tokens", "preemptions", "recomputed_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class WandbConfig:
    """`conf/wandb`. An empty `mode`, from an empty WANDB_MODE, means offline.

    `init_timeout_s` bounds the start of a run, `finish_timeout_s` its upload. `log_workload` and `log_outputs`: the
    files of what was asked and of what was answered, token by token, are among those that are copied.
    """

    mode: str = "offline"
    project: str = "schedlab"
    entity: str | None = None
    group: str | None = None
    job_type: str = "run"
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    init_timeout_s: float = 5.0
    finish_timeout_s: float = 5.0
    max_points: int = 100
    max_table_rows: int = 2000
    log_workload: bool = True
    log_outputs: bool = True

    def __post_init__(self) -> None:
        for key, least in (("max_points", 1), ("max_table_rows", 0), ("init_timeout_s", 0), ("finish_timeout_s", 0)):
            if not getattr(self, key) >= least:
                raise ConfigError(f"wandb.{key}: expected at least {least}, found {getattr(self, key)}")


class Tracker(Protocol):
    """Where a finished run is reported; `finish` also ends runs that failed, with `tables` None."""

    def finish(self, tables: RunTables | None) -> None: ...


class NoTracker:
    def finish(self, tables: RunTables | None) -> None:
        pass


def start_tracker(
    settings: WandbConfig, config: Mapping[str, Any], directory: Path, *, in_sweep: bool = False
) -> Tracker:
    """Open a W&B run in `directory`/wandb; if that fails, warn and go on without.

    `in_sweep`: one of several, which must not share the id that WANDB_RUN_ID may give to a run of its own.
    """
    mode = ALIASES.get(settings.mode, settings.mode)
    if mode not in MODES:
        raise ConfigError(f"wandb.mode={mode}: expected one of {', '.join(MODES)}")
    if mode == "disabled":
        return NoTracker()
    tracker: Tracker = NoTracker()
    own = dict.fromkeys(("WANDB_RUN_ID", "WANDB_RESUME")) if in_sweep else {}
    with never_failing("no Weights & Biases run"), environment(own):
        tracker = WandbTracker(open_run(settings, config, directory), settings, directory, upload=mode == "online")
    return tracker


class WandbTracker:
    def __init__(self, run: Any, settings: WandbConfig, directory: Path, *, upload: bool = False) -> None:
        self._run = run
        self._settings = settings
        self._directory = directory
        self._upload = upload

    def finish(self, tables: RunTables | None) -> None:
        staging = {"WANDB_DATA_DIR": str(self._directory / "wandb" / "data")}  # where artifacts wait for their upload
        with never_failing("the Weights & Biases run is incomplete"), environment(staging):
            if tables is not None:
                self._log_tables(tables)
            self._run.summary["status"] = "failed" if tables is None else tables.status
            log_files(self._run, self._directory, self._settings)
        with never_failing("the Weights & Biases run did not finish"):
            self._run.finish(exit_code=int(tables is None))
            if self._upload:
                upload(Path(self._run.settings.sync_dir), self._directory, self._settings.finish_timeout_s)

    def _log_tables(self, tables: RunTables) -> None:
        define_goals(self._run, tables.summary)
        self._run.summary.update({key: value for key, value in tables.summary.items() if value is not None})
        self._run.summary["digest"] = tables.digest
        if tables.result["record"] != "full":
            return
        log_curves(self._run, tables, self._settings.max_points)
        log_requests(self._run, tables.requests, self._settings.max_table_rows, self._directory)


def define_goals(run: Any, summary: Mapping[str, Any]) -> None:
    """Which way each figure is better, where it is one of these."""
    for key, value in summary.items():
        if value is not None and (better := better_when(key)):
            run.define_metric(key, summary="max" if better > 0 else "min")


def log_curves(run: Any, tables: RunTables, points: int) -> None:
    """Steps over engine time, and a cumulative distribution of each latency over its own axis."""
    run.define_metric("engine/time_s", summary="none")
    for prefix in ("sched", "kv", "queue"):
        run.define_metric(f"{prefix}/*", step_metric="engine/time_s", summary="none")
    columns = dict(series.over_time(tables, points))
    for name, values in series.latencies(tables.requests).items():
        axis = f"cdf/{name}_s"
        run.define_metric(axis, summary="none")
        run.define_metric(f"cdf/{name}", step_metric=axis, summary="none")
        columns[axis], columns[f"cdf/{name}"] = series.cumulative(values, CDF_POINTS)
    log_rows(run, columns)


def log_rows(run: Any, columns: Mapping[str, np.ndarray]) -> None:
    """A row of history for each place in the columns, of those that reach so far: W&B's cost is by rows, not values.

    Every curve has an axis of its own, so that those which have nothing to do with each other may share rows.
    """
    for values in zip_longest(*(column.tolist() for column in columns.values())):
        run.log({name: float(value) for name, value in zip(columns, values, strict=True) if value is not None})


def log_requests(run: Any, requests: Columns, limit: int, directory: Path) -> None:
    """A table of at most `limit` requests, drawn with a fixed seed and kept in order of arrival."""
    import wandb

    rows = sampled(len(requests["request_id"]), limit)
    cells = [plain(np.asarray(requests[name], dtype=object)[rows].tolist()) for name in TABLE_COLUMNS]
    table = table_of(TABLE_COLUMNS, list(map(list, zip(*cells, strict=True))))
    artifact = wandb.Artifact(f"requests-{run.id}", type="request-table")
    artifact.add(table, "requests")
    log_artifact(run, artifact, directory)
    bind: Any = table.bind_to_run  # to the artifact above, else W&B makes another one, which cannot be moved
    bind(run, "requests", 0)
    run.log({"requests": table})


def table_of(columns: Sequence[str], rows: list[list[Any]]) -> Any:
    """A W&B table whose types come from the first known value of each column: it would infer them cell by cell, which
    costs more than all else about a run. Every cell may be missing."""
    import wandb

    known = [next((row[i] for row in rows if row[i] is not None), None) for i in range(len(columns))]
    table: Any = wandb.Table(columns=list(columns), data=[known, [None] * len(columns)])
    table.data = rows
    table.to_json = partial(with_plain_rows, table, table.to_json)
    return table


def with_plain_rows(table: Any, to_json: Callable[[Any], dict[str, Any]], owner: Any) -> dict[str, Any]:
    """What `to_json` tells of a table in its run or artifact, without its conversion of every cell: these are plain."""
    rows, table.data = table.data, []
    told = to_json(owner)
    table.data = rows
    return {**told, "nrows": len(rows), **({"data": rows} if "data" in told else {})}


def sampled(total: int, limit: int) -> np.ndarray:
    """At most `limit` of `total` row numbers, in order; the same ones every time."""
    return np.sort(np.random.default_rng(0).choice(total, min(limit, total), replace=False))


def plain(values: list[Any]) -> list[Any]:
    """Cells of a table's column: a missing number, which is NaN, as None."""
    return [None if value != value else value for value in values]


def log_files(run: Any, directory: Path, settings: WandbConfig) -> None:
    """The files of a run as an artifact: those that schedlab writes, whatever else lies in its directory."""
    import wandb

    artifact = wandb.Artifact(f"files-{run.id}", type="run-files")
    for path in own_files(directory, settings):
        artifact.add_file(str(path), name=path.relative_to(directory).as_posix(), policy="immutable")
    log_artifact(run, artifact, directory)


def own_files(directory: Path, settings: WandbConfig) -> list[Path]:
    """What a run or a comparison has written, without what the settings leave out; no links."""
    left_out = {WORKLOAD: not settings.log_workload, OUTPUTS: not settings.log_outputs}
    kept = [pattern for pattern in OWN_FILES if not left_out.get(pattern)]
    found = {path for pattern in kept for path in directory.glob(pattern)}
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def log_artifact(run: Any, artifact: Any, directory: Path) -> None:
    """Log an artifact with its files named relative to the run directory, so that this can be moved.

    `cd DIRECTORY && wandb sync wandb/offline-run-*` uploads it from wherever it lies by then.
    """
    for entry in artifact.manifest.entries.values():
        entry.local_path = os.path.relpath(entry.local_path, directory)
    run.log_artifact(artifact)


# ---- starting and uploading ----


def open_run(settings: WandbConfig, config: Mapping[str, Any], directory: Path) -> Any:
    """An offline run, independent of others in this process."""
    with environment(OFFLINE):
        return start(settings, config, directory)


def start(settings: WandbConfig, config: Mapping[str, Any], directory: Path) -> Any:
    import wandb

    folder_within(directory, "wandb")
    return wandb.init(
        dir=str(directory),
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        job_type=settings.job_type,
        name=settings.name,
        tags=list(settings.tags),
        config=dict(config),
        reinit="create_new",
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=settings.init_timeout_s,
            x_service_wait=settings.init_timeout_s,
            disable_git=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,  # config and manifest have versions; listing every package takes 0.1 s
        ),
    )


OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
"""Nothing is sent, reports on W&B's own use included; an empty WANDB_MODE, which it refuses, is replaced."""
NOT_FOR_SYNC = ("WANDB_MODE", "WANDB_SERVICE")
"""Offline it would upload nothing; and this process's service has another current folder."""
_gave_up = False
"""An upload of this process ran out of time: later ones do not wait for the server again."""


def upload(run: Path, directory: Path, timeout_s: float) -> None:
    """`wandb sync` the offline run, for `timeout_s` at most."""
    global _gave_up
    if _gave_up:
        return
    later = f"`cd {directory} && wandb sync {run.relative_to(directory)}` uploads it later"
    log = directory / "wandb" / "sync.log"
    code = sync(run, directory, log, timeout_s)
    if code is None:
        _gave_up = True
        warnings.warn(f"Weights & Biases took no upload within {timeout_s:g} s; {later}", stacklevel=2)
    elif code:
        warnings.warn(f"Weights & Biases took no upload ({last_line(log)}); {later}", stacklevel=2)
    elif link := re.search(r"https?://\S+/runs/\S+", log.read_text(encoding="utf-8")):
        print(link[0])


def sync(run: Path, directory: Path, log: Path, timeout_s: float) -> int | None:
    """Exit code of `wandb sync`; None if it had to be ended. Its own children go with it."""
    words = [sys.executable, "-m", "wandb", "sync", str(run.relative_to(directory))]
    kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_SYNC}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words,
            cwd=directory,
            env={**kept, "WANDB_ERROR_REPORTING": "false"},
            stdin=subprocess.DEVNULL,  # so that it cannot ask for a key
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1].removeprefix("Error: ") if lines else "it said nothing"


@contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The process environment with `changes`, for a while; None: without that name."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextmanager
def never_failing(consequence: str) -> Iterator[None]:
    """W&B is a copy: whatever it raises becomes one warning."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {' '.join(str(error).split()) or type(error).__name__}", stacklevel=3)
