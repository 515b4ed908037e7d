"""The length rules and the engine's keys, at their edges and against formulas written out again."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import lab

from schedlab.framework import invariants
from schedlab.framework.content import UniqueContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import EngineConfig, ending, never_fits, set_limits, tokens_served
from schedlab.framework.request import EngineRequest
from schedlab.framework.testing.harness import Spec
from schedlab.policies.fcfs import FCFS

BASE = EngineConfig(num_blocks=10, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, block_size=4)


def request(prompt, recorded=None, max_tokens=None):
    return EngineRequest("r", 0, prompt, UniqueContent(0), recorded_output_tokens=recorded, max_tokens=max_tokens)


lengths = st.integers(1, 80)


@given(lengths, lengths, st.integers(1, 12), st.integers(1, 80), st.sampled_from([1, 3, 4, 8]))
def test_a_replay_fits_if_all_but_its_newest_token_do(prompt, output, blocks, model, size):
    config = replace(BASE, num_blocks=blocks, max_model_len=model, block_size=size)
    fits = prompt + output - 1 <= blocks * size and prompt + output <= model
    assert (never_fits(request(prompt, output), config) is None) == fits


@given(lengths, lengths, st.integers(1, 12), st.integers(1, 80), st.sampled_from([1, 3, 4, 8]))
def test_a_live_request_fits_if_its_first_token_does(prompt, output, blocks, model, size):
    config = replace(BASE, num_blocks=blocks, max_model_len=model, block_size=size)
    fits = prompt + 1 <= blocks * size and prompt + 1 <= model
    assert (never_fits(request(prompt, max_tokens=output), config) is None) == fits


@given(lengths, st.one_of(st.none(), lengths), st.integers(1, 12), st.integers(1, 80))
def test_a_live_request_ends_at_the_first_of_its_cap_the_model_and_the_pool(prompt, output, blocks, model):
    config = replace(BASE, num_blocks=blocks, max_model_len=model)
    live = request(prompt, max_tokens=output)
    if never_fits(live, config) is not None:
        return
    set_limits(live, config)
    assert live.max_tokens == (model - prompt if output is None else output)
    assert live.final_tokens == min(prompt + live.max_tokens, model, 4 * blocks + 1)
    live._base_tokens = live.final_tokens
    capped = live.final_tokens < prompt + live.max_tokens
    assert ending(live, config) == ("length_capped" if capped else "finished")
    assert (live.reason is not None) == capped


@given(lengths, lengths)
def test_a_replay_ends_at_its_recorded_length_whatever_its_cap_says(prompt, output):
    config = replace(BASE, num_blocks=100, max_model_len=200)
    for cap in (None, 1, 150):
        replayed = request(prompt, output, cap)
        set_limits(replayed, config)
        assert replayed.final_tokens == prompt + output
        assert replayed.max_tokens == (200 - prompt if cap is None else cap), "never the recorded length"


def test_reasons_are_one_line_with_expected_and_found():
    for prompt, recorded, words in ((30, 20, ["49 tokens", "holds 40"]), (3, 70, ["72 tokens", "holds 40"])):
        reason = never_fits(request(prompt, recorded), BASE)
        assert reason is not None and "\n" not in reason and all(word in reason for word in words)
    reason = never_fits(request(30, 40), replace(BASE, num_blocks=100))
    assert reason is not None and "70 tokens" in reason and "max_model_len is 64" in reason


SERVED = [(0, None, 0, 0), (7, None, 0, 7), (10, 5, 1, 11), (0, 5, 4, 14), (13, 5, 4, 14)]


@pytest.mark.parametrize("computed, first_token, output, served", SERVED)
def test_tokens_served_count_each_prompt_token_once(computed, first_token, output, served):
    """A prompt that was thrown out after its first token has been served all the same."""
    some = request(10, 20)
    some._base_computed, some._first_token_ns, some._base_tokens = computed, first_token, 10 + output
    assert tokens_served(some) == served


@pytest.mark.parametrize(
    "key, value",
    [
        ("num_blocks", 0),
        ("max_model_len", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("block_size", -1),
        ("audit_every", 0),
        ("swap_space_gib", -1.0),
        ("swap_space_gib", float("nan")),
        ("swap_space_gib", float("inf")),
        ("max_num_seqs", 17),
    ],
)
def test_a_key_out_of_range_is_named(key, value):
    named = "max_num_batched_tokens" if (key, value) == ("max_num_seqs", 17) else key
    with pytest.raises(ConfigError, match=rf"engine\.{named}: expected .*found"):
        replace(BASE, **{key: value})


def test_the_pool_holds_blocks_times_their_size():
    assert BASE.pool_tokens == 40


def test_audits_are_as_far_apart_as_the_books_are_large(monkeypatch):
    """Every boundary if that is wanted; else never nearer than configured, and one boundary an entry apart."""
    audited, real = [], invariants.audit
    monkeypatch.setattr(invariants, "audit", lambda ledger: (audited.append(1), real(ledger)))
    trace = [Spec(f"r{i}", 0, 20, 200, ids=(i, i + 1, i + 2)) for i in range(3)]
    counts = {}
    for every, blocks in ((1, 200), (5, 200), (5, 4000)):
        audited.clear()
        made = lab(FCFS(), trace, num_blocks=blocks, audit_every=every, honour_holds=False)
        made.engine.run()
        counts[every, blocks] = len(audited), made.engine._boundaries
    assert counts[1, 200][0] == counts[1, 200][1]
    assert 2 < counts[5, 200][0] < counts[5, 200][1] / 5
    assert counts[5, 4000][0] == 1
