"""Which runs are done, so that `resume=true` makes only the others: what a run's numbers depend on, and where it is.

Two runs of equal identity (configuration, code that runs, files that are read) need be made only once; versions of
libraries and the machine are not part of it: the manifest has them. A run that got to its very end, pictures and
trackers included, has `job.json` with its identity; it is written last, in one go, and removed before anything of the
run is replaced.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from schedlab import core
from schedlab.experiments.run.manifest import NOT_OF_THE_RESULT, config_hash, owners
from schedlab.framework.results.writer import write_json
from schedlab.workloads.workload import EMBEDDED, embedded_file

DONE = "job.json"
OWNERS = "resume.json"
PATH_KEYS = ("path", "file", "folder", "directory", "profile", "tokenizer")
"""Keys, or ends of keys as in `weights_path`, whose values are read from disk where they exist there."""
WHOLE_BYTES = 64 << 20
"""Files of a folder above this size, as weights are, count by name, size and time of change instead of content."""


@dataclass(frozen=True)
class Identity:
    """Hashes, by what they are of. `targets` are classes outside of schedlab by dotted path, `files` inputs by path."""

    config_hash: str
    sources: str
    targets: Mapping[str, str]
    files: Mapping[str, str]

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """What differs from an identity that was stored as a mapping: config, sources, or the names that changed."""
        changed = ["the configuration"] if before.get("config_hash") != self.config_hash else []
        changed += ["schedlab's sources"] if before.get("sources") != self.sources else []
        for mine, theirs in ((self.targets, before.get("targets", {})), (self.files, before.get("files", {}))):
            changed += sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        return changed


def identity_of(config: Mapping[str, Any]) -> Identity:
    """Of a run with this resolved configuration."""
    read = {name: node for name, node in config.items() if name not in NOT_OF_THE_RESULT}
    foreign = sorted({target for target in targets_in(read) if target.partition(".")[0] != "schedlab"})
    return Identity(
        config_hash=config_hash(config),
        sources=sources_hash(),
        targets={target: code_hash(target.partition(".")[0], os.getcwd()) for target in foreign},
        files={path: content_hash(file) for path, file in sorted(files_in(read))},
    )


# ---- folders ----


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


# ---- what a configuration names ----


def targets_in(node: Any) -> Iterator[str]:
    """Every `_target_` in a configuration."""
    for key, value in entries(node):
        if key == "_target_" and isinstance(value, str):
            yield value


def files_in(node: Any) -> set[tuple[str, Path]]:
    """Files and folders that a configuration names, as they are spelled there and where they are."""
    return {
        (value, file)
        for key, value in entries(node)
        if isinstance(value, str) and key.rpartition("_")[2] in PATH_KEYS and (file := input_file(value)) is not None
    }


def input_file(name: str) -> Path | None:
    path = embedded_file(name) if name.startswith(EMBEDDED) else Path(name).expanduser()
    return path if name and path.exists() else None


def entries(node: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at every depth."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield str(key), value
            yield from entries(value)
    elif isinstance(node, list):
        for value in node:
            yield from entries(value)


# ---- code ----


@lru_cache
def sources_hash() -> str:
    """Of schedlab's modules as they were when this process first asked."""
    return files_hash(core.PACKAGE, package_files(core.PACKAGE))


@lru_cache
def code_hash(module: str, folder: str) -> str:
    """Of the distribution that brings the top-level `module`; of its files where it is editable or lies around.

    `folder` is the current one, where modules may lie; unknown where there is no file at all.
    """
    if (owner := installed(module)) is not None:
        return hashlib.sha256(f"{owner.version}{owner.read_text('RECORD')}".encode()).hexdigest()
    root, files = own_files(module)
    return files_hash(root, files) if files else "unknown"


def own_files(module: str) -> tuple[Path, list[Path]]:
    """Python files behind a top-level module that no distribution brings, and the folder that is searched for it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return Path(), []
    origin = Path(spec.origin)
    if spec.submodule_search_locations:
        return origin.parents[1], package_files(origin.parent)
    return origin.parent, local_modules(origin)


def installed(module: str) -> Distribution | None:
    """The distribution whose files contain `module`; None for an editable one, whose files lie elsewhere."""
    for name in owners(module):
        found = distribution(name)
        if any(file.parts[0].removesuffix(".py") == module for file in found.files or []):
            return found
    return None


def package_files(folder: Path) -> list[Path]:
    """Python files below `folder`, through links too."""
    return sorted(
        Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names
        if name.endswith(".py")
    )  # fmt: skip


def local_modules(file: Path) -> list[Path]:
    """A module and what it imports, directly or not, from its own folder."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        if (path := waiting.pop()) in found or path.suffix != ".py":
            continue
        found.add(path)
        for name in imported_names(path):
            if (module := file.parent / f"{name}.py").exists():
                waiting.append(module)
            elif (file.parent / name / "__init__.py").exists():
                waiting += package_files(file.parent / name)
    return sorted(found)


def imported_names(file: Path) -> set[str]:
    """Top-level names that a module's import statements mention; none where it is no valid Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return set()
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - {"", "schedlab"}  # whose sources count anyway


def files_hash(root: Path, files: Iterable[Path]) -> str:
    """Of names below `root`, which may lie anywhere, and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


# ---- inputs ----


def content_hash(path: Path) -> str:
    """sha256 of a file; of a folder, over its files."""
    if path.is_file():
        return file_hash(path, *stamp(path))
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        size, changed = stamp(file)
        content = f"{size} {changed}" if size > WHOLE_BYTES else file_hash(file, size, changed)
        digest.update(f"{file.relative_to(path)}\0{content}\0".encode())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def file_hash(path: Path, size: int, changed_ns: int) -> str:
    """sha256 of the bytes; read once for as long as the file looks the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
