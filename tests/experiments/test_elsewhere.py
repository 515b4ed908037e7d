"""Runs that another environment's Python executes: what goes there, what comes back, what can go wrong on the way."""

import json
import sys
from pathlib import Path

import pytest

from schedlab.experiments import engines
from schedlab.experiments.analysis.diff import difference, show
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.studies.calibrate import steps_of
from schedlab.experiments.vllm_engine import vllm
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.populations import CommonWork

SETUP = """
from dataclasses import replace
from schedlab.experiments.engines import EngineSetup

class StartedSetup(EngineSetup):
    def started(self, policy, predictor):
        return replace(self, python=None)
"""


def experiment(python=sys.executable, policy=None):
    """One whose engine is a stub that another process starts: it needs nothing there."""
    from elsewhere_setup import StartedSetup

    stub = engines.stub(num_blocks=200)
    setup = StartedSetup(stub.name, stub.executor, stub.config, stub.clocks, python=python)
    return Experiment(policy or ChunkedPrefill(), CommonWork(num_requests=20), setup)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Modules of the current folder are found in the other process too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("elsewhere_setup.py").write_text(SETUP)
    yield
    for name in ("elsewhere_setup", "mine"):
        sys.modules.pop(name, None)


def test_the_same_run_and_the_same_folder_as_here(tmp_path):
    there = experiment().run(tmp_path / "there")
    here = Experiment(ChunkedPrefill(), CommonWork(num_requests=20), engines.stub(num_blocks=200)).run()
    assert there.digest == here.digest and read_run(tmp_path / "there").status == "finished"
    for name in ("manifest.json", "engine.log", "requests.jsonl.*"):
        assert list((tmp_path / "there").glob(name))
    without = experiment().run()
    assert without.digest == here.digest and without.steps["now_ns"].tolist() == here.steps["now_ns"].tolist()
    assert without.requests["request_id"] == here.requests["request_id"] and len(without.decisions["index"])


def test_a_fault_of_the_user_comes_back_as_its_line(tmp_path):
    Path("mine.py").write_text(
        "from schedlab import Policy\nclass Lazy(Policy):\n    def schedule(self, step):\n        pass\n"
    )
    from mine import Lazy

    with pytest.raises(ConfigError, match="policy Lazy: granted nothing and did not idle"):
        experiment(policy=Lazy()).run(tmp_path / "run")
    assert read_run(tmp_path / "run").status == "failed"


def test_what_cannot_travel_is_told():
    class Local(ChunkedPrefill):
        pass

    with pytest.raises(ConfigError, match="a part of the run cannot go to its process"):
        experiment(policy=Local()).run()


def test_a_python_that_is_none():
    with pytest.raises(ConfigError, match=r"engine.python=/nowhere/python: No such file or directory"):
        experiment("/nowhere/python").run()
    with pytest.raises(ConfigError, match=r"engine.python=/bin/false: ended with 1"):
        experiment("/bin/false").run()


def test_an_environment_without_vllm_is_told(tmp_path):
    (tmp_path / "model").mkdir()
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    more = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    (tmp_path / "model/config.json").write_text(json.dumps({**shape, **more, "max_position_embeddings": 4096}))
    setup = vllm({"path": str(tmp_path / "model")}, num_blocks=100)
    with pytest.raises(ConfigError, match="this environment has no vllm"):
        Experiment(ChunkedPrefill(), CommonWork(num_requests=2), setup).run()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"swap_space_gib": 1.0}, "engine.swap_space_gib: expected 0.0, as vLLM has no other; found 1.0"),
        ({"eviction": "lfu"}, "engine.eviction: expected lru, as vLLM has no other; found lfu"),
    ],
)
def test_limits_that_vllm_does_not_have(keys, line, tmp_path):
    with pytest.raises(ConfigError, match=line):
        vllm({"path": str(tmp_path)}, **keys)


def test_a_shape_without_a_checkpoint_is_refused():
    with pytest.raises(ConfigError, match="engine=vllm: expected a checkpoint"):
        vllm("tiny", num_blocks=100)


def test_runs_of_vllms_own_scheduler_are_compared_but_not_executed_again(tmp_path, capsys):
    for name, size in (("a", 64), ("own", 512)):
        setup = engines.stub(num_blocks=200)
        Experiment(ChunkedPrefill(chunk_size=size), CommonWork(num_requests=20), setup).run(tmp_path / name)
    manifest = json.loads((tmp_path / "own/manifest.json").read_text())
    manifest["policy"] |= {"class": "schedlab.framework.vllm.own.OwnScheduler", "knobs": {}}
    (tmp_path / "own/manifest.json").write_text(json.dumps(manifest))
    found = difference(tmp_path / "a", tmp_path / "own")
    assert found.opaque == (False, True) and found.seen[0] is not None and found.seen[1] is None
    show(found, 1)
    assert "own: vLLM's own scheduler decided, which is not executed again" in capsys.readouterr().out


def test_the_steps_of_a_run_are_what_a_profile_is_fitted_to():
    run = Experiment(ChunkedPrefill(chunk_size=64), CommonWork(num_requests=20), engines.stub(num_blocks=200)).run()
    measured = steps_of(run, None)
    assert {step.name for step in measured} == {"decode", "mixed", "prefill"}
    assert sum(step.point.work.tokens for step in measured) >= run.steps["prefill_tokens"].sum()
    cells = {}
    for step in measured:
        assert cells.setdefault(step.cell, step.point.work) == step.point.work  # equal works share a cell
