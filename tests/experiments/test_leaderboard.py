"""`schedlab bench`: which policies and cells, how scores are made, and that the committed table is what it gives."""

from __future__ import annotations

import json
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from schedlab.experiments import jobs, leaderboard
from schedlab.experiments.compose import CONFIG_MODULE
from schedlab.experiments.leaderboard import Cell, Entry
from schedlab.experiments.pool import Outcome

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "experiments/bench/results/leaderboard.json"
CALM, BUSY = Cell("chat", "below", "default", ("a",)), Cell("chat", "above", "default", ("b",))
HARD = Cell("bursts", "above", "strict", ("c",))


def entry(policy: str, cell: Cell, goodput: float | None, error: str | None = None) -> Entry:
    return Entry(policy, cell, dict.fromkeys(leaderboard.FIGURES) | {leaderboard.SCORE: goodput}, error)


FOUND = [
    entry("one", CALM, 8.0), entry("two", CALM, 4.0), entry("one", BUSY, 5.0), entry("two", BUSY, 10.0),
    entry("one", HARD, 0.0), entry("two", HARD, 0.0), entry("bad", CALM, None, "it broke"), entry("bad", BUSY, 5.0),
    entry("bad", HARD, None, "it broke"),
]  # fmt: skip


def test_a_score_is_a_share_of_the_best_in_the_cell():
    table = leaderboard.scores(FOUND)
    assert table["one"] == {CALM: 1.0, BUSY: 0.5} and table["two"] == {CALM: 0.5, BUSY: 1.0}
    assert table["bad"] == {CALM: 0.0, BUSY: 0.5}  # failed is last, not left out


def test_the_table_has_policies_from_the_best_down():
    assert leaderboard.header(FOUND)[:3] == ["policy", "mean", "worst"]
    assert [row[:3] for row in leaderboard.rows(FOUND)] == [
        ["one", "0.750", "0.50"], ["two", "0.750", "0.50"], ["bad", "0.250", "0.00"],
    ]  # fmt: skip
    text = leaderboard.markdown(FOUND, [0])
    assert "No policy met the SLO: bursts, above, strict." in text and "bad failed in 2 cells: it broke" in text


def test_an_entry_is_the_mean_over_seeds_or_an_error():
    def end(goodput: float) -> Outcome:
        return Outcome(dict.fromkeys(leaderboard.FIGURES, 1.0) | {leaderboard.SCORE: goodput})

    assert leaderboard.entry_of("one", CALM, [end(2.0), end(4.0)]).figures[leaderboard.SCORE] == 3.0
    failed = leaderboard.entry_of("one", CALM, [end(2.0), Outcome(error=RuntimeError("no"))])
    assert failed.error == "no" and failed.figures[leaderboard.SCORE] is None


@pytest.fixture
def loader(workspace):
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def test_every_installed_policy_takes_part(loader):
    shipped = {path.stem for path in (ROOT / "conf/policy").glob("*.yaml")} - {"custom"}
    assert set(leaderboard.installed_policies(loader)) == shipped and "fcfs" in shipped


def test_a_policy_of_others_takes_part(workspace):
    (workspace / "conf/policy/vendor").mkdir(parents=True)
    (workspace / "conf/policy/vendor/theirs.yaml").write_text("_target_: theirs.Theirs\n")
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        assert "vendor/theirs" in leaderboard.installed_policies(GlobalHydra.instance().config_loader())


def test_every_cell_composes(loader):
    found, seeds = leaderboard.cells()
    assert len(found) == len({cell.words for cell in found}) == len({cell.name for cell in found}) == 24 and seeds
    assert {cell.load for cell in found} == {"below", "at", "above"}
    composer = jobs.Composer(loader, loader.load_configuration("config", [], RunMode.MULTIRUN))
    for cell in found:
        composer.check(("policy=fcfs", *cell.words, *leaderboard.LEAN))


def test_a_second_time_only_what_is_new_runs(schedlab, monkeypatch):
    words = ("engine=virtual", "model=llama3.1-8b", "workload=poisson", "workload.num_requests=20", "slo=default")
    cells = [
        Cell("chat", load, "default", (*words, f"workload.arrivals.rate={rate}"))
        for load, rate in (("at", 9), ("above", 90))
    ]
    monkeypatch.setattr(leaderboard, "cells", lambda: (cells, [0]))
    assert schedlab("bench", "--policy", "fcfs").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("outputs/bench").glob("*/result.json")}
    done = schedlab("bench", "--policy", "chunked_prefill", "--policy", "fcfs")
    assert done.code == 0 and "in leaderboard/leaderboard.md and .json" in done.out
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(before) == 2
    table = json.loads(Path("leaderboard/leaderboard.json").read_text())
    assert table["scores"].keys() == {"fcfs", "chunked_prefill"} and len(table["figures"]) == 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--policy", "no"), "--policy no"),
        (("--traffic", "no"), "--traffic no"),
        (("--n-jobs", "0"), "--n-jobs=0: expected 1 or more processes"),
        (("--n-jobs", "-2"), "--n-jobs=-2: expected 1 or more processes"),
    ],
)
def test_a_mistake_is_one_line(schedlab, words, told):
    done = schedlab("bench", *words)
    assert done.code == 2 and told in done.err


def test_the_committed_table_is_what_the_command_gives(workspace):
    """One cell of it, for two policies: virtual time is exact, so any difference is a change of the code."""
    committed = json.loads(RESULT.read_text())
    every, seeds = leaderboard.cells()
    assert committed["cells"] == {cell.name: list(cell.words) for cell in every} and committed["seeds"] == seeds
    cell = next(cell for cell in every if cell.name == "chat, at, default")
    told = {row["policy"]: row for row in committed["figures"] if row["cell"] == cell.name}
    for made in leaderboard.entries(["fcfs", "chunked_prefill"], [cell], seeds, workspace / "runs", 2):
        expected = {key: told[made.policy][key] for key in leaderboard.FIGURES}
        assert made.figures == pytest.approx(expected, rel=1e-9), "run `schedlab bench --out experiments/bench/results`"
