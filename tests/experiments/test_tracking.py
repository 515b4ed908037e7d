"""Weights & Biases, read back with its own tools; and that nothing it does can cost a run.

Processes of their own, because W&B keeps a service and settings per process. Nothing leaves this machine.
"""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from wandb_server import wandb_server

from schedlab.experiments import engines
from schedlab.experiments.run import tracking
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.run.job import names_of, shown_name
from schedlab.experiments.run.tracking import NoTracker, WandbConfig, start_tracker
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork

LOGS = ("requests", "steps", "workload")

KEY = "a" * 40
NOWHERE = "http://127.0.0.1:9"
QUICK = ("engine=stub", "plots=false", "workload.max_requests=12", "progress=false")
HANGS_S = 60
"""Far above what any of this takes, far below W&B's own 90 s and its telemetry's patience."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment without credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home"))}


def run(folder: Path, environment: dict[str, str], *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schedlab", "run", *QUICK, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANGS_S, **more)


def runs_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("offline-run-*"))


def inspect(directory: Path, *options: str) -> list[dict[str, Any]]:
    """What W&B itself reads in an offline run."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(directory)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=True).stdout
    return [json.loads(said)] if "--summary" in options else [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory, home: dict[str, str]) -> Path:
    """Two runs of one process, offline because nothing else was asked for, with an empty WANDB_MODE."""
    folder = tmp_path_factory.mktemp("sweep")
    done = run(folder, {**home, "WANDB_MODE": ""}, "-m", "policy=fcfs,chunked_prefill", "wandb.tags=[mine]")
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    (made,) = folder.glob("multirun/*/*")
    return made


def test_each_job_is_a_run_of_its_own(sweep):
    runs = runs_below(sweep)
    assert len(runs) == 2
    records = [next(r["run"] for r in inspect(run) if r["type"] == "run") for run in runs]
    assert len({record["run_id"] for record in records}) == 2
    assert {record["display_name"] for record in records} == {
        f"{policy} · sample · engine=stub · max_requests=12 · s0" for policy in ("fcfs", "chunked_prefill")
    }
    for record in records:
        assert record["project"] == "schedlab" and record["job_type"] == "run"
        assert record["run_group"] == f"{sweep.parent.name}/{sweep.name}"
        assert {"mine", "sample", "stub", "tiny"} <= set(record["tags"])


def test_a_run_carries_config_summary_and_curves(sweep):
    result = read_run(sweep / "0")
    (directory,) = runs_below(sweep / "0")
    (whole,) = inspect(directory, "--summary")
    config, summary = whole["config"], whole["summary"]
    assert config["policy"]["_target_"] == "schedlab.policies.fcfs.FCFS"
    assert config["engine"]["max_num_batched_tokens"] == 2048
    assert [config[f"{part}_name"] for part in ("policy", "workload", "engine", "model")] == [
        "fcfs", "sample", "stub", "tiny",
    ]  # fmt: skip
    assert config["seed"] == 0 and "rate" in config and not {"calibrate", "capacity", "fidelity"} & config.keys()
    assert config["trace_sha256"] == result.manifest["workload"]["sha256"]
    known = {key: value for key, value in result.summary.items() if value is not None}
    assert {key: summary[key] for key in known} == pytest.approx(known)
    assert summary["digest"] == result.digest and summary["status"] == "finished"

    records = inspect(directory)
    axes = {
        m.get("glob_name") or m.get("name"): m.get("step_metric")
        for m in (r["metric"] for r in records if r["type"] == "metric")
    }
    assert axes["sched/*"] == axes["kv/*"] == axes["queue/*"] == "engine/time_s"
    assert axes["cdf/ttft"] == "cdf/ttft_s"
    metrics = {r["metric"].get("name"): r["metric"] for r in records if r["type"] == "metric"}
    goals = {key: metrics[key]["summary"] for key in ("ttft/p99", "goodput/requests_per_s")}
    assert goals == {"ttft/p99": {"min": True}, "goodput/requests_per_s": {"max": True}}
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    times = [row["engine/time_s"] for row in history if "engine/time_s" in row]
    assert times == sorted(times) and 10 < len(times) <= 250
    cdf = [(row["cdf/ttft_s"], row["cdf/ttft"]) for row in history if "cdf/ttft" in row]
    assert cdf == sorted(cdf) and cdf[-1] == (pytest.approx(result.summary["ttft/max"]), 1.0)
    table = next(row for row in history if "requests.ncols" in row or isinstance(row.get("requests"), dict))
    assert table.get("requests.nrows", 12) == 12


def test_the_files_are_an_artifact_that_can_be_moved(sweep, tmp_path, home):
    """The folder goes elsewhere, and `wandb sync` inside it uploads the very bytes."""
    moved = tmp_path / "elsewhere"
    shutil.copytree(sweep / "0", moved)
    with wandb_server() as server:
        environment = {**home, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        command = [sys.executable, "-m", "wandb", "sync", *(str(r.relative_to(moved)) for r in runs_below(moved))]
        subprocess.run(command, cwd=moved, env=environment, capture_output=True, timeout=HANGS_S, check=True)
    sent = server.uploads
    for name in ("result.json", "manifest.json", *(f"{log}.jsonl{packed.codec().suffix}" for log in LOGS)):
        assert sent[name] == (moved / name).read_bytes()
    table, requests = json.loads(sent["requests.table.json"]), read_run(moved).requests
    assert table["nrows"] == len(table["data"]) == 12
    for name, cells in zip(table["columns"], zip(*table["data"], strict=True), strict=True):
        assert list(cells) == tracking.plain(list(requests[name]))


def test_artifacts_are_staged_in_the_run_directory(sweep, home):
    assert any((sweep / "0" / "wandb" / "data").rglob("*"))
    assert not any(Path(home["HOME"]).rglob("staging/*"))


def test_names_tell_every_run_of_a_sweep_apart():
    """Three policies, one by its class, at three rates."""
    policies = {"fcfs": {}, "orca": {}, "Mine": {"policy._target_": "mine.Mine"}}
    names = [
        shown_name(
            {"policy_name": policy, "workload_name": "bursty", "seed": 0},
            {"workload": "bursty", "workload.arrivals.rate": str(rate), "plots": "false", **more},
        )
        for policy, more in policies.items() for rate in (10, 20, 30)
    ]  # fmt: skip
    assert len(set(names)) == 9 and names[1] == "fcfs · bursty · rate=20 · s0"
    long = [shown_name({"policy_name": "p" * 200, "workload_name": "w", "seed": seed}, {}) for seed in range(2)]
    assert len(set(long)) == 2 and {len(name) for name in long} == {128}
    both = shown_name({"policy_name": "p", "workload_name": "w", "seed": 0}, {"engine.model": "1", "router.model": "2"})
    assert both == "p · w · engine.model=1 · router.model=2 · s0"


def test_a_policy_that_is_given_by_its_class_has_its_name():
    config = {"workload": {"arrivals": {"rate": 7.5}}}
    labels = {"policy": "custom", "workload": "poisson", "engine": "stub"}
    given = Experiment(FCFS(), CommonWork(num_requests=1), engines.stub(), 3, config=config, labels=labels)
    assert names_of(given) == {
        "policy_name": "FCFS", "workload_name": "poisson", "engine_name": "stub", "rate": 7.5, "seed": 3,
    }  # fmt: skip


def test_disabled_leaves_nothing(tmp_path, home):
    done = run(tmp_path, home, "wandb.mode=disabled")
    assert done.returncode == 0 and not list(tmp_path.rglob("wandb"))


def test_the_environment_chooses_the_mode_unless_a_key_does(tmp_path, home):
    assert not list((run(tmp_path, {**home, "WANDB_MODE": "disabled"}), tmp_path)[1].rglob("wandb"))
    run(tmp_path, {**home, "WANDB_MODE": "disabled"}, "wandb.mode=offline")
    assert len(runs_below(tmp_path)) == 1


def test_online_uploads_when_the_run_has_ended(tmp_path, home):
    with wandb_server() as server:
        environment = {**home, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        done = run(tmp_path, environment, "wandb.mode=online", "wandb.finish_timeout_s=40")
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert f"{server.url}/someone/schedlab/runs/run" in done.stdout
    (result,) = tmp_path.glob("outputs/*/*/result.json")
    assert server.uploads["result.json"] == result.read_bytes()


@pytest.mark.full
def test_a_sweep_of_a_hundred_runs_reads_back_run_by_run(tmp_path, home):
    """In processes that are used again, where a tracker that lingers would swallow the next run."""
    more = ("-m", "policy=fcfs,chunked_prefill", "seed=range(1,51)", "hydra/launcher=pool", "hydra.sweep.dir=s")
    quick = ("engine=stub", "plots=false", "progress=false", "workload=poisson", "workload.num_requests=40")
    for words in (["run", *more, *quick], ["compare", "s", "--baseline", "fcfs"]):
        command = [sys.executable, "-m", "schedlab", *words]
        done = subprocess.run(command, cwd=tmp_path, env=home, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0 and "warning" not in done.stderr, done.stderr
    runs = sorted(tmp_path.glob("s/[0-9]*/wandb/offline-run-*"))
    assert len(runs) == len({run.name.rpartition("-")[2] for run in runs}) == 100
    (comparison,) = tmp_path.glob("s/wandb/offline-run-*")
    with ThreadPoolExecutor(2) as readers:
        read = list(readers.map(inspect, [*runs, comparison]))
    started = [next(record["run"] for record in records if record["type"] == "run") for records in read]
    assert {run["run_group"] for run in started} == {f"{tmp_path.name}/s"}
    assert [run["job_type"] for run in started] == ["run"] * 100 + ["compare"]
    assert {run["display_name"] for run in started[:-1]} == {
        f"{policy} · poisson · engine=stub · num_requests=40 · s{seed}"
        for policy in ("fcfs", "chunked_prefill")
        for seed in range(1, 51)
    }
    for run, records in zip(runs, read, strict=False):
        digests = [r["summary"]["update"].get("digest") for r in records if r["type"] == "summary"]
        assert read_run(run.parents[1]).digest in digests
        assert {r["artifact"]["type"] for r in records if r["type"] == "artifact"} == {"request-table", "run-files"}
    assert {r["artifact"]["type"] for r in read[-1] if r["type"] == "artifact"} == {"verdicts"}


# ---- things that go wrong ----


def expect_one_warning(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("warning: "), done.stderr
    assert "Weights & Biases took no upload" in done.stderr and "wandb sync" in done.stderr
    for result in folder.rglob("result.json"):
        assert read_run(result.parent).status == "finished"
        assert len(runs_below(result.parent)) == 1


def test_a_terminal_is_never_asked_for_a_key(tmp_path, home):
    """On a terminal W&B would ask, and wait."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "schedlab", "run", *QUICK, "wandb.mode=online", "wandb.finish_timeout_s=40"]
    process = subprocess.Popen(command, cwd=tmp_path, env=home, stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            said += os.read(ours, 1024)
        except OSError:  # closed by the other side
            break
    assert process.wait(timeout=HANGS_S) == 0
    assert b"No API key" in said and said.count(b"\n") == 1
    os.close(ours)


def test_a_sweep_without_a_network_waits_for_it_once(tmp_path, home):
    environment = {**home, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": NOWHERE}
    words = ("-m", "wandb.mode=online", "wandb.finish_timeout_s=3", "policy=fcfs,chunked_prefill")
    expect_one_warning(run(tmp_path, environment, *words), tmp_path)


def test_a_network_that_dies_holds_nothing_up(tmp_path, home):
    with wandb_server(silent=True) as server:
        environment = {**home, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        done = run(tmp_path, environment, "wandb.mode=online", "wandb.finish_timeout_s=8")
    expect_one_warning(done, tmp_path)
    assert "UpsertBucket" in server.operations


def test_whatever_it_raises_is_one_warning(tmp_path, monkeypatch):
    import wandb

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.warns(UserWarning, match="no Weights & Biases run: out of luck"):
        tracker = start_tracker(WandbConfig(), {}, tmp_path)
    assert isinstance(tracker, NoTracker)


@pytest.mark.parametrize(("in_sweep", "seen"), [(True, (None, None)), (False, ("given", "must"))])
def test_only_a_run_of_its_own_takes_an_inherited_id(tmp_path, monkeypatch, in_sweep, seen):
    import wandb

    def look(**_: object) -> None:
        raise RuntimeError(f"{os.environ.get('WANDB_RUN_ID'), os.environ.get('WANDB_RESUME')}")

    monkeypatch.setattr(wandb, "init", look)
    monkeypatch.setenv("WANDB_RUN_ID", "given")
    monkeypatch.setenv("WANDB_RESUME", "must")
    with pytest.warns(UserWarning, match=re.escape(str(seen))):
        start_tracker(WandbConfig("dryrun"), {}, tmp_path, in_sweep=in_sweep)
    assert (os.environ["WANDB_RUN_ID"], os.environ["WANDB_RESUME"]) == ("given", "must")


class Refusing:
    """A run in which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError(f"no {name}")


def test_a_broken_run_is_one_warning_a_phase(tmp_path):
    tables = made_up.run(tmp_path)
    with pytest.warns(UserWarning) as warned:
        tracking.WandbTracker(Refusing(), WandbConfig(), tmp_path).finish(tables)
    assert len(warned) == 2


def test_the_sample_of_requests_is_fixed_and_bounded(tmp_path):
    tables = made_up.run(tmp_path, requests=50)
    kept = tracking.sampled(len(tables.requests["request_id"]), 20)
    assert np.array_equal(kept, tracking.sampled(50, 20))
    assert len(set(kept.tolist())) == 20 and np.array_equal(kept, np.sort(kept))
    assert tracking.sampled(5, 20).tolist() == [0, 1, 2, 3, 4]
