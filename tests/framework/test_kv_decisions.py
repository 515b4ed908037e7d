"""Decisions about KV memory that are configured: the order of eviction, the watermark, victims, recompute or swap."""

from collections import OrderedDict

import pytest
from four import EVERY
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, PART, Script, lab, log

from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import EngineConfig
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import TINY, Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS

EVICTIONS = st.sampled_from(["lru", "lfu", "fifo"])

# -- eviction ---------------------------------------------------------------------------------------------------------


def uses(order, **keys):
    """Prompts of 16 tokens by name, one after another; equal first letters are equal prompts. Cached tokens of each.

    The pool has 10 blocks of 4, so two prompts of 4 blocks stay cached beside one that runs with 1 for its output.
    """
    trace = [
        Spec(f"{name}{i}", i * 20 * MS, 16, 2, ids=(100 * ord(name), 100 * ord(name) + 1), id_width=8)
        for i, name in enumerate(order)
    ]
    outcome = run(FCFS(), trace, num_blocks=10, max_num_batched_tokens=64, **keys)
    return [request.cached_tokens for request in outcome.requests]


def survivor(order, **keys):
    """Who of a and b is still wholly cached after `order` and then c."""
    return [name for name in "ab" if uses(order + "c" + name, **keys)[-1] == 12]


@pytest.mark.parametrize(
    "order, lru, lfu, fifo",
    [
        ("ab", ["b"], ["b"], ["b"]),
        ("aba", ["a"], ["a"], ["b"]),
        ("aabb", ["b"], ["b"], ["b"]),
        ("aaab", ["b"], ["a"], ["b"]),
        ("bbaba", ["a"], ["b"], ["a"]),
    ],
)
def test_who_is_evicted(order, lru, lfu, fifo):
    found = {eviction: survivor(order, eviction=eviction) for eviction in ("lru", "lfu", "fifo")}
    assert found == {"lru": lru, "lfu": lfu, "fifo": fifo}


@given(specs(), limits(), EVICTIONS, st.sampled_from(sorted(EVERY)))
def test_streams_and_books_are_right_under_every_eviction(trace, keys, eviction, name):
    """The audit after every step checks that the index stays closed under prefixes."""
    check_streams(run(EVERY[name](), trace, **{**keys, "enable_prefix_caching": True, "eviction": eviction}))


@PART
@given(specs(), limits(), st.sampled_from(["lfu", "fifo"]), st.integers(0, 2**32))
def test_random_decisions_keep_the_books_right_under_every_eviction(trace, keys, eviction, seed):
    check_streams(run(Chaos(seed), trace, **{**keys, "enable_prefix_caching": True, "eviction": eviction}))


def test_the_default_is_a_plain_ordered_dict():
    made = lab(Script(), [])
    assert type(made.engine.ledger.cache.lru) is OrderedDict


# -- watermark --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watermark, admitted", [(0.0, 1), (0.3, 1), (0.4, 5)])
def test_an_admission_leaves_the_watermark_free(watermark, admitted):
    """8 blocks of 4: a has 3 (8 tokens and a decode), b needs 2; 3 are left, until a's finish frees more."""
    trace = [Spec("a", 0, 8, 5), Spec("b", MS, 8, 1)]
    steps = log(ChunkedPrefill(), trace, num_blocks=8, watermark=watermark)
    assert [i for i, (prefills, _) in enumerate(steps) if prefills] == [0, admitted]


def test_the_watermark_stops_nobody_who_is_alone():
    outcome = run(FCFS(), [Spec("a", 0, 60, 8), Spec("b", 0, 60, 8)], num_blocks=20, watermark=0.9)
    assert {request.state for request in outcome.requests} == {"finished"}


@given(specs(), limits(), st.sampled_from([0.05, 0.3, 0.9]), st.sampled_from(sorted(EVERY)))
def test_streams_are_right_and_everybody_ends_under_a_watermark(trace, keys, watermark, name):
    outcome = run(EVERY[name](), trace, **{**keys, "watermark": watermark})
    check_streams(outcome)
    assert all(request.finished_ns is not None for request in outcome.requests)


@PART
@given(specs(), limits(), st.sampled_from([0.1, 0.5]))
def test_fits_is_what_a_grant_gives_under_a_watermark(trace, keys, watermark):
    def step_by_step(step):
        step.grant_decodes()
        for request in [*step.prefilling, *step.waiting]:
            fits = step.fits(request)
            assert step.grant(request, fits or 1).tokens == fits
        if step.token_budget == keys["max_num_batched_tokens"]:
            first, *others = step.running
            for victim in reversed(others):
                step.preempt(victim)
            step.grant(first, step.fits(first))

    run(Script(then=step_by_step), trace, **{**keys, "watermark": watermark})


@pytest.mark.parametrize("key, value", [("watermark", 1.0), ("watermark", -0.1), ("eviction", "mru")])
def test_a_key_out_of_range_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"engine.{key}"):
        EngineConfig(**{**{k: getattr(TINY, k) for k in ("num_blocks", "max_model_len")}, key: value})
