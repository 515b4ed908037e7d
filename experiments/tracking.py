"""Weights & Biases as a copy of a run's files: one run, its config, curves, summary, a sample of requests, the files.

Offline unless asked otherwise. It never fails a run and never holds one up beyond its timeouts: whatever goes wrong is
one warning, and the files in the run directory stay the source. Knows nothing of how a run is made.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schedlab.experiments import series
from schedlab.framework.errors import ConfigError
from schedlab.framework.tables import Columns, RunTables

MODES = ("offline", "online", "disabled")
STARTS_OFFLINE_S = 1.5
"""Kept of the start's time limit for falling back to an offline run."""
TABLE_COLUMNS = (
    "request_id", "client", "slo", "status", "arrival_s", "first_scheduled_s", "first_token_s", "finished_s",
    "prompt_tokens", "output_tokens", "cached_tokens", "preemptions", "recomputed_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class WandbConfig:
    """`conf/wandb`. `mode` empty (an empty WANDB_MODE) means offline; timeouts in seconds, for start and finish."""

    mode: str = "offline"
    project: str = "schedlab"
    entity: str | None = None
    group: str | None = None
    job_type: str = "run"
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    init_timeout_s: float = 5.0
    finish_timeout_s: float = 5.0
    max_points: int = 1000
    max_table_rows: int = 2000


class Tracker(Protocol):
    """Where a finished run is reported; `finish` also ends runs that failed, with `tables` None."""

    def finish(self, tables: RunTables | None) -> None: ...


class NoTracker:
    def finish(self, tables: RunTables | None) -> None:
        pass


def start_tracker(settings: WandbConfig, config: Mapping[str, Any], directory: Path) -> Tracker:
    """Open a W&B run in `directory`/wandb, offline if online fails; without W&B if that fails too."""
    mode = settings.mode or "offline"
    if mode not in MODES:
        raise ConfigError(f"wandb.mode={mode}: expected one of {', '.join(MODES)}")
    if mode == "disabled":
        return NoTracker()
    tracker: Tracker = NoTracker()
    with never_failing("no Weights & Biases run"):
        tracker = WandbTracker(_open(settings, mode, config, directory), settings, directory)
    return tracker


class WandbTracker:
    def __init__(self, run: Any, settings: WandbConfig, directory: Path) -> None:
        self._run = run
        self._settings = settings
        self._directory = directory

    def finish(self, tables: RunTables | None) -> None:
        with never_failing("the Weights & Biases run is incomplete"), staged_below(self._directory):
            if tables is not None:
                self._log_tables(tables)
            self._run.summary["status"] = "failed" if tables is None else tables.status
            log_files(self._run, self._directory)
        with never_failing("the Weights & Biases run did not finish"):
            self._run.finish(exit_code=int(tables is None))

    def _log_tables(self, tables: RunTables) -> None:
        self._run.summary.update({key: value for key, value in tables.summary.items() if value is not None})
        self._run.summary["digest"] = tables.digest
        if tables.result["record"] != "full":
            return
        log_curves(self._run, tables, self._settings.max_points)
        log_requests(self._run, tables.requests, self._settings.max_table_rows, self._directory)


def log_curves(run: Any, tables: RunTables, points: int) -> None:
    """Steps over engine time, and a cumulative distribution of each latency over its own axis."""
    run.define_metric("engine/time_s", summary="none")
    for prefix in ("sched", "kv", "queue"):
        run.define_metric(f"{prefix}/*", step_metric="engine/time_s", summary="none")
    log_rows(run, series.over_time(tables, points))
    for name, values in series.latencies(tables.requests).items():
        axis = f"cdf/{name}_s"
        run.define_metric(axis, summary="none")
        run.define_metric(f"cdf/{name}", step_metric=axis, summary="none")
        value, share = series.cumulative(values)
        log_rows(run, {axis: value, f"cdf/{name}": share})


def log_rows(run: Any, columns: Mapping[str, np.ndarray]) -> None:
    for row in zip(*columns.values(), strict=True):
        run.log(dict(zip(columns, map(float, row), strict=True)))


def log_requests(run: Any, requests: Columns, limit: int, directory: Path) -> None:
    """A table of at most `limit` requests, drawn with a fixed seed and kept in order of arrival."""
    import wandb

    rows = sampled(len(requests["request_id"]), limit).tolist()
    data = [[plain(requests[name][row]) for name in TABLE_COLUMNS] for row in rows]
    table = wandb.Table(columns=list(TABLE_COLUMNS), data=data)
    artifact = wandb.Artifact(f"requests-{run.id}", type="request-table")
    artifact.add(table, "requests")
    log_artifact(run, artifact, directory)
    bind: Any = table.bind_to_run  # to the artifact above, else W&B makes another one, which cannot be moved
    bind(run, "requests", 0)
    run.log({"requests": table})


def sampled(total: int, limit: int) -> np.ndarray:
    """At most `limit` of `total` row numbers, in order; the same ones every time."""
    return np.sort(np.random.default_rng(0).choice(total, min(limit, total), replace=False))


def plain(value: Any) -> Any:
    """A table cell: numpy's numbers as Python's, a missing one as None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if value != value else value


def log_files(run: Any, directory: Path) -> None:
    """The run directory as an artifact, without W&B's own files and Hydra's."""
    import wandb

    artifact = wandb.Artifact(f"files-{run.id}", type="run-files")
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if path.is_file() and name.parts[0] not in ("wandb", ".hydra") and path.suffix != ".tmp":
            artifact.add_file(str(path), name=name.as_posix(), policy="immutable")
    log_artifact(run, artifact, directory)


def log_artifact(run: Any, artifact: Any, directory: Path) -> None:
    """Log an artifact; offline, its files are named relative to the run directory, so that this can be moved.

    `cd DIRECTORY && wandb sync wandb/offline-run-*` uploads it from wherever it lies by then.
    """
    if run.settings.mode == "offline":
        for entry in artifact.manifest.entries.values():
            entry.local_path = os.path.relpath(entry.local_path, directory)
    run.log_artifact(artifact)


# ---- starting ----

_unreachable = False
"""The server did not answer an earlier run of this process: later ones do not wait for it again."""


def _open(settings: WandbConfig, mode: str, config: Mapping[str, Any], directory: Path) -> Any:
    global _unreachable
    if mode == "online" and not _unreachable:
        try:
            run = _init(settings, "online", config, directory)
            atexit.register(_leave_within, STARTS_OFFLINE_S)
            return run
        except Exception as error:
            _unreachable = True
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            warnings.warn(f"Weights & Biases goes offline, `wandb sync` uploads later: {reason}", stacklevel=2)
    return _init(settings, "offline", config, directory)


def _init(settings: WandbConfig, mode: str, config: Mapping[str, Any], directory: Path) -> Any:
    if not os.environ.get("WANDB_MODE", "x"):
        del os.environ["WANDB_MODE"]  # W&B refuses to start with an empty one
    import wandb

    quiet = wandb.Settings(
        console="off",
        silent=True,  # also keeps it from asking for a key, which would wait for an answer
        init_timeout=max(settings.init_timeout_s - STARTS_OFFLINE_S, 1.0),
        finish_timeout=max(settings.finish_timeout_s - STARTS_OFFLINE_S, 1.0),
        disable_git=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
    )
    wandb.setup(quiet)
    return wandb.init(
        mode=mode,  # type: ignore[arg-type]
        dir=str(directory),
        project=settings.project,
        entity=settings.entity,
        group=settings.group,
        job_type=settings.job_type,
        name=settings.name,
        tags=list(settings.tags),
        config=dict(config),
        reinit="create_new",
        settings=quiet,
    )


def _leave_within(seconds: float) -> None:
    """At exit, let W&B's service go on by itself: waiting for its telemetry can take long without a network."""
    import wandb

    leaving = threading.Thread(target=wandb.teardown, daemon=True)
    leaving.start()
    leaving.join(seconds)


@contextmanager
def staged_below(directory: Path) -> Iterator[None]:
    """Artifacts wait for their upload inside the run directory, not in the user's home."""
    before = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = str(directory / "wandb" / "data")
    try:
        yield
    finally:
        os.environ.pop("WANDB_DATA_DIR")
        if before is not None:
            os.environ["WANDB_DATA_DIR"] = before


@contextmanager
def never_failing(consequence: str) -> Iterator[None]:
    """W&B is a copy: whatever it raises becomes one warning."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {' '.join(str(error).split()) or type(error).__name__}", stacklevel=3)
