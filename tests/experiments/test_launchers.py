"""Launchers that others make, with a sweep of ours; and the configurations for clusters."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "workload.max_requests=8")


def test_submitit_gives_the_same_table(schedlab):
    """Each job is a process of its own, as on Slurm, with its output in a file."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ("run", "-m", *QUICK, "policy=fcfs,chunked_prefill")
    for launcher in ("basic", "submitit_local"):
        done = schedlab(*words, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}")
        assert done.code == 0, done.err
    assert Path("basic/comparison.md").read_text() == Path("submitit_local/comparison.md").read_text()
    logs = [log.read_text() for log in Path("submitit_local/.submitit").glob("*/*_log.out")]
    assert len(logs) == 2 and all("TTFT p99 ms" in log for log in logs)


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_others_resume_too(schedlab, launcher):
    """What the basic launcher has finished, others need not run."""
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    words = ("run", "-m", *QUICK, "policy=fcfs", "hydra.sweep.dir=s")
    assert schedlab(*words).code == 0
    before = Path("s/0/result.json").stat().st_mtime_ns
    assert schedlab(*words, "resume=true", f"hydra/launcher={launcher}").code == 0
    assert Path("s/0/result.json").stat().st_mtime_ns == before


SBATCH = """#!/bin/sh
cp "$1" {folder}/script; echo "Submitted batch job 7"
"""


def test_slurm_gets_an_array_of_jobs(workspace):
    """A cluster's `sbatch` is played by one that keeps the script; the sweep then waits for jobs, so it is ended."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    tools = workspace / "bin"
    tools.mkdir()
    for name, text in {
        "sbatch": SBATCH.format(folder=workspace),
        "srun": "#!/bin/sh\n",
        "sacct": "#!/bin/sh\n",
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    words = [
        "policy=fcfs,chunked_prefill",
        "hydra/launcher=slurm",
        "hydra.launcher.partition=gpus",
        "hydra.sweep.dir=s",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "schedlab", "run", "-m", *QUICK, *words, "hydra.sweep.dir=s"],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    until = time.monotonic() + 90
    while not (workspace / "script").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    process.kill()
    said = process.communicate()[0].decode()
    script = (workspace / "script").read_text() if (workspace / "script").exists() else said
    asked = "--partition=gpus", "--array=0-1%2", "--cpus-per-task=2", "--mem=8GB", "--time=60", "--signal=USR2@120"
    for line in asked:
        assert line in script, script
