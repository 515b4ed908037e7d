"""vLLM's whole engine on a tiny model with made-up weights, under a source: what `engine=vllm` runs in its process.

One engine serves all of these: starting one takes seconds.
"""

from statistics import median

import pytest
import rig
from scripted import Scripted, everything
from whole import Whole

from policies import EVERY
from schedlab.framework.content import TokenContent
from schedlab.framework.errors import ConfigError, PolicyStalled
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.vllm import replay
from schedlab.framework.vllm.own import OwnScheduler

LIMITS = {
    "num_blocks": 40, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 32,
    "enable_prefix_caching": True, "watermark": 0.0,
}  # fmt: skip
MS = 1_000_000


@pytest.fixture(scope="module")
def whole():
    made = Whole(rig.model_config().model, LIMITS, load_format="dummy", dtype="float32", gpu_memory_utilization=0.1)
    yield made
    made.close()


def request(name, arrival_ms=0, prompt=60, output=5, **more):
    content = TokenContent([2 + (7 * i + len(name)) % 500 for i in range(prompt)])
    more.setdefault("recorded_output_tokens", output)
    return EngineRequest(name, arrival_ms * MS, prompt, content, **more)


def served(whole, policy, *requests):
    source, tables, scheduler = whole.serve(policy, *requests)
    rig.assert_empty(scheduler)
    return source, tables


def test_arrivals_are_replayed_and_lengths_are_forced(whole):
    requests = [request(f"r{i}", 3 * i, 20 + 9 * i, 1 + i % 5) for i in range(12)]
    source, tables = served(whole, EVERY["chunked_prefill"](), *requests)
    assert {name: len(tokens) for name, _, tokens in source.ended} == {f"r{i}": 1 + i % 5 for i in range(12)}
    rows = tables.requests
    assert (rows["first_scheduled_s"] >= rows["arrival_s"]).all() and tables.summary["requests/finished"] == 12
    assert tables.result["counters"] == {"swaps_refused": 0, "fallback_steps": 0}


def test_tokens_are_those_of_vllms_own_scheduler(whole):
    requests = [{"name": f"r{i}", "prompt": 30 + 11 * i, "output": 6} for i in range(10)]
    tokens = []
    for policy in (OwnScheduler(), EVERY["decode_priority"](), EVERY["prefix_reuse"]()):
        source, _ = served(whole, policy, *(request(**keys) for keys in requests))
        tokens.append(sorted(source.ended))
    assert tokens[0] == tokens[1] == tokens[2]


def test_what_never_fits_is_rejected_and_what_is_withdrawn_aborted(whole):
    source, tables = served(
        whole, Scripted(everything), request("long", prompt=500, output=40), request("leaves", abort_ns=1, output=300),
        request("stays"),
    )  # fmt: skip
    assert {(name, state) for name, state, _ in source.ended} == {
        ("long", "rejected"), ("leaves", "aborted"), ("stays", "finished"),
    }  # fmt: skip
    reasons = dict(zip(tables.requests["request_id"], tables.requests["reason"], strict=True))
    assert reasons["long"] == "needs 540 tokens, max_model_len is 512"


def test_a_live_request_ends_at_its_stop_token_or_its_limit(whole):
    greedy, _ = served(whole, Scripted(everything), request("a", output=8))
    stop = greedy.ended[0][2][3]
    live = {"recorded_output_tokens": None, "max_tokens": 8}
    source, _ = served(
        whole, Scripted(everything), request("a", **live, sampling=SamplingParams(stop_token_ids=(stop,))),
        request("b", **live, sampling=SamplingParams(ignore_eos=True)),
    )  # fmt: skip
    ended = {name: tokens for name, _, tokens in source.ended}
    assert ended["a"] == greedy.ended[0][2][: greedy.ended[0][2].index(stop) + 1] and len(ended["b"]) == 8
    with pytest.raises(ConfigError, match="request c: engine=vllm ends requests by tokens, found stop strings"):
        served(whole, Scripted(everything), request("c", **live, sampling=SamplingParams(stop=("x",))))


def test_records_are_closed_by_the_run_alone(whole):
    """vLLM shuts its scheduler down when the process ends, long after the run's files are closed."""
    _, _, scheduler = whole.serve(Scripted(everything), request("a"))
    closed = []
    whole.recorder.close = lambda **keys: closed.append(keys)
    scheduler.shutdown()
    assert not closed


def test_a_policy_that_will_never_wake_is_stalled(whole):
    with pytest.raises(PolicyStalled, match="never wakes"):
        served(whole, Scripted(lambda step: step.idle_until()), request("a"))


@pytest.mark.full
def test_half_a_second_of_idling_takes_few_calls(whole):
    asked = []

    def sleep_once(step):
        asked.append((step.index, step.now))
        if len(asked) == 1:
            step.idle_until(step.now + 0.5)
        else:
            everything(step)

    served(whole, Scripted(sleep_once), request("a"))
    (first, began), (second, ended) = asked[:2]
    assert 0.5 <= ended - began < 0.6 and second - first <= 1000


@pytest.mark.full
def test_an_arrival_wakes_an_idle_policy_at_once(whole):
    """Within 5 ms: the median of eight, as this machine may have something else to do."""
    seen = {}

    def sleep(step):
        new = [r for r in step.waiting if r.request_id not in seen]
        seen.update((r.request_id, step.now - r.arrival_s) for r in new)
        if len(seen) < 9:
            step.idle_until(step.now + 0.5)
        else:
            everything(step)

    served(whole, Scripted(sleep), *(request(f"r{i}", 40 * i) for i in range(9)))
    assert len(seen) == 9 and median(list(seen.values())[1:]) <= 0.005


def test_arguments_follow_from_the_limits():
    arguments = replay.engine_arguments("model", {**LIMITS, "watermark": 0.1}, {"max_num_seqs": 3})
    assert arguments["num_gpu_blocks_override"] == 41 and arguments["max_num_seqs"] == 3
    assert int(arguments["watermark"] * 41) == 4
