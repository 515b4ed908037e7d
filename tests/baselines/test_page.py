"""docs/baselines.md is what page.py writes of the policies that there are."""

import importlib
import inspect
import re
from pathlib import Path

import page
import pytest
from omegaconf import OmegaConf

CONF = Path(inspect.getfile(importlib.import_module("schedlab.conf"))).parent / "policy"


def on_disk():
    return page.PAGE.read_text(encoding="utf-8")


def test_all_but_the_counts_is_in_step():
    assert page.written(page.counts_on(on_disk())) == on_disk(), "run python tests/baselines/page.py"


def test_with_a_cache_the_first_run_of_each_work_is_as_counted():
    """Those without one are compared in test_vllm_v1.py and test_sarathi.py."""
    one = next(one for one in page.COMPARED if one.caching)
    counts = dict(zip([row[3] for row in page.rows_of(one)], page.counts_on(on_disk())[place(one)], strict=True))
    _, runs = one.runs()
    for kind, count in counts.items():
        first = next(setting for setting in runs if setting.kind == kind)
        assert one.is_equal(first, runs[first]) or count < page.works.SEEDS, kind


def place(one):
    return page.COMPARED.index(one)


@pytest.mark.full
@pytest.mark.parametrize("one", page.COMPARED, ids=lambda one: one.name)
def test_every_run_is_as_counted(one):
    assert page.counted(one) == page.counts_on(on_disk())[place(one)]


def sourced():
    """Modules of the policies that can be chosen and name what they follow."""
    for path in sorted(CONF.glob("*.yaml")):
        target = str(OmegaConf.load(path).get("_target_"))
        if target.startswith("schedlab.policies."):
            module = importlib.import_module(target.rpartition(".")[0])
            if re.search(r"^Sources?: ", inspect.getdoc(module) or "", re.MULTILINE):
                yield module


def test_whoever_names_a_source_says_what_differs():
    modules = list(sourced())
    assert len(modules) > 15
    silent = [m.__name__ for m in modules if m.__name__.rpartition(".")[2] not in page.differences()]
    assert silent == []
