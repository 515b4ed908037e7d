"""Runs from Python, and the files that let a run be repeated."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields

import pytest
from omegaconf import OmegaConf

import schedlab
from schedlab import engines
from schedlab.experiments.run import compose
from schedlab.experiments.run.checks import check_arguments, fits
from schedlab.experiments.run.offered import OUTPUTS, Counted, read_outputs
from schedlab.framework.content import UniqueContent
from schedlab.framework.engine import EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.policies.slo_aware import SLOAware
from schedlab.testing import check
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.lengths import Fixed
from schedlab.workloads.populations import CommonWork
from schedlab.workloads.sessions import Conversations, ThinkTime
from schedlab.workloads.workload import Recorded


def sample(requests: int = 30) -> Recorded:
    return Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=requests)


class ForgotItsBase:
    def schedule(self, step):
        step.grant_decodes()


class WithoutSchedule(Policy):
    pass


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        (FCFS, "found the class FCFS: make one, FCFS()"),
        (ForgotItsBase(), "ForgotItsBase is not derived from schedlab.Policy"),
        (WithoutSchedule(), "WithoutSchedule has no method schedule"),
    ],
)
def test_what_is_no_policy_is_refused_at_once(policy, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        schedlab.run(policy, sample(), engines.virtual("llama3.1-8b", "h100"))
    with pytest.raises(ConfigError, match=re.escape(told)):
        check(lambda: policy, seconds=0.1)


def test_a_name_is_no_policy_to_check():
    with pytest.raises(ConfigError, match="found the text 'fcfs'"):
        check(lambda: "fcfs", seconds=0.1)


def test_slo_aware_says_that_it_needs_an_estimator():
    with pytest.raises(ValueError, match="needs an estimator"):
        SLOAware()


def test_a_run_needs_three_objects():
    result = schedlab.run(FCFS(), sample(), engines.virtual("llama3.1-8b", "h100"))
    assert result.summary["requests/finished"] == 30
    assert len(result.requests["request_id"]) == 30
    assert result.steps["duration_ns"].sum() > 0
    assert result.decisions["grants"] and len(result.digest) >= 16


def test_with_and_without_files_is_the_same_run(tmp_path):
    held = schedlab.run(ChunkedPrefill(), sample(), engines.stub(num_blocks=200))
    written = schedlab.run(ChunkedPrefill(), sample(), engines.stub(num_blocks=200), out=tmp_path)
    assert held.digest == written.digest == read_run(tmp_path).digest
    assert held.summary == read_run(tmp_path).summary


def test_a_setup_can_run_again():
    setup = engines.stub(num_blocks=200)
    assert schedlab.run(FCFS(), sample(), setup).digest == schedlab.run(FCFS(), sample(), setup).digest


def test_a_run_can_be_repeated_from_its_own_folder(tmp_path):
    first = schedlab.run(FCFS(), sample(), engines.stub(num_blocks=100), out=tmp_path)
    again = Recorded(path=str(tmp_path), name="again")
    assert schedlab.run(FCFS(), again, engines.stub(num_blocks=100)).digest == first.digest


def test_tokens_are_kept_where_there_are_any(tmp_path):
    result = schedlab.run(FCFS(), sample(), engines.stub(num_blocks=200), out=tmp_path / "stub")
    outputs = dict(read_outputs(tmp_path / "stub"))
    lengths = dict(zip(result.requests["request_id"], result.requests["output_tokens"].tolist(), strict=True))
    assert {request_id: len(tokens) for request_id, tokens in outputs.items()} == lengths
    schedlab.run(FCFS(), sample(), engines.virtual("llama3.1-8b", "h100"), out=tmp_path / "virtual")
    assert not packed.find(tmp_path / "virtual", OUTPUTS).exists()
    assert dict(read_outputs(tmp_path / "virtual")) == {}


def test_results_of_an_earlier_run_are_replaced(tmp_path):
    schedlab.run(FCFS(), sample(), engines.stub(num_blocks=200), out=tmp_path)
    schedlab.run(FCFS(), sample(5), engines.virtual("llama3.1-8b", "h100"), out=tmp_path)
    assert len(read_run(tmp_path).requests["request_id"]) == 5
    assert dict(read_outputs(tmp_path)) == {}


def test_the_same_run_in_another_process_decides_the_same(tmp_path):
    words = ["engine=virtual", "model=llama3.1-8b", "wandb.mode=disabled", "plots=false", "workload.max_requests=30"]
    command = [sys.executable, "-m", "schedlab", "run", *words, "hydra.run.dir=run"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    here = schedlab.run(FCFS(), sample(), engines.virtual("llama3.1-8b", "h100"))
    assert read_run(tmp_path / "run").digest == here.digest


def test_the_measured_window_is_an_option():
    whole = schedlab.run(FCFS(), sample(), engines.stub(num_blocks=200))
    part = schedlab.run(FCFS(), sample(), engines.stub(num_blocks=200), start_s=1.0, stop_s=2.0)
    assert 0 < part.summary["requests/finished"] < whole.summary["requests/finished"]
    assert part.result["measurement"]["window"]["start_s"] == 1.0


@pytest.mark.parametrize(
    ("window", "told"),
    [
        ({"start_s": 2.0, "stop_s": 1.0}, "measure: expected start_s < stop_s, found 2 and 1"),
        ({"start_s": 2.0, "stop_s": 2.0}, "measure: expected start_s < stop_s, found 2 and 2"),
        ({"start_s": 5000.0}, r"measure: no request arrives from 5000 s on; those of common_work do from .* to"),
        ({"stop_s": 0.0}, r"measure: no request arrives in \[0, 0\) s"),
    ],
)
def test_a_window_without_a_request_costs_no_run(tmp_path, window, told):
    engine = engines.stub(num_blocks=200)
    with pytest.raises(ConfigError, match=told):
        schedlab.run(FCFS(), CommonWork(num_requests=9), engine, out=tmp_path / "run", **window)
    assert not (tmp_path / "run").exists()


def test_a_window_that_turns_out_empty_is_an_error(tmp_path):
    """When turns arrive that wait for others is known at the end."""
    chats = Conversations(num_sessions=3, turns=3.0, arrivals=Poisson(5.0), lengths=Fixed(20, 5), think=ThinkTime(1.0))
    with pytest.raises(ConfigError, match=r"measure: none of [\d,]+ requests arrived from 1e\+06 s on"):
        schedlab.run(FCFS(), chats, engines.stub(num_blocks=4000), out=tmp_path, start_s=1e6)
    assert read_run(tmp_path).status == "failed" and "measure: none of" in read_run(tmp_path).result["error"]


# ---- engines ----


def test_the_scheduler_keys_are_those_of_the_engine():
    """In one place of the config, with the engine's own defaults, and equal under every option."""
    own = {field.name: field.default for field in fields(EngineConfig)}
    config = compose.compose()
    for name in ("cpu", "cuda", "virtual", "stub"):
        keys = OmegaConf.to_container(compose.compose([f"engine={name}"]).engine, resolve=False)
        limits = {key: value for key, value in keys.items() if key in config.engine and key in own}
        assert limits.keys() == own.keys()
        for key, value in limits.items():
            assert value is None if key in ("num_blocks", "max_model_len") else value == own[key], key


def test_switching_the_engine_resets_no_limit():
    for name in ("cpu", "virtual", "stub"):
        config = compose.compose(["engine.max_num_seqs=7", "engine.num_blocks=99", f"engine={name}"])
        assert (config.engine.max_num_seqs, config.engine.num_blocks) == (7, 99)


def test_what_is_left_open_is_filled_in():
    assert engines.virtual("llama3.1-8b", "h100").config.max_model_len == 131072
    assert engines.virtual("llama3.1-8b", "h100").config.num_blocks > 10_000
    assert engines.stub(num_blocks=None).config.num_blocks == engines.STUB_BLOCKS
    cpu = engines.cpu("tiny", kv_space_gib=0.25)
    assert cpu.config.num_blocks == int(0.25 * 2**30 // cpu.executor.block_bytes(16))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: engines.stub(max_model_len=10**9), "engine.max_model_len: the model ends at 32768"),
        (lambda: engines.stub(num_blocks="many"), "engine.num_blocks: expected an integer"),
        (lambda: engines.virtual("nope", "h100"), "model=nope: no such option"),
        (lambda: engines.virtual("tiny", "abacus"), "hardware=abacus: no such option"),
        (lambda: engines.stub().clock("wall"), "clock=wall: it takes real time"),
        (lambda: engines.cpu("tiny", num_threads=2, num_blocks=8).clock("busy"), "CPU time of one thread"),
        (lambda: engines.stub().clock("moon"), "clock=moon: expected auto"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


# ---- values against annotations ----


def test_values_are_checked_against_annotations():
    def target(a: int, b: float = 1.0, c: str | None = None, d: bool = False, e: list[str] | None = None) -> None:
        pass

    target.__annotations__ = {"a": int, "b": float, "c": str | None, "d": bool, "e": list[str] | None}
    check_arguments("node", {"a": 1, "b": 2, "c": None, "d": True, "e": ["x"], "unknown": object()}, target)
    for key, value in {"a": True, "b": "x", "c": 3, "d": 1, "e": "x"}.items():
        with pytest.raises(ConfigError, match=f"node.{key}: expected"):
            check_arguments("node", {key: value}, target)


def test_integers_are_no_booleans_and_lists_are_checked_inside():
    assert fits(3, float) and not fits(True, int) and not fits(True, float)
    assert fits(["a"], list[str]) and not fits([1], list[str]) and not fits("a", list[str])


# ---- words ----


def test_flags_may_stand_anywhere():
    words = [
        "seed=1",
        "-m",
        "policy=fcfs,chunked_prefill",
        "--config-dir",
        "x",
        "+policy.y=2",
        "~z",
        "hydra/launcher=joblib",
    ]
    assert compose.flags_first(words, "run") == [
        "-m", "--config-dir", "x", "seed=1", "policy=fcfs,chunked_prefill", "+policy.y=2", "~z",
        "hydra/launcher=joblib",
    ]  # fmt: skip


def test_the_manifest_is_json_that_names_every_part(tmp_path):
    schedlab.run(ChunkedPrefill(chunk_size=99), sample(), engines.stub(num_blocks=200), seed=0, out=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {
        "config",
        "config_hash",
        "versions",
        "git",
        "hardware",
        "workload",
        "seeds",
        "command",
        "started_at",
    } <= set(manifest)
    assert manifest["policy"]["knobs"]["chunk_size"] == 99 and manifest["workload"]["requests"] == 30


def test_the_lag_of_an_arrival_runs_from_when_it_was_visible():
    class Two:
        def pop(self, now_ns):
            times = 1_000_000, 4_000_000
            return [EngineRequest(str(t), t, 8, UniqueContent(t), visible_ns=t + 500_000) for t in times]

        def peek(self):
            return None

    source = Counted(Two(), 2)
    source.pop(5_000_000)
    assert source.lag_us() == {"arrival_lag_mean_us": 2000, "arrival_lag_max_us": 3500}


def test_the_manifest_names_the_kernels_that_ran(tmp_path):
    for name, setup in {"torch": engines.cpu("tiny", num_blocks=64, kernels="torch"), None: engines.stub()}.items():
        schedlab.run(FCFS(), sample(2), setup, out=tmp_path / str(name))
        assert read_run(tmp_path / str(name)).manifest["kernels"] == name
