"""`hydra/launcher=pool`: the configs, tables and messages of Hydra's own launcher, and what a lost process costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import pytest
from children import Echo, processes_below, takes_ctrl_c
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf

from schedlab.experiments.run.compose import CONFIG_MODULE
from schedlab.experiments.sweep import jobs, pool
from schedlab.framework.results.reader import read_run
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.workload import Traces, embedded_file, keep_traces

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "workload.max_requests=8")
POOL = ("hydra/launcher=pool", "hydra.launcher.n_jobs=2")


# ---- configs without Hydra's whole composition ----


@pytest.fixture
def composer():
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        words = ["policy=fcfs,chunked_prefill", "seed=0,1", "hydra.sweep.dir=somewhere"]
        master = loader.load_configuration("config", words, RunMode.MULTIRUN)
        yield jobs.Composer(loader, master), partial(loader.load_sweep_config, master)


@pytest.mark.parametrize(
    "words",
    [
        ("seed=3",),
        ("policy=chunked_prefill", "policy.chunk_size=64"),
        ("policy.chunk_size=64", "policy=chunked_prefill"),
        ("policy=prefix_reuse", "seed=2", "record=summary"),
        ("engine=virtual", "model=llama3.1-8b", "engine.num_blocks=77", "profile=null"),
        ("workload=poisson", "workload.arrivals.rate=3.5", "workload.lengths.prompt=[1,9]"),
        ("+policy.patience=3",),
        ("++policy.preempt_mode=swap", "++policy.other={a: 1}"),
        ("~workload.obtain",),
        ("experiment=demo", "engine.max_num_seqs=3"),
        ("slo=none", "wandb.tags=[a,b]", "hydra.job.name=x"),
    ],
)
def test_a_config_is_the_one_that_hydra_composes(composer, words):
    quick, load = composer
    whole = load(list(words))
    for _ in range(2):  # a second job of the same options must find them untouched
        config, holder = quick.compose(words)
        expected = OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"])
        assert OmegaConf.to_container(config) == OmegaConf.to_container(expected)
        assert holder.hydra.overrides.task == whole.hydra.overrides.task
        assert holder.hydra.job.override_dirname == whole.hydra.job.override_dirname
        assert holder.hydra.runtime.choices == whole.hydra.runtime.choices
        assert holder.hydra.job.name == whole.hydra.job.name


@pytest.mark.parametrize("words", [("policy.no_such=3",), ("seeed=3",), ("policy=nope",), ("+policy.preempt_mode=x",)])
def test_a_wrong_word_is_as_wrong_as_for_hydra(composer, words):
    quick, load = composer
    with pytest.raises(Exception) as theirs:
        load(list(words))
    with pytest.raises(type(theirs.value)) as ours:
        quick.check(words)
    assert str(ours.value) == str(theirs.value)


def test_jobs_that_set_the_same_keys_are_checked_once(composer, monkeypatch):
    quick, _ = composer
    composed: list[Any] = []
    monkeypatch.setattr(quick, "compose", composed.append)
    for seed in range(5):
        quick.check((f"seed={seed}", "engine.block_size=8"))
    quick.check(("seed=1",))
    assert len(composed) == 2


# ---- sweeps ----


def test_a_sweep_is_that_of_the_basic_launcher(schedlab):
    words = ("run", "-m", *QUICK, "policy=fcfs,chunked_prefill", "engine.num_blocks=64,128")
    for launcher in ("basic", "pool"):
        done = schedlab(*words, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}")
        assert done.code == 0, done.err
        assert len([line for line in done.out.splitlines() if line[:3] in ("0: ", "1: ", "2: ", "3: ")]) == 4
    assert Path("basic/comparison.md").read_text() == Path("pool/comparison.md").read_text()
    for number in "0123":
        ours, theirs = (Path(launcher, number) for launcher in ("pool", "basic"))
        assert read_run(ours).result["config_hash"] == read_run(theirs).result["config_hash"]
        assert OmegaConf.load(ours / ".hydra/overrides.yaml") == OmegaConf.load(theirs / ".hydra/overrides.yaml")


FAULTY = """
import os, signal
from schedlab.policies.fcfs import FCFS

class Faulty(FCFS):
    def schedule(self, step):
        step.no_such_member

class Deadly(FCFS):
    def schedule(self, step):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Faulty", "policy Faulty: schedule raised AttributeError"),
        ("Deadly", "the process that ran it ended with code -9"),
    ],
)
def test_a_failing_job_costs_the_others_nothing(schedlab, name, told):
    Path("mine.py").write_text(FAULTY)
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/faulty.yaml").write_text(f"_target_: mine.{name}\n")
    words = ("policy=faulty,fcfs,chunked_prefill,prefix_reuse", "hydra.sweep.dir=s", "hydra/launcher=pool")
    done = schedlab("run", "-m", *QUICK, *words, "hydra.launcher.n_jobs=1")
    assert done.code == 1 and f"0: failed: {told}" in done.err
    states = [read_run(Path("s", number)).status for number in "0123"]
    assert states[1:] == ["finished"] * 3 and states[0] in ("failed", "interrupted")
    assert f"{states[0]}: faulty: {told}" in done.out and "TTFT p99 ms" in done.out


SLOW = """
import time
from schedlab.policies.fcfs import FCFS

class Slow(FCFS):
    def schedule(self, step):
        time.sleep(0.02)
        super().schedule(step)
"""


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_processes_end_with_their_caller(workspace, end, code):
    (workspace / "mine.py").write_text(SLOW)
    words = [sys.executable, "-m", "schedlab", "run", "-m", "engine=stub", "wandb.mode=disabled", "plots=false", *POOL]
    process = subprocess.Popen(
        [*words, "policy=custom", "policy._target_=mine.Slow", "seed=0,1", "hydra.sweep.dir=cut"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=takes_ctrl_c,
    )
    wait_for(lambda: len(list(Path("cut").glob("*/steps.jsonl.*.partial"))) == 2)
    workers = processes_below(process.pid)
    assert len(workers) >= 2
    process.send_signal(end)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    if end == signal.SIGINT:
        lines = [line for line in err.splitlines() if line]
        assert lines[-1] == "interrupted: what was written can be read in cut", err
    assert [read_run(Path("cut", number)).status for number in "01"] == ["interrupted"] * 2


def wait_for(true: Callable[[], bool], within_s: float = 90) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


# ---- processes ----


def test_processes_are_used_again_and_lines_arrive_whole(capsys):
    ends = dict(pool.run_all(Echo(), list(range(20)), 2))
    assert len({end.value for end in ends.values()}) == 2 and len(ends) == 20
    assert os.getpid() not in {end.value for end in ends.values()}
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"job {number}" for number in range(20))


def test_what_goes_wrong_is_an_outcome():
    ends = dict(pool.run_all(Echo(), ["raise", "die", "die", 1, 2], 2))
    assert isinstance(ends[0].error, ValueError) and ends[3].value and ends[4].value
    assert isinstance(ends[1].error, pool.WorkerLost) and "code 3" in str(ends[2].error)


def test_a_folder_may_be_named_by_what_hydra_knows(schedlab):
    subdir = "hydra.sweep.subdir=r${hydra.job.num}_${hydra.runtime.choices.policy}_${hydra.job.name}_${seed}"
    assert schedlab("run", "-m", *QUICK, *POOL, "policy=fcfs,orca", subdir, "hydra.sweep.dir=s").code == 0
    assert sorted(path.parent.name for path in Path("s").glob("*/result.json")) == [
        "r0_fcfs_schedlab_0", "r1_orca_schedlab_0",
    ]  # fmt: skip


@pytest.mark.parametrize("launcher", [(), POOL], ids=["basic", "pool"])
def test_jobs_of_one_folder_get_one_each(schedlab, launcher):
    words = ("run", "-m", *QUICK, *launcher, "policy=fcfs,orca", "hydra.sweep.subdir=all", "hydra.sweep.dir=s")
    for _ in range(1 if launcher else 2):  # a second sweep in the same folder replaces the first one's runs
        done = schedlab(*words)
        assert done.code == 0, done.err
        runs = [read_run(path.parent) for path in Path("s").glob("*/result.json")]
        assert sorted(run.manifest["labels"]["policy"] for run in runs) == ["fcfs", "orca"]
    assert {path.name for path in Path("s/all/.hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    kept = OmegaConf.load("s/all/.hydra/config.yaml")
    assert kept.engine.block_size == 16 and kept.policy._target_.startswith("schedlab.policies")


@pytest.mark.parametrize("launcher", [(), POOL], ids=["basic", "pool"])
def test_paths_stay_those_of_the_command_s_folder(schedlab, launcher):
    words = ("run", "-m", *QUICK, *launcher, "policy=fcfs", "hydra.job.chdir=true", "hydra.sweep.dir=s")
    done = schedlab(*words)
    assert done.code and "error: hydra.job.chdir: expected false" in done.err, done.err


def test_no_processes_are_a_mistake(schedlab):
    done = schedlab("run", "-m", *QUICK, "policy=fcfs", "hydra/launcher=pool", "hydra.launcher.n_jobs=0")
    assert done.code == 2 and done.err.startswith("error: hydra.launcher.n_jobs=0: expected 1 or more processes")


def test_no_jobs_need_no_process():
    assert dict(pool.run_all(Echo(), [], 2)) == {}


# ---- traces ----


def test_a_trace_is_read_once_while_its_file_stays(tmp_path):
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(embedded_file("sample.jsonl.gz").read_bytes())
    kept, options = Traces(1), ReadOptions(block_size=16)
    first = kept.read(file, "mooncake", options)
    assert kept.read(file, "mooncake", options) is first
    assert kept.read(file, "mooncake", ReadOptions(block_size=16, keep_failed=True)) is not first
    os.utime(file, (1, 1))
    again = kept.read(file, "mooncake", options)
    assert again is not first and again.equals(first)
    with pytest.raises(ValueError):
        first.arrival_ns[0] = 7


def test_a_process_keeps_nothing_unasked(tmp_path):
    assert Traces()._found == {} and keep_traces(0) is None
    options = ReadOptions(block_size=16)
    file = embedded_file("sample.jsonl.gz")
    assert Traces().read(file, "mooncake", options) is not Traces().read(file, "mooncake", options)
