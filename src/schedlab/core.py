"""Which of schedlab's modules are compiled, and whether this process runs them compiled.

`setup.py` compiles MODULES into one library beside this file, from the very files that run where nothing is compiled;
the `.pxd` beside a module gives its classes and functions C types. The library is named after a hash of all of these, so
that one made of other sources is never loaded. SCHEDLAB_INTERPRETED=1 runs, and installs, without it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Literal

PACKAGE = Path(__file__).parent
MODULES = (
    "framework.batch",
    "framework.block_pool",
    "framework.books",
    "framework.chain",
    "framework.clock",
    "framework.commit",
    "framework.cost.coefficients",
    "framework.cost.model",
    "framework.decode_set",
    "framework.engine",
    "framework.eviction",
    "framework.invariants",
    "framework.journal",
    "framework.jump",
    "framework.ledger",
    "framework.limits",
    "framework.ordered_requests",
    "framework.prefix_cache",
    "framework.request",
    "framework.results.decision_rows",
    "framework.results.digest",
    "framework.results.record",
    "framework.results.rows",
    "framework.results.token_gaps",
    "framework.step",
    "workloads.source",
    "workloads.writers",
)
"""Of the package. Their last names differ: by these a library knows the modules in it."""
PREFIX, SUFFIX = "_core_", EXTENSION_SUFFIXES[0]
OFF = "SCHEDLAB_INTERPRETED"


def source(module: str) -> Path:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


def layout(module: str) -> Path:
    return source(module).with_suffix(".pxd")


def library() -> Path:
    """The one that the sources as they are make; it need not exist."""
    content = hashlib.blake2b(digest_size=8)
    for module in MODULES:
        for part in (module.encode(), source(module).read_bytes(), layout(module).read_bytes()):
            content.update(b"%d " % len(part) + part)
    return PACKAGE / f"{PREFIX}{content.hexdigest()}{SUFFIX}"


def libraries() -> list[Path]:
    """Those that exist for this Python, of whatever sources."""
    return list(PACKAGE.glob(f"{PREFIX}*{SUFFIX}"))


class CompiledModules(MetaPathFinder):
    """Finds MODULES in `library`, in which each has an initialiser of its own."""

    def __init__(self, library: Path) -> None:
        self._library = str(library)
        self._names = {f"schedlab.{module}" for module in MODULES}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        return spec_from_file_location(fullname, loader=ExtensionFileLoader(fullname, self._library))


def install() -> None:
    """Take MODULES from the library of these sources if there is one; tell if there are only others."""
    if os.environ.get(OFF) or not (found := libraries()):
        return
    if (wanted := library()) in found:
        sys.meta_path.insert(0, CompiledModules(wanted))
    else:
        print("schedlab runs interpreted: its core was compiled of other sources; `make core`", file=sys.stderr)


def mode() -> Literal["native", "interpreted"]:
    """How this process runs MODULES."""
    return "native" if any(isinstance(finder, CompiledModules) for finder in sys.meta_path) else "interpreted"
