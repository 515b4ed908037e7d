"""The folder that a server leaves: a run that can be explained, and traffic that another policy can be tried on."""

import json

import numpy as np
import pytest
import rig

import schedlab.vllm
from policies import EVERY
from schedlab.framework.clock import VirtualClock
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.results import packed
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.record import Recorder
from schedlab.framework.stub import StubExecutor
from schedlab.workloads.readers import OFFERED, read
from schedlab.workloads.source import Terms
from schedlab.workloads.workload import make_source

POLICY = {"_target_": "schedlab.policies.chunked_prefill.ChunkedPrefill", "chunk_size": 96}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A folder that a server of 24 requests has left, one of them withdrawn."""
    monkeypatch.setenv("SCHEDLAB_OUT", str(tmp_path / "out"))
    keys = rig.arguments(additional_config={"schedlab": POLICY})
    load = rig.load_of(8, 24)
    load[3].extras = {"client": "alice", "ttft_s": 0.5}
    run = rig.Run(schedlab.vllm.Scheduler(**keys))
    run.add(*load)
    for _ in range(4):
        run.step()
    run.scheduler.finish_requests(load[20].name, rig.ABORTED)
    run.to_end()
    run.scheduler.shutdown()
    return tmp_path / "out", load


def test_it_is_an_ordinary_run(served):
    folder, load = served
    run = read_run(folder)
    assert run.status == "finished" and run.result["counters"] == {"swaps_refused": 0, "fallback_steps": 0}
    assert run.manifest["policy"]["knobs"]["chunk_size"] == 96 and run.manifest["engine"]["num_blocks"] == 199
    assert run.manifest["workload"]["requests"] == 24
    statuses = dict(zip(run.requests["request_id"], run.requests["status"], strict=True))
    assert statuses == {asked.name: "aborted" if asked is load[20] else "finished" for asked in load}
    row = run.requests["request_id"].index("r3")
    assert run.requests["client"][row] == "alice" and run.requests["slo"][row] == "ttft<0.5s"
    assert (run.requests["visible_s"] >= run.requests["arrival_s"]).all()
    assert not packed.find(folder, "outputs.jsonl").exists()


def test_no_token_is_written(served):
    folder, _ = served
    path = packed.find(folder, OFFERED)
    with packed.opened(path) as lines:
        contents = [json.loads(line)["content"] for line in lines]
    assert all(content.keys() == {"ids", "width", "scope", "seed"} for content in contents)


def test_another_policy_serves_the_same_traffic(served):
    """With the lengths that were generated and the prefixes that were shared."""
    folder, load = served
    trace = read(packed.find(folder, OFFERED), "offered")
    assert trace.output_tokens.tolist() == [-1 if asked is load[20] else asked.tokens for asked in load]
    config = EngineConfig(num_blocks=199, max_model_len=rig.MODEL_LEN, block_size=rig.BLOCK)
    recorder = Recorder(Measurement(config.max_num_seqs, config.num_blocks))
    source = make_source(trace, Terms(vocab_size=rig.VOCABULARY))
    Engine(EVERY["prefix_reuse"](), StubExecutor(rig.VOCABULARY), source, config, VirtualClock(), recorder).run()
    tables = recorder.close(backlog_end=0, counters={})
    assert len(tables.requests["request_id"]) == 24 and np.nanmax(tables.requests["cached_tokens"]) >= 96


def test_a_folder_with_a_run_is_not_written_over(served):
    keys = rig.arguments(additional_config={"schedlab": POLICY})
    with pytest.raises(ConfigError, match="expected a new folder, found a run in it"):
        schedlab.vllm.Scheduler(**keys)


def test_a_killed_server_that_was_idle_leaves_all_it_has_served(tmp_path, monkeypatch):
    monkeypatch.setenv("SCHEDLAB_OUT", str(tmp_path / "out"))
    run = rig.Run(schedlab.vllm.Scheduler(**rig.arguments(additional_config={"schedlab": POLICY})))
    run.add(*rig.load_of(9, 6))
    run.to_end()  # and nobody says goodbye
    left = read_run(tmp_path / "out")
    assert left.status == "interrupted" and len(left.requests["request_id"]) == 6
    with pytest.warns(UserWarning):  # the file has no end
        assert len(read(packed.find(tmp_path / "out", OFFERED), "offered")) == 6
