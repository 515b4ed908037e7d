"""`hydra/launcher=ray`: what travels, what comes back, and a node that is killed in the middle of a sweep."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import processes_below

from schedlab.experiments.sweep import remote, resume
from schedlab.framework.results.reader import read_run
from schedlab.workloads.workload import embedded_file

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false")
SLOW = """
import os, time
from pathlib import Path
from schedlab.policies.fcfs import FCFS
import helper

class Slow(FCFS):
    def schedule(self, step):
        if step.now == 0:
            with Path(helper.ATTEMPTS).open("a") as file:
                file.write(f"{os.getpid()} {os.getcwd()}\\n")
            time.sleep(6)
        super().schedule(step)
"""


def test_a_file_and_a_folder_travel(tmp_path):
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "folder/below/file").write_bytes(b"\0content")
    remote.unpack(remote.pack(tmp_path / "folder"), tmp_path / "there/folder")
    assert (tmp_path / "there/folder/below/file").read_bytes() == b"\0content"
    remote.unpack(remote.pack(tmp_path / "folder/below/file"), tmp_path / "elsewhere/file")
    assert (tmp_path / "elsewhere/file").read_bytes() == b"\0content"


def test_code_behind_targets_travels_with_what_it_imports(workspace):
    (workspace / "mine.py").write_text(SLOW)
    (workspace / "helper.py").write_text("ATTEMPTS = 'x'\n")
    (workspace / "unrelated.py").write_text("")
    sys.path.insert(0, str(workspace))
    remote.stage(workspace / "code", [{"policy": {"_target_": "mine.Slow"}, "slo": {"_target_": "schedlab.x.Y"}}])
    found = {str(path.relative_to(workspace / "code")) for path in (workspace / "code").rglob("*.py")}
    assert {"mine.py", "helper.py", "schedlab/framework/engine.py"} <= found and "unrelated.py" not in found
    assert (workspace / "code/schedlab/conf/config.yaml").exists()


def test_without_ray_one_line_says_so(schedlab, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = schedlab("run", "-m", *QUICK, "policy=fcfs", "hydra/launcher=ray")
    assert done.code == 2 and "pip install schedlab[ray]" in done.err


# ---- two nodes ----


def start(*words: str, folder: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("ray")), "start", *words, "--block", "--num-cpus=1"]
    return subprocess.Popen(
        [*command, "--object-store-memory=100000000", "--disable-usage-stats"],
        stdout=(folder / f"node{words[0]}.log").open("wb"),
        stderr=subprocess.STDOUT,
        cwd=folder,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """A node with everything that it started."""
    for pid in {process.pid} | processes_below(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    pytest.importorskip("ray")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"
    head = start(
        "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", folder=tmp_path
    )
    time.sleep(10)
    processes = [head, start(f"--address={address}", folder=tmp_path)]
    try:
        yield address, processes
    finally:
        for process in processes:
            if process.poll() is None:
                kill(process)


def attempts(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.full
def test_jobs_of_a_killed_node_run_elsewhere(workspace, nodes):
    address, (_, second) = nodes
    (workspace / "mine.py").write_text(SLOW)
    (workspace / "helper.py").write_text(f"ATTEMPTS = {str(workspace / 'attempts')!r}\n")
    rows = embedded_file("sample.jsonl.gz")
    (workspace / "trace.jsonl.gz").write_bytes(rows.read_bytes())
    words = [
        *QUICK, "policy=custom", "policy._target_=mine.Slow", "seed=range(6)", "workload=trace",
        "workload.path=trace.jsonl.gz", "workload.format=mooncake", "workload.block_size=16",
        "workload.max_requests=8", "hydra/launcher=ray", f"hydra.launcher.address={address}",
        "hydra.sweep.dir=s", "resume=true",
    ]  # fmt: skip
    command = [sys.executable, "-m", "schedlab", "run", "-m", *words]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 150
    while attempts(workspace / "attempts") < 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert attempts(workspace / "attempts") >= 2, sweep.poll()
    kill(second)  # each node runs a job now
    _, err = sweep.communicate(timeout=240)
    assert sweep.returncode == 0, err
    assert attempts(workspace / "attempts") >= 7
    places = {line.split()[1] for line in (workspace / "attempts").read_text().splitlines()}
    assert str(workspace) not in places  # relative inputs were brought there
    runs = [read_run(workspace / "s" / str(seed)) for seed in range(6)]
    assert [run.status for run in runs] == ["finished"] * 6 and len({run.digest for run in runs}) > 1
    assert all((workspace / "s" / str(seed) / name).exists() for seed in range(6) for name in (resume.DONE, remote.LOG))

    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and again.stdout.count("was finished") == 6
