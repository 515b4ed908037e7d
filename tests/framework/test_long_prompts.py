"""Short prompts behind long ones: limits on what one prompt takes of a step, and on how many are partly computed."""

import pytest
from hypothesis import given
from scripted import ScriptedExecutor

import schedlab
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.workload import Recorded


def batches(policy, trace, **keys):
    executor = ScriptedExecutor(1)
    run(policy, trace, executor=executor, **keys)
    return [prefills for prefills, _ in executor.batches]


def test_a_prompt_takes_no_more_of_a_step_than_its_share():
    trace = [Spec("long", 0, 30, 1), Spec("short", 0, 4, 1)]
    steps = batches(ChunkedPrefill(chunk_size=12, long_prefill_token_threshold=8), trace)
    assert steps[0] == [("long", 0, 8), ("short", 0, 4)]
    assert [prefills for prefills in steps[1:] if prefills] == [[("long", at, min(8, 30 - at))] for at in (8, 16, 24)]
    assert batches(ChunkedPrefill(chunk_size=12), trace)[0] == [("long", 0, 12)], "without a limit it takes all"


def test_what_can_be_computed_whole_overtakes_one_partial_prompt_too_many():
    trace = [Spec("a", 0, 30, 1), Spec("b", 0, 30, 1), Spec("c", 0, 4, 1)]
    policy = ChunkedPrefill(chunk_size=14, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    steps = batches(policy, trace)
    assert steps[0] == [("a", 0, 8), ("c", 0, 4)]
    order = [name for prefills in steps for name, start, _ in prefills if start == 0]
    assert order == ["a", "c", "b"]
    for prefills in steps:
        assert sum(start + count < 30 for name, start, count in prefills if name != "c") <= 1


def test_a_prompt_of_just_its_share_is_a_whole_one():
    trace = [Spec("a", 0, 30, 1), Spec("b", 0, 8, 1)]
    policy = ChunkedPrefill(chunk_size=16, long_prefill_token_threshold=8, max_num_partial_prefills=1)
    assert batches(policy, trace)[0] == [("a", 0, 8), ("b", 0, 8)]


def test_nobody_is_asked_when_the_chunk_is_used_up():
    trace = [Spec("a", 0, 30, 1), Spec("b", 0, 30, 1), Spec("c", 0, 30, 1)]
    rows = run(ChunkedPrefill(chunk_size=12, long_prefill_token_threshold=8), trace).tables.decisions
    assert rows["grants"][0] == [["a", 8], ["b", 4]] and not rows["refusals"][0]


@pytest.mark.parametrize("key", ["long_prefill_token_threshold", "max_num_partial_prefills"])
def test_limits_below_one_are_refused(key):
    with pytest.raises(ValueError, match=rf"policy\.{key}: expected null or at least 1, found 0"):
        ChunkedPrefill(**{key: 0})


@given(specs(), limits())
def test_every_stream_is_right_under_limits(trace, keys):
    policy = ChunkedPrefill(chunk_size=12, long_prefill_token_threshold=5, max_num_partial_prefills=2)
    outcome = run(policy, trace, **keys)
    check_streams(outcome)
    stepped = run(ChunkedPrefill(chunk_size=12, long_prefill_token_threshold=5, max_num_partial_prefills=2), trace,
                  honour_holds=False, **keys)  # fmt: skip
    assert stepped.digest == outcome.digest and stepped.stamps == outcome.stamps


def test_a_hundred_tokens_behind_a_hundred_thousand(tmp_path):
    """On the modelled H100 with Llama-3.1-8B: in under a tenth of a second, not after the long prompt."""
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100000,8\n0.001,100,8\n")
    firsts = []
    for policy in (ChunkedPrefill(chunk_size=2048), ChunkedPrefill(chunk_size=2048, long_prefill_token_threshold=512)):
        ended = schedlab.run(policy, Recorded(path=str(path)), schedlab.engines.virtual("llama3.1-8b", "h100")).requests
        firsts.append(ended["first_token_s"] - ended["arrival_s"])
    waits = [dict(zip(ended["request_id"], first, strict=True))["1"] for first in firsts]
    assert waits[0] > 5 and waits[1] < 0.1
