"""Requests that are refused at submission, and where others end: known ways in which engines go wrong."""

import pytest
from four import ALL, FOUR
from scripted import (
    MS,
    Script,
    Told,
    lab,
)

from schedlab.framework.policy import Arrived, Finished
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec, check_streams, run

# -- rejection at submission ------------------------------------------------------------------------------------------

POOL, MODEL = 40, 50  # tokens: 10 blocks of 4


@pytest.mark.parametrize(
    "prompt, output, live, rejected",
    [
        (31, 10, False, None),  # all but the newest token are cached: 40
        (31, 11, False, "KV cache"),
        (40, 1, False, None),
        (41, 1, False, "KV cache"),
        (39, 1000, True, None),
        (40, 1, True, "KV cache"),
        (41, 1000, True, "KV cache"),
    ],
)
def test_what_can_never_fit_the_pool_is_rejected(prompt, output, live, rejected):
    assert_rejected(prompt, output, live, rejected, num_blocks=10, max_model_len=1000)


@pytest.mark.parametrize(
    "prompt, output, live, rejected",
    [
        (40, 10, False, None),
        (40, 11, False, "max_model_len"),
        (49, 1, False, None),
        (49, 1000, True, None),
        (50, 1, True, "max_model_len"),
    ],
)
def test_what_can_never_fit_the_model_is_rejected(prompt, output, live, rejected):
    assert_rejected(prompt, output, live, rejected, num_blocks=100, max_model_len=MODEL)


def assert_rejected(prompt, output, live, rejected, **keys):
    """The request in question comes between two others, which must finish whatever becomes of it."""
    trace = [Spec("before", 0, 8, 3), Spec("it", 0, prompt, output, live=live), Spec("after", 0, 8, 3)]
    source = Told([spec.request() for spec in trace])
    made = lab(Script(), source.requests, source=source, max_num_batched_tokens=64, **keys)
    tables = made.finish()
    assert made["before"].state == made["after"].state == "finished"
    assert source.told == {"before": 1, "it": 1, "after": 1}
    heard = [event.request.request_id for event in made.policy.events if isinstance(event, (Arrived, Finished))]
    if rejected is None:
        assert made["it"].state in ("finished", "length_capped") and "it" in heard
        return
    assert made["it"].state == "rejected" and rejected in made["it"].reason
    assert "it" not in heard, "a policy never sees what was rejected"
    assert tables.summary["requests/rejected"] == 1 and tables.summary["requests/offered"] == 3
    assert tables.summary["ttft/max"] is not None and made["it"].first_scheduled_ns is None


@pytest.mark.parametrize("name", ALL)
def test_what_can_never_fit_does_not_stop_a_policy(name):
    trace = [Spec("a", 0, 20, 4), Spec("huge", 0, 97, 1), Spec("b", 0, 20, 4), Spec("vast", 0, 90, 200)]
    outcome = run(ALL[name](), trace)
    states = {spec.name: outcome.by_name[spec.name].state for spec in trace}
    assert states == {"a": "finished", "huge": "rejected", "b": "finished", "vast": "rejected"}


@pytest.mark.parametrize("prompt, output, live", [(0, 5, False), (5, 0, False), (0, 5, True), (5, 0, True)])
def test_what_has_nothing_to_compute_or_to_emit_is_rejected(prompt, output, live):
    made = lab(Script(), [Spec("a", 0, 4, 2), Spec("empty", 0, prompt, output, live=live)])
    made.finish()
    assert made["empty"].state == "rejected" and "empty" in made["empty"].reason
    assert made["empty"].num_output_tokens == 0


# -- where a request ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_live_request_that_outgrows_the_pool_is_capped_and_the_others_live(name):
    """40 slots hold the prompt and 24 generated tokens; the 25th is emitted and has no place left."""
    trace = [Spec("it", 0, 16, 1000, live=True), Spec("b", 5 * MS, 12, 6), Spec("c", 9 * MS, 12, 6)]
    outcome = run(ALL[name](), trace, num_blocks=10)
    check_streams(outcome)
    it = outcome.by_name["it"]
    assert it.state == "length_capped" and it.num_output_tokens == POOL + 1 - 16
    assert "KV cache of 40 tokens" in it.reason
    assert {outcome.by_name[other].state for other in "bc"} == {"finished"}
    assert outcome.tables.result["summary"]["requests/length_capped"] == 1


def test_a_live_request_ends_at_the_model_s_limit():
    outcome = run(Script(), [Spec("it", 0, 16, 1000, live=True)], max_model_len=MODEL)
    assert outcome.by_name["it"].state == "length_capped"
    assert outcome.by_name["it"].num_tokens == MODEL and "max_model_len 50" in outcome.by_name["it"].reason


def test_max_tokens_defaults_to_what_the_model_has_left():
    live = EngineRequest("a", 0, 16, Spec("a", 0, 16, 1).content())
    replayed = EngineRequest("b", 0, 10, Spec("b", 0, 10, 1).content(), recorded_output_tokens=3)
    made = lab(Script(), [live, replayed], max_model_len=MODEL)
    made.finish()
    assert (live.max_tokens, replayed.max_tokens) == (34, 40), "never the recorded length"
    assert (live.num_output_tokens, replayed.num_output_tokens) == (34, 3)


def test_a_live_request_ends_at_a_stop_token_and_a_replay_does_not():
    free = run(Script(), [Spec("a", 0, 16, 12)]).streams["a"]
    stop = free[5]
    executor = StubExecutor()
    executor.eos_token_ids = (stop,)
    assert free.index(stop) == 5
    for live, length in ((True, 6), (False, 12)):
        outcome = run(Script(), [Spec("a", 0, 16, 12, live=live)], executor=executor)
        assert outcome.by_name["a"].state == "finished"
        assert outcome.streams["a"] == free[:length]


@pytest.mark.parametrize("ignore_eos, stop_ids, length", [(False, (), 6), (True, (), 12), (True, (3,), 4)])
def test_stop_tokens_of_the_request_count_beside_the_model_s(ignore_eos, stop_ids, length):
    free = run(Script(), [Spec("a", 0, 16, 12)]).streams["a"]
    executor = StubExecutor()
    executor.eos_token_ids = (free[5],)
    sampling = SamplingParams(ignore_eos=ignore_eos, stop_token_ids=tuple(free[i] for i in stop_ids))
    request = EngineRequest("a", 0, 16, Spec("a", 0, 16, 1).content(), max_tokens=12, sampling=sampling)
    lab(Script(), [request], executor=executor).finish()
    assert request.output_token_ids == free[:length]


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("prompt", [3, 4, 8, 32])
@pytest.mark.parametrize("name", FOUR)
def test_one_token_finishes_on_the_prefill_step_and_frees_everything(name, prompt, live):
    trace = [Spec("d", 0, 6, 20), Spec("it", 4 * MS, prompt, 1, live=live)]
    outcome = run(FOUR[name](), trace)
    check_streams(outcome)
    it = outcome.by_name["it"]
    assert it.state == "finished" and it.num_output_tokens == 1
    assert it.finished_ns == it._first_token_ns
    chunks = [tokens for row in outcome.tables.decisions["grants"] for who, tokens in row if who == "it"]
    assert sum(chunks) == prompt, "one prefill and no decode"
    decoded = [row for row in outcome.tables.decisions["decodes"] if row != "all" and "it" in row]
    assert not decoded


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("name", ["fcfs", "chunked_prefill"])
def test_a_prompt_of_exactly_some_blocks(name, blocks, block_size):
    prompt = blocks * block_size
    trace = [Spec(n, at * MS, prompt, 5, ids=(1, 2, 3), id_width=16) for n, at in (("a", 0), ("b", 20))]
    outcome = run(FOUR[name](), trace, block_size=block_size, num_blocks=100, max_num_batched_tokens=64)
    check_streams(outcome)
    assert outcome.streams["a"] == outcome.streams["b"]
    assert outcome.by_name["b"].cached_tokens == (prompt - 1) // block_size * block_size, "the last token is computed"


# -- refused names ----------------------------------------------------------------------------------------------------


def test_two_requests_of_one_name_are_refused_by_name():
    with pytest.raises(ValueError, match="request a: a request of this name"):
        lab(Script(), [Spec("a", 0, 4, 3), Spec("a", 0, 4, 3)]).finish()
