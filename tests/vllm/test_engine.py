"""vLLM's whole engine on a tiny model with made-up weights, under a source: what `engine=vllm` runs in its process.

One engine serves all of these: starting one takes seconds.
"""

import pytest
import rig
from scripted import Scripted, everything

from policies import EVERY
from schedlab.framework.clock import WallClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import EngineConfig
from schedlab.framework.errors import ConfigError, PolicyStalled
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.vllm import replay
from schedlab.framework.vllm.own import OwnScheduler
from schedlab.framework.vllm.scheduler import Steered

LIMITS = {
    "num_blocks": 40, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 32,
    "enable_prefix_caching": True, "watermark": 0.0,
}  # fmt: skip
MS = 1_000_000


@pytest.fixture(scope="module")
def make():
    folder = rig.model_config().model
    more = {"load_format": "dummy", "dtype": "float32", "enforce_eager": True, "gpu_memory_utilization": 0.1}
    started = []

    def made(policy):
        """The engine under `policy`, its scheduler put into the one that runs."""
        if not started:
            engine = replay.Replay(replay.engine_arguments(folder, LIMITS, more))
            assert engine.start(policy, None, "raise", "commit") == LIMITS["num_blocks"]
            started.append(engine)
        engine = started[0]
        core = engine._llm.engine_core.engine_core
        Steered.settings = rig.Settings(policy)
        config = core.vllm_config
        engine._scheduler = core.scheduler = type(core.scheduler)(
            vllm_config=config, kv_cache_config=core.scheduler.kv_cache_config,
            structured_output_manager=core.structured_output_manager, block_size=core.scheduler.block_size,
        )  # fmt: skip
        return engine

    yield made
    Steered.settings = None
    if started:
        started[0]._llm.engine_core.shutdown()


def request(name, arrival_ms=0, prompt=60, output=5, **more):
    content = TokenContent([2 + (7 * i + len(name)) % 500 for i in range(prompt)])
    more.setdefault("recorded_output_tokens", output)
    return EngineRequest(name, arrival_ms * MS, prompt, content, **more)


class Watched(ListSource):
    def __init__(self, requests):
        super().__init__(requests)
        self.ended = []

    def finished(self, request, now_ns):
        self.ended.append((request.request_id, request.state, list(request.output_token_ids)))


def served(make, policy, *requests):
    config = EngineConfig(**LIMITS)
    recorder = Recorder(Measurement(config.max_num_seqs, config.num_blocks))
    source = Watched(list(requests))
    engine = make(policy).attach(source, config, WallClock(), recorder)
    engine.run()
    tables = recorder.close(backlog_end=engine.num_unfinished, counters=engine.counters())
    rig.assert_empty(engine._scheduler)
    return source, tables


def test_arrivals_are_replayed_and_lengths_are_forced(make):
    requests = [request(f"r{i}", 3 * i, 20 + 9 * i, 1 + i % 5) for i in range(12)]
    source, tables = served(make, EVERY["chunked_prefill"](), *requests)
    assert {name: len(tokens) for name, _, tokens in source.ended} == {f"r{i}": 1 + i % 5 for i in range(12)}
    rows = tables.requests
    assert (rows["first_scheduled_s"] >= rows["arrival_s"]).all() and tables.summary["requests/finished"] == 12
    assert tables.result["counters"] == {"swaps_refused": 0, "fallback_steps": 0}


def test_tokens_are_those_of_vllms_own_scheduler(make):
    requests = [{"name": f"r{i}", "prompt": 30 + 11 * i, "output": 6} for i in range(10)]
    tokens = []
    for policy in (OwnScheduler(), EVERY["decode_priority"](), EVERY["prefix_reuse"]()):
        source, _ = served(make, policy, *(request(**keys) for keys in requests))
        tokens.append(sorted(source.ended))
    assert tokens[0] == tokens[1] == tokens[2]


def test_what_never_fits_is_rejected_and_what_is_withdrawn_aborted(make):
    source, tables = served(
        make, Scripted(everything), request("long", prompt=500, output=40), request("leaves", abort_ns=1, output=300),
        request("stays"),
    )  # fmt: skip
    assert {(name, state) for name, state, _ in source.ended} == {
        ("long", "rejected"), ("leaves", "aborted"), ("stays", "finished"),
    }  # fmt: skip
    reasons = dict(zip(tables.requests["request_id"], tables.requests["reason"], strict=True))
    assert reasons["long"] == "needs 540 tokens, max_model_len is 512"


def test_a_live_request_ends_at_its_stop_token_or_its_limit(make):
    greedy, _ = served(make, Scripted(everything), request("a", output=8))
    stop = greedy.ended[0][2][3]
    live = {"recorded_output_tokens": None, "max_tokens": 8}
    source, _ = served(
        make, Scripted(everything), request("a", **live, sampling=SamplingParams(stop_token_ids=(stop,))),
        request("b", **live, sampling=SamplingParams(ignore_eos=True)),
    )  # fmt: skip
    ended = {name: tokens for name, _, tokens in source.ended}
    assert ended["a"] == greedy.ended[0][2][: greedy.ended[0][2].index(stop) + 1] and len(ended["b"]) == 8
    with pytest.raises(ConfigError, match="request c: engine=vllm ends requests by tokens, found stop strings"):
        served(make, Scripted(everything), request("c", **live, sampling=SamplingParams(stop=("x",))))


def test_a_policy_that_will_never_wake_is_stalled(make):
    with pytest.raises(PolicyStalled, match="never wakes"):
        served(make, Scripted(lambda step: step.idle_until()), request("a"))


def test_arguments_follow_from_the_limits():
    arguments = replay.engine_arguments("model", {**LIMITS, "watermark": 0.1}, {"max_num_seqs": 3})
    assert arguments["num_gpu_blocks_override"] == 41 and arguments["max_num_seqs"] == 3
    assert int(arguments["watermark"] * 41) == 4
