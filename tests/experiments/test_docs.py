"""The pages for users: their commands are run as they are written, in one folder a page, and print what it says.

A block without a language is what the block before it prints, some of its lines left out.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TRACES = DOCS.parents[1] / "shared" / "traces"
BLOCK = re.compile(r"^```(\w*)(?: ([\w./]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONGER = ("comparing", "ten_minutes", "wandb", "writing_policies")
PAGES = ("sweeps", "policies", "clusters", "python", *(pytest.param(p, marks=pytest.mark.full) for p in LONGER))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `schedlab` is this one."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"schedlab": "-m schedlab ", "wandb": "-m wandb ", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page, shell, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ran, printed = 0, ""
    for kind, name, text in BLOCK.findall((DOCS / f"{page}.md").read_text()):
        if name:
            (folder / name).write_text(text)
        if kind == "sh":
            printed = output(text, folder, shell)
            ran += 1
        if not kind:
            check_printed(text, printed)
    assert ran >= (1 if page == "python" else 2)


def output(command: str, folder: Path, env: dict[str, str]) -> str:
    words = ["bash", "-euo", "pipefail", "-c", command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_printed(told: str, printed: str) -> None:
    lines = {line.rstrip() for line in printed.splitlines()}
    assert [line for line in told.splitlines() if line not in lines] == []


def test_every_page_is_there():
    assert all((DOCS / f"{page}.md").exists() for page in ("sweeps", "policies", "comparing"))


def test_the_notebook_is_the_page():
    make = runpy.run_path(str(DOCS / "notebook.py"))
    text = (DOCS / "study.ipynb").read_text(encoding="utf-8")
    assert text == make["text_of"](), "python docs/notebook.py"
    cells = json.loads(text)["cells"]
    kinds = [cell["cell_type"] for cell in cells]
    assert kinds[0] == "markdown" and kinds.count("code") >= 6


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(shell, tmp_path):
    """In one process, as a kernel would."""
    cells = json.loads((DOCS / "study.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (tmp_path / "study.py").write_text("\n".join(code))
    printed = output("python study.py", tmp_path, shell)
    for kind, _, told in BLOCK.findall((DOCS / "study.md").read_text()):
        if not kind:
            check_printed(told, printed)
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg", ".csv"}


@pytest.mark.full
def test_the_verdicts_of_the_examples_are_as_printed(shell, tmp_path):
    files = {path.name: path for path in TRACES.rglob("*.gz")}
    if not {"AzureLLMInferenceTrace_conv.csv.gz", "conversation_trace.jsonl.gz"} <= set(files):
        pytest.skip("the published traces are not at ../shared/traces")
    folder = tmp_path / "examples"
    shutil.copytree(DOCS / "examples", folder)
    printed, told = "", 0
    for kind, _, text in BLOCK.findall((folder / "README.md").read_text()):
        if kind == "console":
            for command in re.findall(r"^schedlab (?:run|compare) (?:.*\\\n)*.*$", text, re.MULTILINE):
                placed = re.sub(r"(?<=workload.path=)\S+", lambda found: str(files[found.group()]), command)
                printed += output(placed, folder, shell)
        if not kind:
            check_printed(text, printed)
            told += 1
    assert told == 4
