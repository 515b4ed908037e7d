"""`schedlab bench`: which policies and cells, how scores are made, and that the committed table is what it gives."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import hydra
import numpy as np
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from schedlab.experiments.run.compose import CONFIG_MODULE
from schedlab.experiments.studies import leaderboard
from schedlab.experiments.studies.leaderboard import BoardCell, Entry
from schedlab.experiments.sweep import jobs
from schedlab.experiments.sweep.pool import Outcome

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "experiments/bench/results/leaderboard.json"
CALM, BUSY = BoardCell("chat", "below", "default", ("a",)), BoardCell("chat", "above", "default", ("b",))
HARD = BoardCell("bursts", "above", "strict", ("c",))


def entry(policy: str, cell: BoardCell, *goodputs: float, error: str | None = None) -> Entry:
    return Entry(policy, cell, dict.fromkeys(leaderboard.FIGURES), goodputs, error)


FOUND = [
    entry("one", CALM, 8.0, 6.0), entry("one", BUSY, 5.0, 0.0), entry("one", HARD, 0.0, 0.0),
    entry("two", CALM, 4.0, 3.0), entry("two", BUSY, 10.0, 0.0), entry("two", HARD, 0.0, 0.0),
    entry("bad", CALM, 0.0, 0.0, error="it broke"), entry("bad", BUSY, 5.0, 0.0),
    entry("bad", HARD, 0.0, 0.0, error="it broke"),
]  # fmt: skip


def test_a_score_is_a_share_of_the_best_at_the_seed():
    told = {standing.policy: standing.score_CS for standing in leaderboard.standings(FOUND)}
    nobody = [np.nan, np.nan]
    np.testing.assert_array_equal(told["one"], [[1, 1], [0.5, np.nan], nobody])
    np.testing.assert_array_equal(told["two"], [[0.5, 0.5], [1, np.nan], nobody])
    np.testing.assert_array_equal(told["bad"], [[0, 0], [0.5, np.nan], nobody])  # failed is last, not left out


def test_the_table_tells_place_interval_and_what_was_left_out():
    assert leaderboard.header(FOUND)[:5] == ["place", "policy", "mean", "95% interval", "worst"]
    rows = {row[1]: row for row in leaderboard.rows(FOUND)}
    assert rows["one"][2] == "0.875" and rows["one"][4:] == ["0.50", "1.00", "0.50", "–"]  # (0.75 + 1) / 2
    text = leaderboard.markdown(FOUND, [1, 2])
    assert "No policy met the SLO: bursts, above, strict." in text and "bad failed in 2 cells: it broke" in text


def test_the_table_names_predictor_and_slo():
    cells, seeds = leaderboard.cells()
    text = leaderboard.markdown([entry("sjf", cell, 1.0) for cell in cells], seeds)
    assert "predictor noisy (sigma=0.5, seed=0)" in text
    assert "SLO default: TTFT ≤ 1000 ms, TPOT ≤ 100 ms; mlperf_interactive: TTFT ≤ 450 ms, TPOT ≤ 40 ms." in text


def test_who_cannot_be_told_apart_shares_a_place():
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.01, (3, 5))
    by_seed = {"best": 0.9 + noise[0], "twin": 0.9 + noise[1], "low": 0.5 + noise[2], "same": 0.5 + noise[2]}
    assert leaderboard.places(by_seed) == {"best": 1, "twin": 1, "low": 3, "same": 3}


def test_places_are_wrong_no_more_often_than_their_level_says():
    """Of policies that do not differ, on average, all share the first place in 95 of 100 tables, or more."""
    rng = np.random.default_rng(0)
    tables = [{str(i): scores for i, scores in enumerate(rng.normal(0.8, 0.05, (4, 5)))} for _ in range(300)]
    worst = [leaderboard.places(table)["0"] for table in tables]
    assert np.mean(np.array(worst) > 1) < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)


def test_policies_that_nothing_tells_apart_are_named():
    same = [entry(name, cell, 1.0, 2.0) for name in ("b", "a") for cell in (CALM, BUSY)] + [entry("c", CALM, 1.0, 3.0)]
    assert leaderboard.equals(same) == [["a", "b"]]


def test_an_entry_is_the_mean_over_seeds_or_an_error():
    def end(goodput: float) -> Outcome:
        return Outcome(dict.fromkeys(leaderboard.FIGURES, 1.0) | {leaderboard.SCORE: goodput})

    made = leaderboard.entry_of("one", CALM, [end(2.0), end(4.0)])
    assert made.figures[leaderboard.SCORE] == 3.0 and made.goodputs == (2.0, 4.0)
    failed = leaderboard.entry_of("one", CALM, [end(2.0), Outcome(error=RuntimeError("no"))])
    assert failed.error == "no" and failed.figures[leaderboard.SCORE] is None and failed.goodputs == (0.0, 0.0)


@pytest.fixture
def loader(workspace):
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def test_every_installed_policy_takes_part(loader):
    shipped = {path.stem for path in (ROOT / "conf/policy").glob("*.yaml")} - {"custom", "vllm"}
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
        BoardCell("chat", load, "default", (*words, f"workload.arrivals.rate={rate}"))
        for load, rate in (("at", 9), ("above", 90))
    ]
    monkeypatch.setattr(leaderboard, "cells", lambda: (cells, [1, 2]))
    assert schedlab("bench", "--policy", "fcfs").code == 0
    before = {path: path.stat().st_mtime_ns for path in Path("outputs/bench").glob("*/result.json")}
    done = schedlab("bench", "--policy", "chunked_prefill", "--policy", "fcfs")
    assert done.code == 0 and "in leaderboard/leaderboard.md, .json and .csv" in done.out
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(before) == 4
    table = json.loads(Path("leaderboard/leaderboard.json").read_text())
    assert table["places"].keys() == {"fcfs", "chunked_prefill"} and len(table["figures"]) == 4
    for form, ending in (("csv", "csv"), ("json", "json"), ("markdown", "md")):
        done = schedlab("bench", "--policy", "chunked_prefill", "--policy", "fcfs", "--format", form)
        assert done.out == Path(f"leaderboard/leaderboard.{ending}").read_text()
    with open("leaderboard/leaderboard.csv") as file:
        rows = list(csv.DictReader(file))
    for row, told in zip(rows, table["figures"], strict=True):
        assert (row["policy"], row["cell"]) == (told["policy"], told["cell"])
        assert [float(row[f"goodput_{seed}"]) for seed in (1, 2)] == told["goodput_by_seed"]
        assert float(row[leaderboard.SCORE]) == told[leaderboard.SCORE]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--policy", "no"), "--policy no"),
        (("--traffic", "no"), "--traffic no"),
        (("--format", "xml"), "--format xml: expected one of terminal, json, markdown, csv"),
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
        assert list(made.goodputs) == pytest.approx(told[made.policy]["goodput_by_seed"], rel=1e-9)
