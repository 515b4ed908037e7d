"""Mistakes on commands that read runs: one clear line, and nothing that was there is replaced."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException

from schedlab.experiments.run.compose import one_line
from schedlab.framework.request import SLO
from schedlab.framework.results.reader import read_run

RUN = ("run", "engine=virtual", "model=llama3.1-8b", "hardware=h100", "wandb.mode=disabled", "plots=false",
       "progress=false", "timeline=0", "workload.max_requests=12", "hydra.run.dir=a")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("replay a --policy fcfs engine.num_blocks=100", "engine.num_blocks=100"),
        ("replay a --policy fcfs --out a", "holds a run already"),
        ("timeline a --start 5000 --stop 6000", "nothing happened in [5000, 6000) s"),
        ("timeline a --out none/there.json", "none/there.json: No such file or directory"),
        ("compare a --wandb onlin", "--wandb onlin: expected offline, online or disabled"),
        ("diff a a --requests -1", "--requests -1: expected 0 or more"),
        ("run slo.ttft_s=-1 engine=stub", "slo.ttft_s: expected more than 0 s, or null for no limit, found -1"),
        ("run wandb.max_points=-1 wandb.mode=offline", "wandb.max_points: expected at least 1, found -1"),
        ("run policy=custom policy._target_=schedlab.policies.orca.Orca policy.x=4", "takes a plus: +policy.x=…"),
        ("run workload.path=a#b", "quote the value, for the shell too: \"workload.path='a#b'\""),
        ("run wandb.group=é", "quote the value"),
        ("run timeline=-1", "timeline: expected 0 steps or more, found -1"),
        ("run -m seed=1,2 --cfg job", "leave out -m"),
        ("policy check policy=fcfs check.seconds=0", "check.seconds: expected more than 0"),
        ("calibrate engine=cpu model=tiny calibrate.passes=1", "calibrate.passes: expected at least 2, found 1"),
    ],
)
def test_one_line_and_nothing_replaced(schedlab, words, told):
    assert schedlab(*RUN).code == 0
    before = Path("a/result.json").read_bytes()
    done = schedlab(*words.split())
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1, done.err
    assert Path("a/result.json").read_bytes() == before and not Path("a/timeline.json").exists()


def test_another_policy_is_told_the_times_of_the_run_s_own_model(schedlab):
    assert schedlab(*RUN).code == 0
    done = schedlab("replay", "a", "--policy", "slo_aware", "--out", "b")
    assert done.code == 0 and "arrivals differ" not in done.out, done.out
    first, second = (json.loads(Path(run, "manifest.json").read_text()) for run in "ab")
    assert second["config"]["policy"]["estimator"]["model"] == first["config"]["model"]
    assert second["overrides"] == {k: v for k, v in first["overrides"].items() if not k.startswith("policy")}
    assert read_run(Path("b")).summary["requests/offered"] == 12
    assert "variant" not in schedlab("compare", "a", "b").err


def test_a_broken_file_in_the_user_s_folder_is_named_and_hides_no_other(schedlab, workspace):
    folder = workspace / "conf" / "policy"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("_target_: mine.Mine\nchunk: [1\n  b: {\n")
    (folder / "fine.yaml").write_text("_target_: mine.Mine\n")
    done = schedlab("policy", "list")
    assert done.code == 0 and "mine.Mine" in done.out and "cannot be read" in done.out and "fcfs" in done.out
    assert "broken.yaml" in done.err and "line 3" in done.err and done.err.count("\n") == 1
    done = schedlab("run", "engine=stub", "policy=broken")
    assert done.code == 2 and f"{folder / 'broken.yaml'}: line 3" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(("word", "told"), [
    ("hydra/sweeper=optuna", "expected the package hydra-optuna-sweeper; pip install schedlab[optuna]"),
    ("hydra/launcher=joblib", "pip install hydra-joblib-launcher"),
])  # fmt: skip
def test_an_extra_that_is_missing_is_named_with_what_installs_it(word, told):
    missing = MissingConfigException("not found", missing_cfg_file=word.replace("=", "/"), options=["basic"])
    assert told in one_line(missing)


def test_an_infinite_objective_is_no_limit():
    assert SLO("x", ttft_s=math.inf, e2e_s=2.0) == SLO("x", e2e_s=2.0) and not SLO("x", tpot_s=math.inf).limited


@pytest.mark.parametrize("charset", [{"PYTHONIOENCODING": "latin-1"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_no_character_set_fails_a_run(workspace, charset):
    """Signs that a terminal lacks are replaced; files have them all."""
    words = ("run", "-m", "engine=stub", "policy=fcfs,orca", "hydra.sweep.dir=s", "hydra/launcher=pool",
             "workload.max_requests=4", "wandb.mode=disabled", "progress=false", "plots=false")  # fmt: skip
    env = {**os.environ, "PYTHONCOERCECLOCALE": "0", **charset}
    for command in (words, ("compare", "s")):
        done = subprocess.run([sys.executable, "-m", "schedlab", *command], env=env, capture_output=True)
        assert done.returncode == 0 and b"TTFT ? 1000" in done.stdout, done.stderr
    assert "TTFT ≤ 1000" in (workspace / "s" / "comparison.md").read_text(encoding="utf-8")
