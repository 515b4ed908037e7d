"""The overlays of known results: all of their words compose, and what is said of a run follows from its numbers."""

import json

import pytest
from omegaconf import OmegaConf

from schedlab.experiments.run import compose
from schedlab.experiments.run.job import experiment_of, settings_of
from schedlab.experiments.studies import reproduce, reproduce_result
from schedlab.experiments.studies.reproduce import NAMES, planned
from schedlab.experiments.studies.reproduce_result import ReproducedRun, Reproduction


def facts_of(name):
    return compose.resolve(compose.compose([f"experiment={name}"]))["reproduction"]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_variant_of_an_overlay_are_experiments(name):
    facts = facts_of(name)
    assert facts["title"] and facts["source"] and facts["published"] and facts["reading"]
    first = {label: words for label, _, words in reversed(list(planned(facts)))}
    assert list(first) == list(facts["variants"])[::-1]
    last, *_, earliest = first.values() if len(first) > 1 else [*first.values()] * 2
    for words in (last, earliest):
        config = compose.compose([f"experiment={name}", *words])
        resolved = compose.resolve(config)
        made = experiment_of(resolved, settings_of(resolved))
        assert made.engine.name == "virtual" and not OmegaConf.missing_keys(config)


def test_runs_are_every_variant_at_every_point():
    facts = {"variants": {"a": ["x=1"], "b": []}, "sweep": {"y": [2, 3]}}
    assert list(planned(facts)) == [
        ("a", 2, ("x=1", "y=2")), ("a", 3, ("x=1", "y=3")), ("b", 2, ("y=2",)), ("b", 3, ("y=3",)),
    ]  # fmt: skip
    assert list(planned({"variants": {"a": ["x=1"]}})) == [("a", None, ("x=1",))]


def capacity_under(gaps, queues):
    rates = [float(i + 1) for i in range(len(gaps))]
    runs = [
        ReproducedRun("it", rate, (), {"itl/p99": gap, "queue/p50": queue})
        for rate, gap, queue in zip(rates, gaps, queues, strict=True)
    ]
    facts = {"variants": {"it": []}, "sweep": {"rate": rates}, "limits": {"queue": 2.0}}
    return reproduce_result.capacity(Reproduction("x", facts, tuple(runs)), "it", 0.1)


@pytest.mark.parametrize(
    "gaps, queues, rate",
    [
        ([0.05, 0.1, 0.2], [0, 0, 0], 2),
        ([0.05, 0.1, 0.1], [0, 2.0, 2.1], 2),
        ([0.2, 0.05, 0.05], [0, 0, 0], 0),
        ([0.05, 0.2, 0.05], [0, 0, 0], 1),
        ([0.05, 0.05, 0.05], [0, 0, 0], 3),
    ],
)
def test_capacity_is_the_last_rate_before_the_first_that_breaks_a_limit(gaps, queues, rate):
    assert capacity_under(gaps, queues) == rate


def test_a_reproduction_runs_and_is_written(schedlab, monkeypatch, tmp_path):
    """A small one, by the command, from the overlay to the page."""
    whole = reproduce.planned
    monkeypatch.setattr(
        reproduce, "planned", lambda facts: ((n, p, (*w, "workload.num_requests=12")) for n, p, w in whole(facts))
    )
    done = schedlab("reproduce", "max_num_seqs", "--out", str(tmp_path))
    assert done.code == 0, done.err
    page = (tmp_path / "reproductions.md").read_text()
    assert (
        "| `schedlab reproduce max_num_seqs` |" in page and "`engine.max_num_seqs=4 workload.num_requests=12`" in page
    )
    assert (tmp_path / "reproductions.png").stat().st_size > 10_000
    assert json.dumps(facts_of("max_num_seqs")["published"])[1:-1] in done.out


def test_an_unknown_name_is_one_line(schedlab):
    done = schedlab("reproduce", "nothing")
    assert done.code == 2 and "nothing: no such reproduction; there are sarathi_capacity" in done.err
