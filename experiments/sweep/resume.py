"""Which runs of a directory are done, so that `resume=true` makes only the others.

A run that got to its very end, pictures and trackers included, has `job.json` with its identity; it is written last, in
one go, and removed before anything of the run is replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schedlab.experiments.sweep.identity import Identity
from schedlab.framework.results.writer import write_json

DONE = "job.json"
OWNERS = "resume.json"


def list_owners(sweep: Path) -> int:
    """Note in a sweep's directory which run, by configuration, is in which folder as it begins; how many are done.

    For its jobs, which may run in other processes: when values are added to a sweep, its jobs are numbered anew.
    """
    found = {path.parent.name: read_json(path) for path in sweep.glob("*/result.json")}
    owners = {result["config_hash"]: name for name, result in found.items() if result.get("config_hash")}
    sweep.mkdir(parents=True, exist_ok=True)
    write_json(sweep / OWNERS, owners)
    return sum((sweep / name / DONE).exists() for name in found)


def folder_for(identity: Identity, own: Path, sweep: Path | None) -> Path:
    """Where this run is or has to go: its own folder, unless it already has another or another run has its own."""
    wanted = identity.config_hash
    holder = read_json(own / "result.json").get("config_hash")
    if holder == wanted:
        return own
    owners = read_json(sweep / OWNERS) if sweep is not None else {}
    if wanted in owners:
        assert sweep is not None
        return sweep / str(owners[wanted])
    return own if holder is None or sweep is None else beside(own, identity)


def beside(own: Path, identity: Identity) -> Path:
    """The folder of a run whose own folder another run has."""
    return own.with_name(f"{own.name}-{identity.config_hash[:8]}")


def is_sibling_s(own: Path, identity: Identity | None, sweep: Path | None) -> bool:
    """Whether another run of this very sweep has left its result in `own`, as where `hydra.sweep.subdir` names not all
    that differs; what was there before the sweep began is replaced."""
    began, result = sweep and sweep / OWNERS, own / "result.json"
    if began is None or not (began.exists() and result.exists()):
        return False
    later = result.stat().st_mtime_ns >= began.stat().st_mtime_ns
    return later and (identity is None or read_json(result).get("config_hash") != identity.config_hash)


def is_done(directory: Path, identity: Identity) -> bool:
    result = read_json(directory / "result.json")
    whole = result.get("status") == "finished" and result.get("config_hash") == identity.config_hash
    return whole and bool(read_json(directory / DONE).get("key") == identity.key)


def outdated(directory: Path, identity: Identity) -> str | None:
    """What has changed since the run in `directory` was done; None if none was."""
    before = read_json(directory / DONE)
    return ", ".join(identity.changes(before)) if before else None


def mark_done(directory: Path, identity: Identity) -> None:
    write_json(directory / DONE, {"key": identity.key, **asdict(identity)})


def start_over(directory: Path) -> None:
    """From here on nothing in `directory` counts as done; what W&B and plots left of an earlier attempt goes."""
    if not (directory / "result.json").exists():
        return
    (directory / DONE).unlink(missing_ok=True)
    for name in ("wandb", "plots"):
        shutil.rmtree(directory / name, ignore_errors=True)


@contextmanager
def place(identity: Identity, own: Path, sweep: Path | None, resumes: bool) -> Iterator[Path]:
    """The folder of a run, which no other process has meanwhile."""
    folder = folder_for(identity, own, sweep) if resumes else own
    with ExitStack() as stack:
        stack.enter_context(claimed(folder))
        if folder == own and is_sibling_s(own, identity, sweep):
            folder = beside(own, identity)
            stack.enter_context(claimed(folder))
        yield folder


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Only one process at a time: a killed sweep may have left a worker that still ends its job."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def read_json(path: Path) -> Mapping[str, Any]:
    """A file of ours, which is there as a whole or not at all."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return content if isinstance(content, dict) else {}
