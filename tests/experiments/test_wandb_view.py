"""`schedlab wandb view`: panels show what runs log, with units; W&B gets them when saved; a 3 × 3 sweep read back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from wandb_server import Server, wandb_server

from schedlab.experiments.run import tracking, wandb_view
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.reader import read_run

PANELS = [panel for panels in wandb_view.view().sections.values() for panel in panels]
FLAT = ("policy_name", "model_name", "engine_name", "workload_name", "rate", "seed")


class History:
    """Takes what a run logs."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, row: dict[str, float]) -> None:
        self.keys |= set(row)


def test_every_panel_shows_what_a_run_logs(schedlab):
    done = schedlab("run", "engine=stub", "workload.max_requests=12", "wandb.mode=disabled", "plots=false",
                    "progress=false", "hydra.run.dir=out")  # fmt: skip
    assert done.code == 0, done.err
    run = History()
    tracking.log_curves(run, read_run(Path("out")), 10)
    for panel in PANELS:
        known = run.keys if panel.kind == "lines" else {*SUMMARY_KEYS, *FLAT}
        assert {panel.y, panel.x} - {None} <= known, panel
        assert (panel.x is None) == (panel.kind == "bars")
    assert wandb_view.view().group_by in FLAT


def test_every_picture_says_its_units():
    units = r"\((s|share|requests|requests/s|tokens/s)\)"
    assert [panel.title for panel in PANELS if not re.search(units, panel.title)] == []
    assert [panel for panel in PANELS if panel.kind != "bars" and len(re.findall(units, panel.title)) != 2
            and not panel.y.startswith("cdf/")] == []  # fmt: skip
    assert {panel.kind for panel in PANELS} == {"bars", "points", "lines"}


def test_the_file_says_what_the_view_shows(schedlab):
    done = schedlab("wandb", "view", "--project", "mine")
    assert done.code == 0 and "--save makes it a view of mine" in done.out
    told = json.loads(Path("wandb_view.json").read_text())
    assert told["project"] == "mine" and told["group_by"] == "policy_name"
    assert sum(len(section["panels"]) for section in told["sections"]) == len(PANELS)


def test_what_saving_lacks_is_said_in_a_line(schedlab, monkeypatch):
    assert "expected --entity" in schedlab("wandb", "view", "--save").err
    monkeypatch.setattr(wandb_view.importlib.util, "find_spec", lambda name: None)
    done = schedlab("wandb", "view", "--save", "--entity", "me")
    assert done.code == 2 and "pip install schedlab[wandb-view]" in done.err


SAVE = "from schedlab.experiments.run.wandb_view import saved; print(saved('someone', 'schedlab'))"


def python(code: str, folder: Path, timeout: float = 60, **settings: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, because W&B keeps settings per process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env = {**kept, "HOME": str(folder), **settings}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )


def with_views(server: Server, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
    """A server that has one user and takes views."""
    if operation == "Viewer":
        return {"viewer": {"id": "u", "username": "someone", "entity": "someone", "flags": "{}"}}
    if variables.get("type") == "project-view":
        server.uploads["view"] = variables["spec"].encode()
        return {"upsertView": {"view": {"id": "v", "name": "v"}, "inserted": True}}
    return {}


def test_saved_it_is_a_view_of_the_project(tmp_path, monkeypatch):
    pytest.importorskip("wandb_workspaces", reason="needs schedlab[wandb-view]")
    monkeypatch.setattr(Server, "answer", with_views)
    with wandb_server() as server:
        done = python(SAVE, tmp_path, WANDB_API_KEY="a" * 40, WANDB_BASE_URL=server.url)
    assert "/someone/schedlab" in done.stdout, done.stderr
    spec = json.loads(server.uploads["view"])["section"]
    shown = [panel for section in spec["panelBankConfig"]["sections"] for panel in section["panels"]]
    assert len(shown) == len(PANELS)
    for panel, theirs in zip(PANELS, shown, strict=True):
        assert panel.y in json.dumps(theirs["config"], ensure_ascii=False)
    assert spec["runSets"][0]["grouping"] == [{"section": "config", "name": "policy_name.value"}]


def test_without_a_login_nothing_is_saved(tmp_path):
    pytest.importorskip("wandb_workspaces", reason="needs schedlab[wandb-view]")
    done = python(SAVE, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode and "ConfigError: --save: W&B took no view of someone/schedlab" in done.stderr


@pytest.mark.full
def test_a_sweep_of_three_by_three_is_told_apart(tmp_path):
    """Nine names, and the flat keys, as W&B's own tool reads them offline."""
    words = (
        "run", "-m", "policy=fcfs,chunked_prefill,orca", "workload.arrivals.rate=10,20,40", "workload=poisson",
        "engine=stub", "workload.num_requests=8", "record=summary", "plots=false", "progress=false",
        "wandb.mode=offline", "hydra.sweep.dir=runs",
    )  # fmt: skip
    code = f"import sys; from schedlab.experiments.cli import main; sys.argv = ['schedlab', *{words!r}]; main()"
    done = python(code, tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    told = [read_back(run) for run in sorted(tmp_path.glob("runs/*/wandb/offline-run-*"))]
    assert len({run.name for run in told}) == len(told) == 9
    seen = {(run.config["policy_name"], run.config["rate"]) for run in told}
    assert seen == {(policy, rate) for policy in ("fcfs", "chunked_prefill", "orca") for rate in (10, 20, 40)}
    assert all(set(FLAT) <= set(run.config) for run in told)


def read_back(run: Path) -> SimpleNamespace:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(run)]
    return SimpleNamespace(**json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout))
