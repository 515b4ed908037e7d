"""Folders of runs inside vLLM in the commands that read folders, beside those of our own engines. No vLLM is needed:
runs of the stub, whose manifests say that vLLM's engine made them.
"""

import json
import shutil
from pathlib import Path

import pytest

from schedlab.experiments.analysis.past_run import PastRun
from schedlab.experiments.analysis.rerun import machine_node, virtual_engine
from schedlab.framework.errors import ConfigError

OWN = "schedlab.framework.vllm.own.OwnScheduler"
SMALL = ("workload=common_work", "workload.num_requests=12", "engine.num_blocks=100", "progress=false", "plots=false",
         "timeline=0", "wandb.mode=disabled")  # fmt: skip
POLICIES = ("fcfs", "chunked_prefill", "decode_priority")


def moved_inside(folder: Path) -> None:
    """`folder` as if vLLM's engine had made it; what ran under `decode_priority`, as if vLLM's own scheduler had."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    engine = {"dtype": "auto", "publish": "commit", "on_fault": "raise", "args": {}, "python": "/elsewhere/python"}
    old = manifest["config"]["engine"]
    engine |= old | {"_target_": "schedlab.experiments.vllm_engine.vllm"}
    manifest |= {"clock": "wall", "kernels": "vllm 0.32.0"}
    manifest["config"]["engine"] = engine
    manifest["labels"]["engine"] = manifest["overrides"]["engine"] = "vllm"
    if manifest["labels"]["policy"] == "decode_priority":
        manifest["labels"]["policy"], manifest["config"]["policy"] = "vllm", {"_target_": OWN}
        manifest["policy"] |= {"class": OWN, "knobs": {}}
        manifest["overrides"]["policy"] = "vllm"
    path.write_text(json.dumps(manifest))


@pytest.fixture
def inside(schedlab, workspace, tmp_path_factory):
    """A sweep's folder; made once, as each test gets a copy."""
    made = tmp_path_factory.getbasetemp() / "inside-vllm"
    if not made.exists():
        done = schedlab("run", "-m", f"policy={','.join(POLICIES)}", "engine=stub", *SMALL, f"hydra.sweep.dir={made}")
        assert done.code == 0, done.err
        for i in range(len(POLICIES)):
            moved_inside(made / str(i))
    return shutil.copytree(made, workspace / "inside")


def test_every_command_takes_them(schedlab, inside):
    compared = schedlab("compare", str(inside), "--baseline", "vllm")
    assert compared.code == 0 and "fcfs" in compared.out and "against vllm" in compared.out
    for i in range(len(POLICIES)):
        assert schedlab("explain", str(inside / str(i)), "--no-try").code == 0
    assert schedlab("report", str(inside), "--no-try", "--out", "report.html").code == 0
    done = schedlab("diff", str(inside / "0"), str(inside / "2"))
    assert done.code == 0 and "vLLM's own scheduler decided, which is not executed again" in done.out
    again = schedlab("replay", str(inside / "1"))
    assert again.code == 0 and "the same decisions" in again.out


def test_beside_a_run_of_our_own_engine(schedlab, inside):
    done = schedlab("run", "policy=fcfs", "engine=virtual", "model=tiny", *SMALL, "hydra.run.dir=ours")
    assert done.code == 0, done.err
    compared = schedlab("compare", str(inside / "0"), "ours")
    assert compared.code == 0 and "virtual" in compared.out and "vllm" in compared.out
    assert schedlab("diff", str(inside / "0"), "ours").code == 0


def test_what_vllms_own_scheduler_decided_is_not_decided_again(schedlab, inside):
    done = schedlab("replay", str(inside / "2"))
    assert done.code != 0 and "policy=vllm is vLLM's own scheduler: expected engine=vllm" in done.err


def test_a_strangers_folder_names_a_program_that_is_not_run(schedlab, inside):
    done = schedlab("replay", str(inside / "0"), "--policy", "chunked_prefill")
    assert done.code != 0
    assert "ran inside vLLM, by engine.python=/elsewhere/python, which the folder names; --trust runs it" in done.err
    with pytest.raises(ConfigError, match="expected a checkpoint"):  # it goes on to where this folder has no model
        PastRun(inside / "0", trust=True).make_setup()


def test_suggestions_are_tried_on_the_machine_that_vllm_is_taken_to_run_on(inside):
    """As `calibrate` and `fidelity` take it: a CPU, unless a name was given."""
    manifest = json.loads((inside / "0" / "manifest.json").read_text())
    assert machine_node(manifest)["name"] == "cpu"
    manifest["overrides"]["hardware"] = "h100"
    assert machine_node(manifest)["name"] == "h100"
    assert "weight_dtype" not in virtual_engine(manifest, manifest["engine"])  # the checkpoint's own
    manifest["config"]["engine"]["dtype"] = "float32"
    assert virtual_engine(manifest, manifest["engine"])["weight_dtype"] == "fp32"
