"""The step transaction: what a policy sees, row by row of the contract, and that its verbs do what its numbers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    VIEWS,
    Script,
    books,
    check_all_tokens,
    checked,
    grants,
    ids,
    lab,
    named,
    populated,
    serve,
)
from surveyors import ChangeReader, StillReader, Surveyor, Watching

from schedlab.framework.step import Grant
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs

small = specs(max_requests=9, max_prompt=40, max_output=10)


# -- views ------------------------------------------------------------------------------------------------------------


def test_the_views_partition_the_requests():
    seen = {}

    def look(step):
        seen.update({name: ids(getattr(step, name)) for name in VIEWS})
        serve(step)

    checked(populated(look))
    assert seen == VIEWS


VERBS = {
    "grant a decode": lambda step, r: step.grant(r["d2"]),
    "grant a chunk": lambda step, r: step.grant(r["p1"], 2),
    "admit": lambda step, r: step.grant(r["w1"], 3),
    "admit the second": lambda step, r: step.grant(r["w2"]),
    "decode all": lambda step, r: step.grant_decodes(),
    "preempt a decode": lambda step, r: step.preempt(r["d1"]),
    "swap out a decode": lambda step, r: step.preempt(r["d2"], "swap"),
    "preempt a prompt": lambda step, r: step.preempt(r["p1"]),
    "swap out a prompt": lambda step, r: step.preempt(r["p2"], "swap"),
    "take back an admission": lambda step, r: (step.grant(r["w1"], 3), step.preempt(r["w1"])),
    "take back a decode": lambda step, r: (step.grant(r["d1"]), step.preempt(r["d1"])),
    "preempt after decode all": lambda step, r: (step.grant_decodes(), step.preempt(r["d2"])),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("when", ["views taken before", "views taken after"])
def test_views_stay_as_they_were_at_the_start_of_the_step(verb, when):
    def move(step):
        requests = named(step)
        before = {name: getattr(step, name) for name in VIEWS} if when == "views taken before" else {}
        VERBS[verb](step, requests)
        views = before or {name: getattr(step, name) for name in VIEWS}
        assert {name: ids(view) for name, view in views.items()} == VIEWS
        for name, view in views.items():
            assert len(view) == len(VIEWS[name]) and ids(view[:1]) == VIEWS[name][:1]
        if step.token_budget == 32:
            step.idle_until(step.now + 0.001)

    checked(populated(move, swap_space_gib=8 * HOST_BLOCK_GIB))


@pytest.mark.parametrize("view", ["running", "decoding", "prefilling"])
def test_a_policy_may_preempt_what_it_walks_over(view):
    met = []

    def move(step):
        for request in getattr(step, view):
            met.append(request.request_id)
            step.preempt(request)
        assert step.grant(named(step)["w1"])

    made = populated(move)
    made.step()
    assert met == VIEWS[view]


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_only(view):
    def move(step):
        seen = getattr(step, view)
        with pytest.raises((TypeError, AttributeError)):
            seen[0] = seen[-1]
        with pytest.raises((TypeError, AttributeError)):
            seen.append(seen[0])
        serve(step)

    checked(populated(move))


def test_requests_are_read_only():
    def move(step):
        for name in ("state", "priority", "num_tokens", "num_computed_tokens", "max_tokens", "arrival_s", "slo"):
            with pytest.raises(AttributeError):
                setattr(step.waiting[0], name, 1)
        serve(step)

    checked(populated(move))


@given(small, limits(), st.integers(0, 2**32))
def test_views_hold_what_they_promise_in_their_order(trace, keys, seed):
    policy = Watching(seed)
    check_streams(run(policy, trace, **keys))


# -- numbers that a policy reads, against what its verbs then do ------------------------------------------------------


@given(small, limits(), st.integers(0, 2**32))
def test_what_a_step_says_is_what_its_verbs_do(trace, keys, seed):
    policy = Surveyor(seed)
    made = lab(policy, sorted(trace, key=lambda spec: spec.arrival_ns), **keys)
    policy.engine = made.engine
    made.finish()
    check_all_tokens(made)


def test_a_grant_clamps_to_the_tokens_left_the_budget_and_the_maximum():
    def move(step):
        r = named(step)
        assert step.grant(r["w1"], 3) == Grant(3)
        assert step.grant(r["p1"], 100) == Grant(8), "what is left"
        assert step.grant(r["d1"], 100) == Grant(1)
        assert step.token_budget == 16 - 3 - 8 - 1
        assert step.grant(r["p2"]) == Grant(4), "what the budget leaves"
        assert step.token_budget == 0
        assert step.grant(r["w2"]) == Grant(0, "budget")
        assert step.fits(r["w2"]) == 0

    checked(populated(move, max_num_batched_tokens=16, max_num_seqs=6))


def test_budget_fits_and_maximum_never_count_the_hit():
    """A hit of 20 tokens is free: a budget of 6 grants the 6 tokens behind it."""
    shared = tuple(range(10))
    trace = [Spec("a", 0, 30, 1, ids=(*shared[:7], 70, 71), id_width=4)]
    trace += [Spec("b", 30 * MS, 40, 1, ids=shared, id_width=4)]
    seen = {}

    def look(step):
        (b,) = step.waiting
        seen["start"], seen["fits"] = step.cached_tokens(b), step.fits(b)
        assert step.blocks_needed(b, 6) == 7 + 2, "the hit's blocks are owned by nobody, and then two more"
        assert step.grant(b, 100) == Grant(6)

    made = lab(Script(*[serve] * 5, look), trace, max_num_batched_tokens=6, max_num_seqs=2)
    made.finish()
    assert seen == {"start": 28, "fits": 6}


@pytest.mark.parametrize("missing", ["slots", "memory", "budget"])
def test_a_refusal_says_why_and_leaves_no_trace(missing):
    limits = {"slots": {"max_num_seqs": 4}, "memory": {"num_blocks": 7}, "budget": {"max_num_batched_tokens": 16}}

    def move(step):
        r = named(step)
        if missing == "budget":
            assert step.grant(r["p1"]) and step.grant(r["p2"])
        before, budget = books(made.engine), step.token_budget
        for request in (r["w1"], r["w2"]):
            assert step.grant(request) == Grant(0, missing)
            assert not step.grant(request, 8), "again, and smaller"
            assert step.fits(request) == (4 if missing == "memory" else 0)
        assert books(made.engine) == before and step.token_budget == budget
        serve(step) if missing != "budget" else None

    made = populated(move, **limits[missing])
    checked(made)


def test_a_hit_that_a_later_grant_evicts_is_gone_when_it_is_read_again():
    """b's hit is two blocks nobody owns; granting c takes the whole pool, so b then starts at 0."""
    trace = [Spec("a", 0, 8, 1, ids=(1, 2), id_width=4)]
    trace += [Spec("b", 30 * MS, 12, 1, ids=(1, 2, 3), id_width=4), Spec("c", 30 * MS, 20, 1)]
    seen = []

    def move(step):
        b, c = step.waiting
        seen.append(step.cached_tokens(b))
        assert step.grant(c)
        seen.append(step.cached_tokens(b))
        assert step.fits(b) == 0

    made = lab(Script(grants(a=None), move), trace, num_blocks=5)
    made.finish()
    assert seen == [8, 0]


def test_reading_a_hit_does_not_touch_its_recency():
    """a and b leave a block each, a's older; reading a's for ever does not save it when one must go."""
    trace = [Spec("a", 0, 4, 1, ids=(1,), id_width=4), Spec("b", 10 * MS, 4, 1, ids=(2,), id_width=4)]
    trace += [Spec(f"{name}2", 20 * MS, 8, 1, ids=(i, 9), id_width=4) for i, name in ((1, "a"), (2, "b"))]
    trace += [Spec("c", 20 * MS, 12, 1)]
    seen = []

    def move(step):
        a2, b2, c = step.waiting
        for _ in range(5):
            step.cached_tokens(b2), step.cached_tokens(a2), step.fits(a2), step.pending_tokens(a2)
        step.grant(c)
        seen.extend([step.cached_tokens(a2), step.cached_tokens(b2)])

    made = lab(Script(serve, serve, move), trace, num_blocks=4)
    made.finish()
    assert seen == [0, 4]


# -- cache_changed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [ChangeReader, StillReader])
@given(trace=small, keys=limits(), seed=st.integers(0, 2**32))
def test_cache_changed_names_exactly_the_waiting_requests_whose_hit_changed(reader, trace, keys, seed):
    run(reader(seed), trace, **keys)
