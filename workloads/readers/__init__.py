"""Trace formats, one module each, and choosing among them.

A module `readers/<format>.py` has `matches(record)`: does the first record, by its keys, belong to this format alone;
`OPTIONS`: the names of the `ReadOptions` it understands; and `read(path, options) -> Trace`. A new format is a new
module here, or any importable module named by its dotted path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, cast

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.results.packed import find
from schedlab.workloads.files import listed
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import first_record, to_last_whole_row
from schedlab.workloads.soundness import check
from schedlab.workloads.trace import Trace

NO_TRACE = {
    ("Received request ", "SamplingParams("): "is a log of vLLM's server, which has no lengths in it; its "
    "OpenTelemetry spans have (format=otel_genai)",
    ("custom_id", "url", "body"): "is a batch of requests to OpenAI's API: texts without times or lengths; the batch's "
    "output has lengths (format=table with columns.prompt_tokens=response.body.usage.prompt_tokens …)",
}  # fmt: skip
"""Beginnings of the keys of files that are often taken for traces, and why they are none."""


class Reader(Protocol):
    OPTIONS: frozenset[str]

    def matches(self, record: Mapping[str, Any]) -> bool: ...
    def read(self, path: Path, options: ReadOptions) -> Trace: ...


OFFERED = "workload.jsonl"
"""The requests that a run was offered, in its folder, compressed."""
ALWAYS = frozenset({"keep_failed", "keep_empty", "strict"})


def read(path: str | Path, format: str | None = None, options: ReadOptions | None = None) -> Trace:
    """The trace in a file, or what the run of a folder was offered; `format=None` tells the format from the keys of the
    first record, never from magnitudes.

    A file that ends within a row is read up to the row above, with a warning and a count, or refused by `strict`.
    """
    path, options = offered_file(Path(path)), options or ReadOptions()
    name = detect(path) if format is None else format
    reader = load(name)
    useful, default = reader.OPTIONS | ALWAYS, ReadOptions()
    for option in (f.name for f in fields(options)):
        if getattr(options, option) != getattr(default, option) and option not in useful:
            raise ConfigError(f"format {name} has no use for {option}; it takes {', '.join(sorted(useful))}")
    trace = to_last_whole_row(lambda: reader.read(path, options), options.strict)
    check(trace)
    return trace if format is not None else trace.assuming(f"format {name}, from the keys of the first record")


def offered_file(path: Path) -> Path:
    """What a run's folder keeps of its workload; any other path as it is."""
    inside = find(path, OFFERED)
    return inside if inside.is_file() else path


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
    if path.is_dir():
        raise TraceError(
            f"{path}: is a folder, expected a file, a run's folder with {OFFERED}.zst or .gz, or format=weka"
        )
    record = first_record(path)
    for parts, what in NO_TRACE.items():
        if all(any(part in name for name in record) for part in parts):
            raise TraceError(f"{path}: {what}")
    found = [name for name in formats() if load(name).matches(record)]
    if len(found) == 1:
        return found[0]
    keys = listed(record) or "none"
    which = f"fits {' and '.join(found)}" if found else "is no format's own"
    raise TraceError(f"{path}: the key set ({keys}) {which}; set format to one of {', '.join(formats())}")
