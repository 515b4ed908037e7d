"""Decisions about KV memory that are configured: the order of eviction, the watermark, victims, recompute or swap."""

from collections import OrderedDict
from dataclasses import replace

import pytest
from four import EVERY
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, PART, Script, grants, lab, log

from schedlab.experiments.engines import hardware_preset, virtual
from schedlab.experiments.estimators import ConfiguredEstimator
from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import EngineConfig
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import TINY, Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fair import Fair
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.policies.victims import least_computed, most_computed, newest, oldest, worst_of

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


# -- victims ----------------------------------------------------------------------------------------------------------


def victims_under(rule):
    """Four requests have 9, 21, 13 and 17 tokens computed, in admission order, when the first needs a block."""
    seen = []

    def ask(step):
        seen.extend([request.request_id for request in rule(step, r)] for r in step.running)
        step.grant_decodes()

    trace = [Spec(n, 0, size, 4) for n, size in (("a", 8), ("b", 20), ("c", 12), ("d", 16))]
    made = lab(Script(grants(a=None, b=None, c=None, d=None), ask), trace, num_blocks=200, max_num_batched_tokens=64)
    made.step(2)
    return ["".join(names) for names in seen]


@pytest.mark.parametrize(
    "rule, of_a, of_b, of_c, of_d",
    [
        (newest, "dcb", "dc", "d", ""),
        (least_computed, "cdb", "cd", "", "c"),
        (most_computed, "bdc", "", "bd", "b"),
        (oldest, "bcd", "", "b", "bc"),
        (lambda *asked: worst_of(lambda request: request.num_prompt_tokens)(*asked), "bdc", "", "bd", "b"),
    ],
)
def test_a_rule_yields_its_victims_in_its_order(rule, of_a, of_b, of_c, of_d):
    """Each may displace those before it in line; under the rules that look at sizes the oldest may displace all."""
    assert victims_under(rule) == [of_a, of_b, of_c, of_d]


RULES = {"least": least_computed, "most": most_computed, "oldest": oldest, "newest": newest}


@given(specs(), limits(), st.sampled_from(sorted(RULES)), st.sampled_from([FCFS, ChunkedPrefill, PrefixReuse, Fair]))
def test_every_rule_serves_everybody(trace, keys, rule, policy):
    outcome = run(policy(victim=RULES[rule]), trace, **keys)
    check_streams(outcome)
    assert all(request.finished_ns is not None for request in outcome.requests)


def test_the_rule_decides_who_is_preempted():
    """12 blocks of 4. a, b and c fill the pool; who goes first differs."""
    trace = [Spec("a", 0, 12, 16), Spec("b", 0, 20, 12), Spec("c", 0, 8, 16)]

    def first_victim(rule):
        outcome = run(ChunkedPrefill(victim=rule), trace, num_blocks=12, max_num_batched_tokens=64)
        return next(row[0][0] for row in outcome.tables.decisions["preempted"] if len(row))

    assert first_victim(most_computed) == "b"
    assert first_victim(newest) == first_victim(least_computed) == "c"


# -- recompute or swap ------------------------------------------------------------------------------------------------


def modes(estimator, prompt):
    """How requests of this size are preempted when the pool runs out."""
    trace = [Spec(n, 0, prompt, 20) for n in "abc"]
    policy = ChunkedPrefill(preempt_mode="auto", estimator=estimator)
    outcome = run(policy, trace, num_blocks=3 * prompt // 4 + 4, max_num_batched_tokens=128, swap_space_gib=2**-18)
    check_streams(outcome)
    summary = outcome.tables.result["summary"]
    return {kind for kind in ("recompute", "swap") if summary[f"preemptions/{kind}"]}


@pytest.mark.parametrize("prompt, kinds", [(8, {"swap"}), (64, {"recompute"})])
def test_auto_takes_what_the_estimator_says_is_cheaper(prompt, kinds):
    """A step takes 40 ms and 1 ms a token, both copies 2 ms a token: copying is cheaper up to 40 tokens."""
    assert modes(LinearEstimator(step=0.040, token=0.001, copied_token=0.001), prompt) == kinds


def test_auto_on_the_cost_model_compares_the_host_link_with_the_arithmetic():
    """8B on H100: a token's 128 KiB over PCIe 5 twice, against 16 GFLOP at half of the peak; the two differ tenfold."""
    estimator = ConfiguredEstimator("llama3.1-8b", "h100")
    assert 2 * estimator.copy_s(4000) < estimator.step_s(4000) < 40 * estimator.copy_s(4000)
    slow = ConfiguredEstimator("llama3.1-8b", replace(hardware_preset("h100"), host_link_gb_s=1.0))
    assert 2 * slow.copy_s(4000) > slow.step_s(4000)


def test_the_estimator_says_what_the_virtual_clock_would_take():
    """One prefill, one mixed and one decode step of the executor against the estimator."""
    setup = virtual("llama3.1-8b", "h100", num_blocks=4000, max_model_len=8192)
    estimator = ConfiguredEstimator("llama3.1-8b", "h100")
    requests = [Spec(n, 0, 1000, 5).request() for n in "ab"]
    made = lab(
        Script(grants(a=None), grants(a=1, b=None), grants(a=1, b=1)),
        requests, executor=setup.executor, num_blocks=4000, block_size=16, max_num_batched_tokens=2048,
        max_model_len=8192,
    )  # fmt: skip
    made.step(3)
    durations = [row / 1e9 for row in made.tables().steps["duration_ns"]]
    said = [estimator.step_s(1000), estimator.step_s(1000, 0, 1, 1001), estimator.step_s(0, 0, 2, 2003)]
    assert said == pytest.approx(durations, rel=1e-6)


def test_auto_without_an_estimator_is_refused():
    with pytest.raises(ValueError, match=r"policy\.preempt_mode: auto needs policy\.estimator"):
        FCFS(preempt_mode="auto")
