"""What a run's numbers depend on: its configuration, the code that runs, and the files that it reads.

Two runs of equal identity need be made only once. Versions of libraries and the machine are not part of it: the
manifest has them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from schedlab import core
from schedlab.experiments.run.manifest import NOT_OF_THE_RESULT, config_hash, owners
from schedlab.workloads.workload import EMBEDDED, embedded_file

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
