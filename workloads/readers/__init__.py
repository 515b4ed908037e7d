"""Trace formats, one module each, and choosing among them.

A module `readers/<format>.py` has `matches(record)`: does the first record, by its keys, belong to this format alone;
`OPTIONS`: the names of the `ReadOptions` it understands; and `read(path, options) -> Trace`. A new format is a new
module here, or any importable module named by its dotted path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.records import first_record
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import UNITS


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may say about a file that the file does not say itself; None leaves the format's own convention.

    time_unit   : ns, us, ms or s, of numeric times
    block_size  : tokens that one block id stands for
    hash_scope  : `global` (an id means the same in all rows) or `session`
    keep_failed : keep rows without output as prompt-only requests
    strict      : refuse rows out of order instead of sorting them
    columns     : our column -> the file's, for plain tables
    tokenizer   : of text formats: a directory or name that `transformers` loads
    """

    time_unit: str | None = None
    block_size: int | None = None
    hash_scope: str | None = None
    keep_failed: bool = False
    strict: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.time_unit is not None and self.time_unit not in UNITS:
            raise ConfigError(f"time_unit={self.time_unit}, expected one of {', '.join(UNITS)}")
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError(f"block_size={self.block_size}, expected at least 1")
        if self.hash_scope not in (None, "global", "session"):
            raise ConfigError(f"hash_scope={self.hash_scope}, expected global or session")


class Reader(Protocol):
    OPTIONS: frozenset[str]

    def matches(self, record: Mapping[str, Any]) -> bool: ...
    def read(self, path: Path, options: ReadOptions) -> Trace: ...


ALWAYS = frozenset({"keep_failed", "strict"})


def read(path: str | Path, format: str | None = None, options: ReadOptions | None = None) -> Trace:
    """The trace in a file; `format=None` tells it from the keys of the first record, never from magnitudes."""
    path, options = Path(path), options or ReadOptions()
    name = detect(path) if format is None else format
    reader = load(name)
    useful, default = reader.OPTIONS | ALWAYS, ReadOptions()
    for option in (f.name for f in fields(options)):
        if getattr(options, option) != getattr(default, option) and option not in useful:
            raise ConfigError(f"format {name} has no use for {option}; it takes {', '.join(sorted(useful))}")
    trace = reader.read(path, options)
    return trace if format is not None else trace.assuming(f"format {name}, from the keys of the first record")


def formats() -> list[str]:
    """Names of the formats that come with the package."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load(format: str) -> Reader:
    """The reader of a format: a module here, or one named by its dotted path."""
    name = format if "." in format else f"{__name__}.{format}"
    try:
        return cast(Reader, importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise ConfigError(f"no trace format {format!r}; there are {', '.join(formats())}") from None


def detect(path: Path) -> str:
    """The one format whose key set the first record has."""
    record = first_record(path)
    found = [name for name in formats() if load(name).matches(record)]
    if len(found) == 1:
        return found[0]
    keys = ", ".join(map(repr, record)) or "none"
    which = f"fits {' and '.join(found)}" if found else "is no format's own"
    raise TraceError(f"{path}: the key set ({keys}) {which}; set format to one of {', '.join(formats())}")
