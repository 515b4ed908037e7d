"""`resume=true`: what is skipped, what is not, and that a kill at no moment leaves a run that only looks whole."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from schedlab.experiments.sweep import resume
from schedlab.framework.results.reader import read_run
from schedlab.workloads.workload import embedded_file

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "workload.max_requests=8")
KILLER = Path(__file__).with_name("killer.py")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on keeps what it knows of code; these tests change it between calls."""
    for cached in (resume.code_hash, resume.sources_hash, resume.file_hash):
        cached.cache_clear()
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def stamps(sweep: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in sweep.glob("*/result.json")}


def test_a_second_time_nothing_runs(schedlab):
    words = ("run", "-m", *QUICK, "policy=fcfs,chunked_prefill", "hydra.sweep.dir=s", "resume=true")
    assert schedlab(*words).code == 0
    before = stamps(Path("s"))
    again = schedlab(*words)
    assert again.code == 0 and again.out.startswith("resume: 2 finished runs in s\n0: was finished, TTFT p99 ms")
    assert stamps(Path("s")) == before and len(before) == 2
    assert "chunked_prefill" in again.out and "SLO default" in again.out


def test_without_asking_everything_runs(schedlab):
    words = ("run", "-m", *QUICK, "policy=fcfs", "hydra.sweep.dir=s")
    schedlab(*words)
    before = stamps(Path("s"))
    schedlab(*words)
    assert stamps(Path("s")) != before


def test_a_single_run_resumes_too(schedlab):
    words = ("run", *QUICK, "hydra.run.dir=r", "resume=true")
    schedlab(*words)
    before = Path("r/result.json").stat().st_mtime_ns
    assert "TTFT p99 ms" in schedlab(*words).out
    assert Path("r/result.json").stat().st_mtime_ns == before


def test_a_sweep_that_grows_keeps_what_it_has(schedlab):
    """Its jobs are numbered anew: job 0 of the first sweep is job 1 of the second."""
    words = ("run", "-m", *QUICK, "hydra.sweep.dir=s")
    schedlab(*words, "policy=fcfs,prefix_reuse")
    before = stamps(Path("s"))
    done = schedlab(*words, "policy=chunked_prefill,fcfs,prefix_reuse", "resume=true")
    assert done.code == 0, done.err
    after = stamps(Path("s"))
    assert {name: after[name] for name in before} == before
    assert sorted(read_run(Path("s") / name).manifest["labels"]["policy"] for name in after) == [
        "chunked_prefill", "fcfs", "prefix_reuse",
    ]  # fmt: skip


def test_what_shows_or_reports_a_run_is_no_reason_to_repeat_it(schedlab):
    words = ("run", "-m", *QUICK, "policy=fcfs", "hydra.sweep.dir=s", "resume=true")
    schedlab(*words)
    assert "was finished" in schedlab(*words, "wandb.project=other", "plots=true").out


@pytest.mark.parametrize("file", ["mine.py", "helper.py"])
def test_changed_code_runs_again(schedlab, file):
    Path("mine.py").write_text(
        "import helper\nfrom schedlab.policies.fcfs import FCFS\n\nclass Mine(FCFS):\n    pass\n"
    )
    Path("helper.py").write_text("KNOB = 1\n")
    words = ("run", "-m", *QUICK, "policy=custom", "policy._target_=mine.Mine", "hydra.sweep.dir=s", "resume=true")
    assert schedlab(*words).code == 0
    assert "was finished" in schedlab(*words).out
    Path(file).write_text(Path(file).read_text() + "\n# changed\n")
    resume.code_hash.cache_clear()
    again = schedlab(*words)
    assert "0: run again, for mine.Mine changed" in again.out and "was finished" not in again.out


def test_a_changed_trace_runs_again(schedlab):
    rows = gzip.decompress(embedded_file("sample.jsonl.gz").read_bytes()).splitlines(keepends=True)[:9]
    Path("trace.jsonl").write_bytes(b"".join(rows))
    more = ("workload=trace", "workload.path=trace.jsonl", "workload.format=mooncake", "workload.block_size=16")
    words = ("run", "-m", *QUICK, *more, "hydra.sweep.dir=s", "resume=true")
    assert schedlab(*words).code == 0
    assert "was finished" in schedlab(*words).out
    Path("trace.jsonl").write_bytes(b"".join(rows[:-1]))
    assert "0: run again, for trace.jsonl changed" in schedlab(*words).out
    assert read_run(Path("s/0")).summary["requests/finished"] == 8


def test_changed_sources_run_again(schedlab, monkeypatch):
    words = ("run", "-m", *QUICK, "policy=fcfs", "hydra.sweep.dir=s", "resume=true")
    schedlab(*words)
    monkeypatch.setattr(resume, "sources_hash", lambda: "other")
    assert "0: run again, for schedlab's sources changed" in schedlab(*words).out


def test_what_failed_runs_again(schedlab):
    Path("mine.py").write_text(
        "from pathlib import Path\nfrom schedlab.policies.fcfs import FCFS\n\n"
        "class Mine(FCFS):\n    def schedule(self, step):\n"
        "        if not Path('well').exists():\n            raise RuntimeError('not yet')\n"
        "        super().schedule(step)\n"
    )
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text("_target_: mine.Mine\n")
    words = ("run", "-m", *QUICK, "policy=fcfs,mine", "hydra.sweep.dir=s", "resume=true")
    assert schedlab(*words).code == 1
    Path("well").touch()
    done = schedlab(*words)
    assert done.code == 0 and "0: was finished" in done.out and "1: TTFT" in done.out


@pytest.mark.parametrize("damage", ["job.json", "result.json"])
def test_a_run_without_its_last_file_runs_again(schedlab, damage):
    words = ("run", "-m", *QUICK, "policy=fcfs", "hydra.sweep.dir=s", "resume=true")
    schedlab(*words)
    digest = read_run(Path("s/0")).digest
    (Path("s/0") / damage).unlink()
    assert "was finished" not in schedlab(*words).out
    assert read_run(Path("s/0")).digest == digest and (Path("s/0") / resume.DONE).exists()


def test_an_earlier_attempt_leaves_no_second_tracker_run(schedlab):
    words = ("run", "-m", *QUICK, "wandb.mode=offline", "policy=fcfs", "hydra.sweep.dir=s", "resume=true")
    schedlab(*words)
    Path("s/0/job.json").unlink()
    assert schedlab(*words).code == 0
    assert len(list(Path("s/0/wandb").glob("offline-run-*"))) == 1


def test_the_identity_names_what_it_covers(schedlab):
    schedlab("run", *QUICK, "hydra.run.dir=r")
    done = json.loads(Path("r/job.json").read_text())
    assert done["files"].keys() == {"embedded:sample.jsonl.gz"} and done["targets"] == {}
    assert done["config_hash"] == read_run(Path("r")).result["config_hash"]


def killed(folder: Path, seed: int, kills: int, *more: str) -> str:
    words = [*QUICK, *more]
    command = [sys.executable, str(KILLER), str(folder), str(seed), str(kills), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("launcher", ["basic", "pool"])
def test_killed_at_a_few_moments(workspace, launcher):
    more = ("engine.num_blocks=200,300,4096", f"hydra/launcher={launcher}")
    assert killed(workspace, 1, 2, *more).startswith("killed 2 times")


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["basic", "pool"])
def test_killed_at_any_moment(workspace, launcher):
    more = ("policy=fcfs,chunked_prefill", "engine.num_blocks=200,300,4096", f"hydra/launcher={launcher}")
    assert killed(workspace, 2, 100, *more).startswith("killed 100 times")
