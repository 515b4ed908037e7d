"""Nothing outside of the core reads or writes what a request keeps for the engine."""

import re
from pathlib import Path

import pytest

from schedlab.framework.request import EngineRequest, Request

ROOT = Path(__file__).parents[2]
CORE = {
    f"framework/{name}.py"
    for name in (
        "books", "columns", "commit", "decode_set", "engine", "invariants", "journal", "ledger", "limits",
        "results/record", "results/rows", "step", "vllm/books", "vllm/journal", "vllm/requests", "vllm/scheduler",
    )
}  # fmt: skip
PRIVATE = re.compile(rf"\b(?!self\b)\w+\.({'|'.join(name for name in Request.__slots__)})\b")
FOLDERS = ("experiments", "framework", "kernels", "policies", "workloads")


def found(path: Path) -> list[str]:
    return [match.group() for match in PRIVATE.finditer(path.read_text())]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_request_is_opened_outside_of_the_core(folder):
    opened = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / folder).rglob("*.py")
        if str(path.relative_to(ROOT)) not in CORE and (names := found(path))
    }
    assert not opened


def test_the_search_finds_what_it_looks_for():
    assert [name for name in CORE if not found(ROOT / name)] == []
    assert EngineRequest.__mro__[1] is Request
