import logging
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

TESTS = Path(__file__).parent.parent
for folder in ("text", "framework"):  # helpers beside the tests; the scripted executor and the four policies are shared
    sys.path.insert(0, str(TESTS / folder))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    from tiny_text import save_tokenizer, tiny_model

    directory = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(directory)
    return save_tokenizer(directory)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def schedlab(tmp_path, monkeypatch, capsys):
    """The command line, called in this process from an empty folder."""
    from schedlab.experiments import cli

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setitem(os.environ, "HYDRA_FULL_ERROR", "1")

    def call(*words: str) -> SimpleNamespace:
        capsys.readouterr()
        logging.getLogger().handlers = []  # Hydra's write to the stream of an earlier call
        monkeypatch.setattr(sys, "argv", ["schedlab", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=int(end.value.code or 0), out=out, err=err)

    return call
