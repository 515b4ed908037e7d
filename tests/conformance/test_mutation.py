"""Of the mutants of our policies, all are found by some test but those that are listed with a reason."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from schedlab.experiments.bench.mutants import install, mutants
from schedlab.experiments.bench.mutate_policies import UNEXPLAINED, Fate, modules, table
from schedlab.policies import fcfs, preemption

BENCH = Path(__file__).parents[2] / "experiments" / "bench"


def test_a_mutant_changes_one_place_and_can_be_installed():
    """Every comparison of the module is met, and the code of the functions in use is replaced."""
    found = list(mutants(fcfs))
    comparisons = [node for node in ast.walk(ast.parse(inspect.getsource(fcfs))) if isinstance(node, ast.Compare)]
    assert len([mutant for mutant in found if any(op in mutant.before for op in "<>=")]) >= len(comparisons)
    method = fcfs.FCFS._admit_whole
    before = method.__code__
    install(found[0])
    try:
        assert method.__code__ is not before and method.__code__.co_names == before.co_names
    finally:
        method.__code__ = before


def test_a_property_is_mutated_too():
    """Turned round, `preempt_mode != "auto"` asks an estimator that is not there."""
    getter = preemption.Preempting.mode.func
    before = getter.__code__
    install(next(mutant for mutant in mutants(preemption) if mutant.function == "Preempting.mode"))
    try:
        with pytest.raises(AssertionError):
            _ = fcfs.FCFS().mode
    finally:
        getter.__code__ = before


def test_the_table_says_what_killed_and_why_not():
    one, two, three = list(mutants(fcfs))[:3]
    text = table([Fate(one, "tests/a/test_b.py::test_c"), Fate(two, None), Fate(three, None)], {two.key: "| the same"})
    assert "| fcfs | 3 | 1 |" in text and "| test_b.py::test_c |" in text
    assert "\\| the same" in text and text.count("**no test objects**") == 1


@pytest.mark.full
@pytest.mark.parametrize("name", [module.__name__.rpartition(".")[2] for module in modules([])])
def test_what_survives_has_a_reason(name):
    words = [sys.executable, "-m", "schedlab.experiments.bench.mutate_policies", name, "--explained"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_page_and_the_reasons_are_of_the_mutants_that_there_are():
    """Who changes a policy runs `python -m schedlab.experiments.bench.mutate_policies` again."""
    keys = {" ".join(mutant.key.split()) for module in modules([]) for mutant in mutants(module)}
    page = (BENCH / "results" / "policy_mutants.md").read_text()
    assert {row.replace("\\|", "|") for row in re.findall(r"^\| `(.*)` \|", page, re.MULTILINE)} == keys
    assert {" ".join(key.split()) for key in OmegaConf.load(BENCH / "policy_mutants.yaml")} <= keys
    assert UNEXPLAINED not in page
