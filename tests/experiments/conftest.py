"""The command line, called in this process from an empty folder, with nothing of the caller's W&B settings."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from schedlab.experiments import cli

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a home without credentials."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "helper"):  # modules that other tests wrote into folders of theirs
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    return folder


@pytest.fixture
def schedlab(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    def call(*words: str) -> Done:
        capsys.readouterr()
        logging.getLogger().handlers = []  # Hydra's write to the stream of an earlier call
        monkeypatch.setattr(sys, "argv", ["schedlab", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(end.value.code or 0), out, err)

    return call
