"""The policies of docs/examples: options of that folder, short, and they keep the contract."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedlab.experiments.policy import maker
from schedlab.experiments.run.compose import compose
from schedlab.testing import assert_conforms

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
QUICK = ["rules", "audit", "streams", "hold"]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the examples, as after `cd docs/examples`."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def of(name):
    return maker(compose([f"policy={name}", "predictor=oracle"]).policy)


def test_each_has_its_yaml_and_its_verdict():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert len(NAMES) == 3 and sorted(path.stem for path in (EXAMPLES / "conf/policy").glob("*.yaml")) == NAMES
    assert all(f"]({name}.py)" in page and f"{name} against chunked_prefill" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short(name):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_it_conforms(name, there):
    assert_conforms(of(name), against={}, seconds=0.3, only=QUICK)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_it_conforms_for_long(name, there):
    assert_conforms(of(name), against={}, seconds=40, seed=1)
