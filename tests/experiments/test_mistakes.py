"""Mistakes on commands that read runs: one clear line, and nothing that was there is replaced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
