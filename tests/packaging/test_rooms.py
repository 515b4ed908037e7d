"""The house is as ARCHITECTURE.md says: which rooms and files there are, and who imports whom."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "framework": {"framework", "kernels"},
    "policies": {"policies", "framework"},
    "workloads": {"workloads", "framework"},
    "experiments": {"experiments", "policies", "workloads", "framework", "kernels"},
}
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROWS = [line.split("|")[1:-1] for line in ARCHITECTURE.splitlines() if line.startswith("| `")]


def modules() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {f"schedlab.{path.stem}".removesuffix(".__init__"): path for path in (ROOT / "src/schedlab").glob("*.py")}
    for folder in MAY_IMPORT:
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join(("schedlab", *path.relative_to(ROOT).with_suffix("").parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(source: str, known: set[str]) -> set[str]:
    """The modules of `known` that `source` imports anywhere: in functions and for types as well."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {inner if (inner := f"{node.module}.{name.name}") in known else node.module for name in node.names}
    return found & known


MODULES = modules()
IMPORTS = {name: imports(path.read_text(encoding="utf-8"), set(MODULES)) - {name} for name, path in MODULES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules each of which imports the one before it; none if there is no such circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_are_seen_wherever_they_stand():
    source = """
from typing import TYPE_CHECKING
import a.b
if TYPE_CHECKING:
    from a import c
def late():
    from a.d import thing
"""
    assert imports(source, {"a", "a.b", "a.c", "a.d"}) == {"a.b", "a.c", "a.d"}
    assert set(circle({"x": {"y"}, "y": {"x"}})) == {"x", "y"}


def test_no_modules_import_each_other_in_a_circle():
    assert circle(IMPORTS) == []


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    reached = {
        (name, other)
        for name in IMPORTS if name.startswith(f"schedlab.{folder}.")
        for other in IMPORTS[name] if "." in other and other.split(".")[1] in MAY_IMPORT.keys() - MAY_IMPORT[folder]
    }  # fmt: skip
    assert not reached


def test_no_command_needs_what_measures_the_project():
    bench = "schedlab.experiments.bench."
    needing = {name for name, others in IMPORTS.items() if any(other.startswith(bench) for other in others)}
    assert all(name.startswith(bench) for name in needing)


def test_every_room_is_on_the_map():
    rooms = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()} - {"framework", "src/schedlab"}
    assert not {room for room in rooms if f"`{room}/`" not in ARCHITECTURE}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip().replace("`", ""))
def test_what_the_map_names_is_there(row):
    named = re.findall(r"`([\w./]+(?:/|\.py|\.cpp))`", "|".join(row))
    first = re.findall(r"`([\w./]+)`", row[0])[0]
    place = Path(first) if first.endswith("/") else Path(first).parent if "/" in first else Path("framework")
    for name in named:
        assert any((ROOT / base / name).exists() for base in ("", place, "framework")), name
