"""The device check runs to its end by the interpreter, on what a machine with a GPU has: torch, triton and numpy."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from schedlab.experiments import engines
from schedlab.experiments.device.sections import SECTIONS
from schedlab.experiments.run import compose
from schedlab.framework.cost.fit import Profile

BLOCKED = ("hydra", "omegaconf", "wandb", "transformers", "safetensors", "rich", "typer", "matplotlib")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    outer = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "schedlab.experiments.device_check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=outer | environment)


@pytest.fixture
def without_the_rest(tmp_path) -> str:
    """A folder for PYTHONPATH that hides, from every process, what such a machine need not have."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED!r}))\n")
    return str(folder)


def test_interpreted(tmp_path, without_the_rest):
    folder = tmp_path / "out"
    result = run("--interpret", "--out", str(folder), PYTHONPATH=without_the_rest)
    assert result.returncode == 0, result.stdout + result.stderr + (folder / "log.txt").read_text()
    report = json.loads((folder / "device_check.json").read_text())
    assert report["machine"]["device"] == "the interpreter" and not report["skipped"]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert str(rows) == str(report["rows"])  # NaN is not equal to itself
    demanded = [row for row in rows if row["ok"] is not None]
    assert len(demanded) >= 40 and all(row["ok"] for row in demanded)
    names = {section.name for section in SECTIONS}
    assert {row["section"] for row in rows} == names - {"graphs"}  # which an interpreter has not
    assert set(report["sections"]) == names | {"machine"}
    assert all(section["ended"] == "by itself" for section in report["sections"].values())
    assert Profile.load(folder / "profile.json").points
    assert result.stdout.splitlines()[-1].endswith("s on the interpreter")
    files = list(folder.iterdir())
    assert len(files) <= 8 and all(path.stat().st_size <= 16 << 20 for path in files)


def test_no_such_section_is_told():
    result = run("--interpret", "--sections", "decod")
    assert result.returncode == 1
    expected = "--sections: expected some of ceilings, correctness, decode"
    assert expected in result.stderr and "found decod" in result.stderr


def test_a_gpu_is_demanded(tmp_path):
    result = run("--out", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "expected a GPU, found none; --interpret" in result.stderr


def test_results_are_not_mixed_with_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("a stranger's")
    result = run("--interpret", "--out", str(tmp_path))
    assert result.returncode == 2 and "expected an empty folder, found" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_it_runs_is_the_preset_and_the_machine_of_that_name():
    """They are written down there, for presets need a library that the check does without."""
    from schedlab.experiments.device.engine_checks import LLAMA_8B, MACHINE

    assert engines.model_preset(compose.preset("model", "llama3.1-8b"))[0] == LLAMA_8B
    assert engines.hardware_preset("h200") == MACHINE


def test_the_documentation_names_every_section_and_its_limit():
    """And its two commands run sections that there are."""
    text = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("|")]
    stated = {}
    for names, _, limits in rows:
        each = [name.strip() for name in names.split(",")]
        seconds = [int(number) for number in re.findall(r"(\d+) s", limits)]
        stated |= dict(zip(each, seconds * len(each) if len(seconds) == 1 else seconds, strict=False))
    assert {section.name: stated.get(section.name) for section in SECTIONS} == {s.name: s.seconds for s in SECTIONS}
    commands = " ".join(re.findall(r"--sections ([a-z ]+)", text)).split()
    assert {*commands, "weights"} == {section.name for section in SECTIONS}
