"""The device check runs to its end by the interpreter, on what a machine with a GPU has: torch, triton and numpy."""

import json
import os
import subprocess
import sys

import torch

from schedlab.experiments import engines
from schedlab.experiments.device_check import main
from schedlab.experiments.run import compose
from schedlab.framework.cost.fit import Profile

BLOCKED = ("hydra", "omegaconf", "wandb", "transformers", "safetensors", "rich", "typer", "matplotlib")


def run(*calls: list[str], blocked: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """One process, for torch takes seconds to import, that calls the check with each of the arguments in turn."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); "
    code = block + f"from schedlab.experiments.device_check import main; sys.exit([main(c) for c in {calls!r}][-1])"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_interpreted(tmp_path):
    result = run(["--interpret", "--out", str(tmp_path)], blocked=BLOCKED)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "device_check.json").read_text())
    assert report["machine"]["device"] == "the interpreter" and not report["skipped"]
    demanded = [row for row in report["rows"] if row["ok"] is not None]
    assert len(demanded) >= 40 and all(row["ok"] for row in demanded)
    assert {row["section"] for row in report["rows"]} >= {
        "ceilings",
        "decode",
        "prefill",
        "pointwise",
        "sampling",
        "products",
        "weights",
        "tiles",
        "policies",
        "steps",
        "calibration",
    }
    assert Profile.load(tmp_path / "profile.json").points
    assert result.stdout.splitlines()[-1].endswith("s on the interpreter")


def test_no_time_and_no_such_section_are_told():
    result = run(["--interpret", "--seconds", "-1"], ["--interpret", "--sections", "decod"])
    assert "skipped: ceilings, correctness" in result.stdout
    assert result.returncode == 1
    expected = "--sections: expected some of ceilings, correctness, decode"
    assert expected in result.stderr and "found decod" in result.stderr


def test_a_gpu_is_demanded(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 2
    assert "expected a GPU, found none; --interpret" in capsys.readouterr().err


def test_what_it_runs_is_the_preset_and_the_machine_of_that_name():
    """They are written down there, for presets need a library that the check does without."""
    from schedlab.experiments.device.engine_checks import LLAMA_8B, MACHINE

    assert engines.model_preset(compose.preset("model", "llama3.1-8b"))[0] == LLAMA_8B
    assert engines.hardware_preset("h200") == MACHINE
