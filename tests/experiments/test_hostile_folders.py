"""A run's folder is data: whatever a stranger wrote into one, nothing is executed, imported or written elsewhere."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from schedlab.experiments.analysis.plots import save
from schedlab.experiments.analysis.rebuild import rebuild
from schedlab.experiments.run.tracking import WandbConfig, own_files
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads import files
from schedlab.workloads.files import open_text, sha256

RUN = ("run", "engine=virtual", "model=llama3.1-8b", "hardware=h100", "wandb.mode=disabled", "plots=false",
       "policy=sjf", "predictor=oracle", "progress=false", "timeline=0", "workload=poisson", "workload.num_requests=60",
       "workload.arrivals.rate=60", "engine.max_num_seqs=8", "hydra.run.dir=run")  # fmt: skip
CANARY = "touched"
Edit = Callable[[dict[str, Any]], None]


def named(place: str, target: str, **knobs: Any) -> Edit:
    """A part of the configuration that calls `target`."""

    def edit(manifest: dict[str, Any]) -> None:
        node = manifest["config"]
        *path, last = place.split(".")
        for name in path:
            node = node[name]
        node[last] = {"_target_": target, **knobs}

    return edit


def from_python(target: str, **knobs: Any) -> Edit:
    """The policy of a run from Python, of which the manifest keeps class and knobs."""

    def edit(manifest: dict[str, Any]) -> None:
        manifest["config"]["policy"] = "fcfs"
        manifest["policy"] = {"class": target, "knobs": knobs}

    return edit


def changed(place: str, value: Any) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        node = manifest
        *path, last = place.split(".")
        for name in path:
            node = node[name]
        node[last] = value

    return edit


TOUCH = f"touch {CANARY}"
HOSTILE: dict[str, Edit] = {
    "a shell, from Python": from_python("os.system", command=TOUCH),
    "a process, from Python": from_python("subprocess.run", args=TOUCH, shell=True),
    "a module of this folder, from Python": from_python("evil.Evil"),
    "a function for a knob": from_python("schedlab.policies.fcfs.FCFS", victim="os.system"),
    "a module for a knob": from_python("schedlab.policies.fcfs.FCFS", victim="evil.evil"),
    "a shell": named("policy", "os.system", command=TOUCH),
    "a process": named("policy", "subprocess.check_output", args=["touch", CANARY]),
    "git": named("policy", "schedlab.experiments.run.manifest._git", directory=".", words=["init"]),
    "a writer of ours": named("policy", "schedlab.framework.results.writer.write_whole", path=CANARY, text="x"),
    "pickles of numpy": named("policy", "numpy.load", file="evil.npy", allow_pickle=True),
    "pickles of joblib": named("policy", "joblib.load", filename="evil.pkl"),
    "pickles of torch": named("policy", "torch.load", f="evil.pt", weights_only=False),
    "a module of this folder": named("policy", "evil.Evil"),
    "a module with dots": named("policy", "evil.inner.Evil"),
    "builtins": named("policy", "builtins.exec", source=f"open({CANARY!r}, 'w')"),
    "Hydra itself": named("policy", "hydra.utils.call", config={"_target_": "os.system", "command": TOUCH}),
    "arguments by place": named("policy", "schedlab.policies.fcfs.FCFS", _args_=[{"_target_": "os.system"}]),
    "a part within": named("policy.estimator", "os.system", command=TOUCH),
    "a part in a list": changed("config.policy.chunk_size", [{"_target_": "os.system", "command": TOUCH}]),
    "a victim rule": named("policy.victim", "os.system", _partial_=True, command=TOUCH),
    "a rule of the wrong kind": named("policy.victim", "schedlab.policies.common.decode_all", _partial_=True),
    "a predictor": named("predictor", "os.system", command=TOUCH),
    "an engine": named("engine", "os.system", command=TOUCH),
    "an engine of the wrong kind": named("engine", "schedlab.experiments.engines.settled_heap"),
    "an objective": named("slo", "os.system", command=TOUCH),
    "hardware": named("engine.hardware", "evil.Evil"),
    "a type": changed("config.policy._target_", ["os.system"]),
    "no policy": changed("config.policy", {"_target_": 7}),
    "an unknown knob": changed("config.policy.no_such", 3),
    "a knob of another type": changed("config.policy.chunk_size", "many"),
    "the environment": changed("config.policy.chunk_size", "${oc.env:SECRET}"),
    "the environment in a name": changed("config.policy._target_", "${oc.env:SECRET}"),
    "a resolver in the estimator": changed("config.estimator.model", "${oc.env:SECRET}"),
}
EVIL = f"""
from pathlib import Path
Path({str(CANARY)!r}).write_text("imported")
class Evil:
    pass
def evil(step, request):
    return []
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, made once by a command of its own."""
    import subprocess

    folder = tmp_path_factory.mktemp("made")
    subprocess.run([sys.executable, "-m", "schedlab", *RUN], cwd=folder, check=True, capture_output=True)
    return folder / "run"


@pytest.fixture
def received(made: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the run beside a module that must not be imported; nothing beside the copy may change."""
    shutil.copytree(made, workspace / "run")
    (workspace / "evil.py").write_text(EVIL)
    monkeypatch.setenv("SECRET", "hunter2")
    before = outside(workspace)
    yield workspace / "run"
    assert "evil" not in sys.modules and not (workspace / CANARY).exists()
    assert outside(workspace) == before


def outside(workspace: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(workspace)): path.read_bytes()
        for path in workspace.rglob("*")
        if path.is_file() and "run" not in path.relative_to(workspace).parts and "__pycache__" not in path.parts
    }


def edit(folder: Path, change: Edit) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_is_executed_or_imported(schedlab, received, name):
    """By the commands that make parts of a run again, told to try suggestions; and each ends with a line at most."""
    edit(received, HOSTILE[name])
    commands = [["explain", "run", "--try"], ["replay", "run"], ["replay", "run", "--policy", "slo_aware"]]
    ends = [schedlab(*command) for command in commands]
    for done in ends:
        assert "hunter2" not in done.out + done.err
        assert done.code in (0, 2) and done.err.count("\n") <= 1, done.err
    assert any(done.code == 2 or "could not be tried" in done.out for done in ends)


def test_commands_that_only_read_show_hostile_folders(schedlab, received):
    folders = [received.with_name("run") / name.replace(" ", "-") for name in HOSTILE]
    for folder, change in zip(folders, HOSTILE.values(), strict=True):
        shutil.copytree(received, folder, ignore=lambda *_: [other.name for other in folders])
        edit(folder, change)
    for command in (["compare", *map(str, folders)], ["timeline", str(folders[0])], ["diff", *map(str, folders[:2])]):
        done = schedlab(*command)
        assert done.code in (0, 2) and "hunter2" not in done.out + done.err and "Traceback" not in done.err


def test_an_honest_folder_is_made_again(schedlab, received):
    assert schedlab("replay", "run").code == 0
    assert "virtual clock" in schedlab("explain", "run").out


def test_a_folder_from_elsewhere_is_tried_on_demand(schedlab, received):
    edit(received, changed("hardware.cpu", "another"))
    told = schedlab("explain", "run").out
    assert "Tried" not in told and "--try" in told
    assert "Tried" in schedlab("explain", "run", "--try").out


def test_own_classes_take_trust_which_says_what_it_imports(schedlab, workspace, made):
    (workspace / "mine.py").write_text("from schedlab.policies.fcfs import FCFS\nclass Mine(FCFS):\n    pass\n")
    shutil.copytree(made, workspace / "run")
    edit(workspace / "run", named("policy", "mine.Mine"))
    refused = schedlab("replay", "run")
    assert refused.code == 2 and "mine.Mine" in refused.err and "--trust" in refused.err and "mine" not in sys.modules
    trusted = schedlab("replay", "run", "--trust")
    assert trusted.code in (0, 1) and "trusted: policy imports mine.Mine" in trusted.err and "mine" in sys.modules


def test_a_plug_in_may_lend_policies_and_no_functions(monkeypatch):
    monkeypatch.setattr("schedlab.experiments.analysis.rebuild.plugins", lambda: {"subprocess", "json"})
    for target in ("subprocess.run", "subprocess.Popen", "json.JSONDecoder", "json.loads"):
        with pytest.raises(ConfigError, match="no part that can stand there"):
            rebuild({"_target_": target}, "policy")


def test_links_are_not_followed_when_a_folder_is_written_to(schedlab, received, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("timeline.json", "timeline.json.tmp", "a.png"):
        (kept / name).write_text("mine")
        (received / name).symlink_to(kept / name)
    (received / "plots").symlink_to(kept)
    with pytest.raises(ConfigError, match="run/plots: is a link"):
        save({"a": Figure()}, received / "plots")
    (received / "plots").unlink()
    (received / "plots").mkdir()
    (received / "plots" / "a.png").symlink_to(kept / "a.png")
    assert save({"a": Figure()}, received / "plots") and schedlab("timeline", "run").code == 0
    assert {path.read_text() for path in kept.iterdir()} == {"mine"}


def test_wandb_gets_only_what_a_run_has_written(tmp_path):
    for name in (".env", "id_rsa", "notes.txt", "result.json", "requests.jsonl.gz", "workload.jsonl.gz",
                 "outputs.jsonl.zst", "plots/ttft.png", "plots/.env", "mine/result.json"):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "id_rsa")

    def taken(**keys: bool) -> list[str]:
        return [path.relative_to(tmp_path).as_posix() for path in own_files(tmp_path, WandbConfig(**keys))]

    rest = ["plots/ttft.png", "requests.jsonl.gz", "result.json"]
    assert taken(log_workload=False, log_outputs=False) == rest
    assert taken() == sorted([*rest, "workload.jsonl.gz", "outputs.jsonl.zst"])


@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
def test_pipes_and_devices_are_refused_at_once(schedlab, workspace, device):
    os.mkfifo(workspace / "pipe")
    (workspace / "trace.jsonl").symlink_to(workspace / "pipe" if device == "pipe" else Path(device))
    for read in (sha256, lambda path: open_text(path).__enter__()):
        with pytest.raises(TraceError, match="is a pipe or a device"):
            read(workspace / "trace.jsonl")
    for command in (["trace", "info", "trace.jsonl"], ["trace", "info", "trace.jsonl", "--format", "table"]):
        done = schedlab(*command)
        assert done.code == 2 and "is a pipe or a device" in done.err and done.err.count("\n") == 1


def test_a_pipe_in_the_place_of_a_run_s_files_hangs_nothing(schedlab, received):
    for name in ("result.json", "manifest.json"):
        (received / name).unlink()
        os.mkfifo(received / name)
    for command in ("compare", "replay", "explain", "report", "timeline"):
        assert schedlab(command, "run").code == 2


def test_a_line_without_an_end_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "MAX_LINE", 1000)
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n' + b"x" * 5000))
    with open_text(path) as text, pytest.raises(TraceError, match=r"trace.jsonl.gz: a line is longer than 1,000"):
        list(text)
