"""What a comparison works out from a run's files, kept beside them in `derived.json`, so that it is worked out once.

It is made again when the result or what was offered changes, and simply not kept where the folder cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from schedlab.framework.results.packed import find
from schedlab.framework.results.writer import write_whole
from schedlab.version import __version__
from schedlab.workloads.readers import OFFERED

DERIVED = "derived.json"


def derived(directory: Path, name: str, make: Callable[[], Any]) -> Any:
    """`make()`, which must be JSON, of the files in `directory` as they are now."""
    of, path = _state(directory), directory / DERIVED
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("of") != of:
        found = {"of": of}
    if name not in found:
        found[name] = make()
        with suppress(OSError):
            write_whole(path, json.dumps(found) + "\n")
    return found[name]


def _state(directory: Path) -> list[Any]:
    """The version of schedlab, and sizes and times of the files."""
    paths = [directory / "result.json", directory / "manifest.json", find(directory, OFFERED)]
    stats = [path.stat() for path in paths if path.exists()]
    return [__version__, *([stat.st_size, stat.st_mtime_ns] for stat in stats)]
