"""Policies of other distributions: found without touching schedlab, and harmless to others when they are broken."""

from __future__ import annotations

import json

import pytest

QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false", "workload.max_requests=12")


def test_their_policy_is_an_option(environment):
    done = environment.run(
        "-m", "schedlab", "run", *QUICK, "policy=patience", "policy.limit_s=0.5", "hydra.run.dir=theirs"
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((environment.folder / "theirs/manifest.json").read_text())
    assert manifest["policy"] | {"sha256": None} == {
        "class": "patience.Patience",
        "distribution": {"patience": "1.2.3"},
        "knobs": {"limit_s": 0.5},
        "sha256": None,
    }


def test_their_policy_in_a_sweep(environment):
    done = environment.run("-m", "schedlab", "run", "-m", *QUICK, "policy=fcfs,patience", "hydra.sweep.dir=both")
    assert done.returncode == 0, done.stderr
    assert "generated tokens: identical in 2 runs" in done.stdout


def test_a_broken_package_is_skipped_with_a_warning(environment):
    done = environment.run("-m", "schedlab", "run", *QUICK, "policy=fcfs")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "broken" in line]
    assert line.startswith("warning: config broken-policies is skipped") and "never finished" in line


def test_a_hidden_option_is_told(environment):
    done = environment.run("-m", "schedlab", "run", "policy=fcfs", "--cfg", "job", "-p", "policy")
    assert "schedlab.policies.fcfs.FCFS" in done.stdout
    assert "patience: its policy/fcfs is hidden by that of schedlab" in done.stderr


def test_plugins_can_be_left_out(environment):
    done = environment.run("-m", "schedlab", "run", "policy=patience", SCHEDLAB_DISABLE_PLUGINS="1")
    assert done.returncode == 2 and done.stderr.startswith("error: policy=patience: no such option")


@pytest.mark.parametrize("words", [["run", "--info", "searchpath"], ["run", "--help"]])
def test_they_are_listed(environment, words):
    done = environment.run("-m", "schedlab", *words)
    assert "patience" in done.stdout


def test_other_hydra_applications_see_nothing_of_it(environment):
    (environment.folder / "app.py").write_text(
        "import hydra\n\n@hydra.main(config_path=None, version_base='1.3')\ndef main(config):\n    pass\n\nmain()\n"
    )
    done = environment.run("app.py", "--info", "searchpath")
    assert done.returncode == 0 and "patience" not in done.stdout + done.stderr
