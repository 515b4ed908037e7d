"""Of the mutants of our policies, those that decide otherwise are found by the kit or by the policies' own tests."""

import ast
import inspect

import pytest

from schedlab.experiments.bench.mutate_policies import install, modules, mutants, survey
from schedlab.policies import fcfs


def test_a_mutant_changes_one_place_and_can_be_installed(monkeypatch):
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


@pytest.mark.full
@pytest.mark.parametrize("name", [module.__name__.rpartition(".")[2] for module in modules([])])
def test_what_survives_is_listed(name, record_property):
    """At least half are found in each module; the survivors are printed with their lines."""
    fates = survey([name])
    survivors = [fate for fate in fates if fate.killed is None]
    for survivor in survivors:
        told = "decides otherwise" if survivor.differs else "never decided otherwise"
        record_property("survivor", f"{survivor.mutant} ({told})")
        print(f"{survivor.mutant}   ({told})")
    assert sum(survivor.differs for survivor in survivors) <= len(fates) / 2
