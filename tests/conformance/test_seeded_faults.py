"""Each fault is caught, by the name of the property that it breaks; and what is caught can be seen again."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from faulty import BLIND, MORE, NAMED, PingPong, RunsWildBesideLongPrompts, ShortestFirst, Sound, StickyFull

from schedlab.framework.testing.behaviour import behave
from schedlab.framework.testing.case import Subject
from schedlab.framework.testing.search import Effort, Search
from schedlab.framework.testing.strategies import squeezes
from schedlab.policies import common, ranking
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.priority import Priority
from schedlab.testing import assert_conforms, check

SLOW = {"FullUntilAFinish", "AdmitsOneChunk", "SharedState", "RestsOnTheClock", "GrantsThePreempted"}
"""Faults that a few traces in a hundred bring out."""


def caught(fault, name, text):
    seconds = 150.0 if fault.__name__ in SLOW else 4.0  # at most: the search ends with the first find
    verdict = check(fault, only=[name], seconds=seconds)[name]
    assert verdict.status == "fail", f"{fault.__name__} was not caught by {name}: {verdict}"
    assert text in verdict.detail
    return verdict


@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_name(fault):
    caught(fault, *NAMED[fault])


@pytest.mark.parametrize("fault", BLIND, ids=lambda fault: fault.__name__)
def test_an_unusual_fault_is_caught_by_name(fault):
    caught(fault, *BLIND[fault])


def test_a_fault_under_steady_load_stands_over_passes_before():
    report = check(RunsWildBesideLongPrompts, only=["rules", "waiting"], seconds=0.3)
    assert report["rules"].status == "fail" and "a second grant" in report["rules"].detail
    assert not report.passed and report["waiting"].status == "bound"


def test_a_class_with_its_own_constructor_is_made_again():
    verdict = check(StickyFull, only=["stalls"], seconds=4)["stalls"]
    assert "from faulty import StickyFull" in verdict.program and "return StickyFull()" in verdict.program


@pytest.mark.full
@pytest.mark.parametrize("fault", MORE, ids=lambda fault: fault.__name__)
def test_more_faults_are_caught_by_name(fault):
    caught(fault, *MORE[fault])


@pytest.mark.parametrize("kind, seed", [(Priority, 20), (MultilevelFeedback, 8)])
def test_the_kit_reaches_a_victim_that_would_fit_again_in_its_step(kind, seed, monkeypatch):
    """Without the guard a queue whose entries go stale unseen hands out who has just made way."""
    monkeypatch.setattr(ranking, "may_be_admitted", lambda step, request: True)
    monkeypatch.setattr(common, "may_be_admitted", lambda step, request: request not in step.prefilling)
    effort = Effort(seconds=100.0, cases=400, seed=seed, shrink_s=0.1)
    search = Search(partial(behave, Subject(kind)), effort, {"rules"}).run(squeezes())
    assert "was preempted in this step and cannot be granted in it" in str(search.violation)
    monkeypatch.undo()
    assert behave(Subject(kind), search.found)


def test_what_the_faults_are_made_of_is_sound():
    report = assert_conforms(Sound, against={"itself": Sound}, seconds=1)
    assert report["waiting"].status == report["gap"].status == "bound"
    assert "other processes" in report["determinism"].detail


@pytest.mark.parametrize(
    "fault, says",
    [(PingPong, "in turns with"), pytest.param(ShortestFirst, "later arrivals ended", marks=pytest.mark.full)],
)
def test_a_failure_is_written_as_a_program_that_shows_it_again(fault, says, tmp_path):
    name = NAMED[fault][0]
    report = check(fault, only=[name], seconds=4)
    (path,) = report.write(tmp_path)
    done = run_program(path)
    assert done.returncode == 1 and says in done.stderr and f"{name}:" in done.stderr
    assert "preempted" in done.stdout or name == "waiting", "it shows what was decided"
    path.write_text(
        path.read_text()
        .replace(f"return {fault.__name__}(", "return Sound(")
        .replace(f"import {fault.__name__}", "import Sound")
    )
    assert run_program(path).returncode == 0, "it ends well as soon as the policy is right"


def run_program(path: Path):
    return subprocess.run([sys.executable, path], cwd=path.parent, capture_output=True, text=True, timeout=120)


def test_a_failing_test_says_what_failed_and_how_to_see_it():
    with pytest.raises(AssertionError, match=r"churn +FAIL") as caught:
        assert_conforms(PingPong, seconds=4, only=["churn"])
    text = str(caught.value)
    assert "from faulty import PingPong" in text and "again('churn', make, CASE)" in text
