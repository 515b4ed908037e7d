"""The pages for users: their commands are run as they are written, in one folder a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: ([\w./]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("sweeps", "policies", "clusters", "python", pytest.param("comparing", marks=pytest.mark.full))


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment in which `schedlab` is this one."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"schedlab": "-m schedlab ", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words}"$@"\n')
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path)}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page, shell, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    ran = 0
    for kind, name, text in BLOCK.findall((DOCS / f"{page}.md").read_text()):
        if name:
            (folder / name).write_text(text)
        if kind == "sh":
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, cwd=folder, env=shell, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran >= (1 if page == "python" else 3)


def test_every_page_is_there():
    assert all((DOCS / f"{page}.md").exists() for page in ("sweeps", "policies", "comparing"))
