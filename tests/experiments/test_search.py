"""What a run returns to a search, and searches: Optuna's, and the command line of Weights & Biases' agent."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from schedlab.experiments.run.job import FAR, WORST, Objective
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run

ROOT = Path(__file__).parents[2]
SUMMARY = {"ttft/p99": 1.5, "tpot/p99": 0.03, "goodput/requests_per_s": 7.0, "itl/p99": None}


def test_nothing_asked_nothing_returned():
    assert Objective().of(SUMMARY) is None


def test_a_figure_or_several():
    assert Objective("ttft/p99").of(SUMMARY) == 1.5
    assert Objective(["ttft/p99", "goodput/requests_per_s"]).of(SUMMARY) == [1.5, 7.0]
    assert Objective("ttft/p99", {"tpot/p99": 0.03}).of(SUMMARY) == 1.5  # a limit may be reached


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_broken_limit_is_worse_than_any_figure_and_worse_the_farther(direction):
    sign = 1 if direction == "minimize" else -1
    values = [sign * Objective("ttft/p99", {"tpot/p99": limit}, direction).of(SUMMARY) for limit in (0.02, 0.01, 0.001)]
    assert FAR < values[0] < values[1] < values[2]


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"figures": "ttft/p98"}, r"objective.figures ttft/p98: no such metric; did you mean ttft/p9\d or"),
        ({"figures": ["ttft/p99", "tpot/p9"]}, "objective.figures tpot/p9: no such metric"),
        ({"figures": "ttft/p99", "at_most": {"tpot_p99": 1}}, "objective.at_most tpot_p99: no such metric; did you"),
        ({"figures": "ttft/p99", "at_most": {"tpot/p99": 0}}, "expected a limit above 0 for tpot/p99, found 0"),
        ({"direction": "up"}, "objective.direction=up"),
    ],
)
def test_a_wrong_objective_is_told_before_anything_runs(keys, told):
    with pytest.raises(ConfigError, match=told):
        Objective(**keys)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("limits", [None, {"tpot/p99": 1e-9}])
def test_what_is_not_known_of_a_run_is_the_worst(direction, limits):
    sign = 1 if direction == "minimize" else -1
    broken = sign * Objective("ttft/p99", {"tpot/p99": 1e-4}, direction).of(SUMMARY)
    unknown = Objective("itl/p99", limits, direction)
    assert sign * unknown.of(SUMMARY) == sign * unknown.of(None) == WORST > broken
    assert unknown.unknown(SUMMARY) == ["itl/p99"]
    assert Objective("ttft/p99", {"itl/p99": 1.0}, direction).of(SUMMARY) == sign * WORST
    assert Objective(["ttft/p99", "itl/p99"], None, direction).of(None) == [sign * WORST] * 2


def search(schedlab, limit: float, folder: str):
    """Trials of four chunk sizes at random."""
    return schedlab(
        "run", "-m", "experiment=tune_chunk_size", "wandb.mode=disabled", "progress=false", "workload.num_requests=20",
        "policy.chunk_size=choice(64,2048)", f"objective.at_most={{tpot/p99: {limit}}}", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1", "hydra.sweeper.params=null", f"hydra.sweep.dir={folder}",
    )  # fmt: skip


def test_a_search_says_which_trials_kept_the_limits_or_how_far_the_nearest_was(schedlab):
    pytest.importorskip("optuna")
    none = search(schedlab, 1e-4, "s")
    assert none.code == 0, none.err
    found = {str(job): read_run(Path("s", str(job))).summary["tpot/p99"] for job in range(4)}
    least, most = min(found.values()), max(found.values())
    assert least < most
    nearest = next(job for job in found if found[job] == least)
    told = f"objective.at_most: none of 4 runs kept the limits; the nearest is {nearest}: tpot/p99 {least:.4g}, "
    assert f"{told}{least / 1e-4 - 1:.2%} above 0.0001\n" in none.out
    some = search(schedlab, least, "t")
    kept = [job for job in found if found[job] == least]
    assert f"objective.at_most: {len(kept)} of 4 runs kept the limits: {', '.join(kept)}\n" in some.out


def test_a_search_goes_on_after_a_run_that_fails_and_one_whose_figure_is_unknown(schedlab):
    """A pool of 1 block holds no request at all, so nothing finishes; one of 0 cannot be had."""
    pytest.importorskip("optuna")
    done = schedlab(
        "run", "-m", "experiment=tune_chunk_size", "wandb.mode=disabled", "progress=false", "workload.num_requests=20",
        "engine.num_blocks=choice(0,1,4000)", "hydra.sweeper.n_trials=8",
        "hydra.sweeper.n_jobs=1", "hydra.sweep.dir=s",
    )  # fmt: skip
    assert done.code == 1, "as for any sweep of which a run failed"
    assert "failed: engine.num_blocks: expected a number of at least 1" in done.err
    assert "ttft/p99" in done.err and "unknown in this run" in done.err
    assert OmegaConf.load("s/optimization_results.yaml").best_params["engine.num_blocks"] == 4000


def test_a_study_is_kept_and_goes_on(schedlab):
    pytest.importorskip("optuna")
    if int(version("sqlalchemy").partition(".")[0]) >= 2:
        pytest.skip("Optuna 2.10 stores studies through SQLAlchemy below 2: pip install -e '.[dev]'")
    words = (
        "run", "-m", "hydra/sweeper=optuna", "hydra.sweeper.storage=sqlite:///studies.db", "hydra.sweeper.study_name=a",
        "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1", "engine=stub", "engine.max_num_seqs=choice(8,16)",
        "objective.figures=steps", "workload.max_requests=4", "wandb.mode=disabled", "progress=false", "plots=false",
    )  # fmt: skip
    for _ in range(2):
        done = schedlab(*words)
        assert done.code == 0, done.err
    with closing(sqlite3.connect("studies.db")) as study:
        assert study.execute("select count(*) from trials where state = 'COMPLETE'").fetchone() == (4,)


@pytest.mark.parametrize("mistake", ["objective.direction=up", "objective.figures=ttft/p98"])
def test_a_mistaken_objective_costs_no_run(schedlab, mistake):
    done = schedlab("run", "engine=stub", "wandb.mode=disabled", mistake, "hydra.run.dir=r")
    assert done.code == 2 and mistake.replace("=ttft", " ttft") in done.err
    assert not list(Path("r").glob("*.jsonl.*"))


def test_optuna_finds_the_best_chunk_size_within_the_limit(schedlab):
    """Of eight sizes, all of which are run to know the answer, sixteen trials with a seed find the best."""
    pytest.importorskip("optuna")
    quick = (
        "wandb.mode=disabled",
        "progress=false",
        "workload.num_requests=100",
        "objective.at_most={tpot/p99: 0.016}",
    )
    sizes = "range(128, 1024, step=128)"
    params = f"hydra.sweeper.params={{policy.chunk_size: '{sizes}'}}"
    fewer = ("hydra.sweeper.n_trials=16", "hydra.sweeper.sampler.n_startup_trials=4")
    done = schedlab("run", "-m", "experiment=tune_chunk_size", *quick, *fewer, params, "hydra.sweep.dir=s")
    assert done.code == 0, done.err
    grid = ",".join(str(size) for size in range(128, 1025, 128))
    words = ("engine=virtual", "model=llama3.1-8b", "workload=bursty", "record=summary", "policy=chunked_prefill")
    schedlab("run", "-m", *quick, *words, f"policy.chunk_size={grid}", "hydra/launcher=pool", "hydra.sweep.dir=all")
    runs = [(128 * (job + 1), read_run(Path("all", str(job))).summary) for job in range(8)]
    allowed = {size: summary["ttft/p99"] for size, summary in runs if summary["tpot/p99"] <= 0.016}
    assert 0 < len(allowed) < 8
    found = OmegaConf.load("s/optimization_results.yaml")
    assert found.best_params["policy.chunk_size"] == min(allowed, key=lambda size: allowed[size])
    assert found.best_value == min(allowed.values())


def test_the_agents_command_line_is_a_run(schedlab, monkeypatch):
    """As `wandb agent` renders it: ${args_no_hyphens} are `key=value`."""
    from wandb.sdk.launch.sweeps import utils

    sweep = OmegaConf.to_container(OmegaConf.load(ROOT / "experiments/wandb_sweep.yaml"))
    chosen = {
        name: {"value": told.get("value", told.get("values", [64])[0])} for name, told in sweep["parameters"].items()
    }
    arguments = utils.create_sweep_command_args({"args": chosen})
    words = []
    for word in utils.create_sweep_command(sweep["command"]):
        name = str(word)[2:-1] if str(word).startswith("${") else None
        words += {None: [word], "env": [], "program": [], "args_no_hyphens": arguments["args_no_hyphens"]}[name]
    assert words[0] == "run" and "policy.chunk_size=64" in words and sweep["program"] == "schedlab"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    done = schedlab(*words, "wandb.mode=disabled", "workload.num_requests=20")
    assert done.code == 0, done.err
    (result,) = Path().glob("outputs/*/*/result.json")
    assert sweep["metric"]["name"] in read_run(result.parent).summary
