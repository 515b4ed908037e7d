"""The Triton kernels compiled for GPUs that are not there.

Interpreter or compiler is decided when triton is imported, so this folder is a process of its own:
`pytest tests/kernels/compile`. Prints what the compiler made of each kernel; `--write-facts` records it for later
comparison in facts-triton-<version>.json.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
cache = tempfile.TemporaryDirectory(prefix="triton-cache-")  # removed when the process ends
os.environ["TRITON_CACHE_DIR"] = cache.name
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

measured: dict[str, dict[str, int]] = {}


def pytest_addoption(parser):
    parser.addoption("--write-facts", action="store_true", help="record registers, memory and opcodes of every kernel")


def facts_path() -> Path:
    import triton

    return Path(__file__).parent / f"facts-triton-{'.'.join(triton.__version__.split('.')[:2])}.json"


@pytest.fixture(scope="session")
def recorded_facts(request) -> dict[str, dict[str, int]]:
    """What was recorded for this version of Triton; empty for a version never recorded, or when recording."""
    path = facts_path()
    return json.loads(path.read_text()) if path.exists() and not request.config.getoption("--write-facts") else {}


def pytest_runtest_logreport(report):
    if report.when == "call":
        measured.update(fact for name, fact in report.user_properties if name == "facts")


def pytest_terminal_summary(terminalreporter, config):
    if not measured:
        return
    columns = list(next(iter(measured.values())))
    terminalreporter.section("compiled kernels")
    terminalreporter.write_line(" " * 52 + " ".join(f"{column:>9}" for column in columns))
    for name, facts in sorted(measured.items()):
        terminalreporter.write_line(f"{name:52}" + " ".join(f"{facts[column]:>9}" for column in columns))
    if config.getoption("--write-facts"):
        facts_path().write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n")
