"""Steps that grant nothing, decisions that stand, and steps that are over: idle_until, hold, stalls, dead steps."""

import math

import pytest
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    JumpingExecutor,
    Script,
    broken,
    checked,
    grants,
    ids,
    lab,
    named,
    populated,
    serve,
)

from schedlab.framework.errors import PolicyError, PolicyStalled
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec

# -- idle, hold, stall ------------------------------------------------------------------------------------------------


ALONE = (Spec("a", 0, 4, 2),)


def idling(*moves, trace=ALONE):
    return lab(Script(*moves), trace)


@pytest.mark.parametrize(
    "wake, until, trace",
    [
        (5 * MS, 0.005, (Spec("a", 0, 4, 2),)),
        (5 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("b", 8 * MS, 4, 2))),
        (3 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("b", 3 * MS, 4, 2))),
        (3 * MS, math.inf, (Spec("a", 0, 4, 2), Spec("b", 3 * MS, 4, 2))),
        (2 * MS, 0.005, (Spec("a", 0, 4, 2), Spec("c", 0, 4, 2, abort_ns=2 * MS), Spec("b", 3 * MS, 4, 2))),
        (2 * MS, math.inf, (Spec("a", 0, 4, 2), Spec("c", 0, 4, 2, abort_ns=2 * MS))),
    ],
)
def test_idling_ends_at_its_time_an_arrival_or_an_abort(wake, until, trace):
    woke = []

    def look(step):
        woke.append(step.now)
        serve(step)

    idling(lambda step: step.idle_until(until), look, trace=trace).finish()
    assert woke == [wake / 1e9]


def test_an_idle_step_grants_nothing():
    broken(lambda step: (step.grant_decodes(), step.idle_until(step.now + 1)), "idle_until")
    broken(lambda step: (step.idle_until(step.now + 1), step.grant(step.prefilling[0])), "idle_until")


@pytest.mark.parametrize("until", [0.0, -1.0, -math.inf])
def test_idling_into_the_past_is_a_stall(until):
    with pytest.raises(PolicyStalled, match="policy Script: idle_until"):
        idling(lambda step: step.idle_until(until)).finish()


def test_idling_for_ever_with_nothing_to_wake_it_is_a_stall():
    with pytest.raises(PolicyStalled, match="never wakes"):
        idling(lambda step: step.idle_until(math.inf)).finish()
    with pytest.raises(PolicyStalled, match="never wakes"):
        idling(lambda step: step.idle_until()).finish()


def test_preemptions_of_an_idle_step_stand_and_are_copied():
    def move(step):
        assert step.preempt(named(step)["d1"], "swap") == "swap"
        step.preempt(named(step)["p1"])
        step.idle_until(step.now + 0.010)

    made = populated(move, swap_space_gib=2 * HOST_BLOCK_GIB)
    began = made.engine.now_ns
    made.step()
    assert made.engine.now_ns == began + 10 * MS
    assert (made["d1"].state, made["p1"].state) == ("swapped", "preempted")
    assert ids(made.engine.ledger.waiting) == ["d1", "p1", "w1", "w2"], "arrival order"
    checked(made)


def test_doing_nothing_is_a_stall_that_names_the_head_and_what_it_lacks():
    made = populated(lambda step: None)
    with pytest.raises(PolicyStalled, match=r"policy Script.*d1.*1 tokens.*2 slots.*18 blocks"):
        made.engine.step()
    waiting = lab(Script(lambda step: None), [Spec("a", 0, 10, 2)])
    with pytest.raises(PolicyStalled, match=r"policy Script.*request a.*10 tokens.*6 slots.*24 blocks"):
        waiting.engine.step()


def test_refusals_alone_are_a_stall():
    def move(step):
        assert not step.grant(step.waiting[0], 0)

    with pytest.raises(PolicyStalled, match="request a"):
        lab(Script(move), [Spec("a", 0, 10, 2)]).engine.step()


def test_preempting_without_granting_or_idling_is_a_stall():
    with pytest.raises(PolicyStalled):
        populated(lambda step: [step.preempt(request) for request in step.running]).engine.step()


HOLDS = {
    "a chunk too": lambda s, r: (s.grant_decodes(), s.grant(r["p1"], 1), s.hold()),
    "an admission too": lambda s, r: (s.grant_decodes(), s.grant(r["w1"], 1), s.hold()),
    "a preemption too": lambda s, r: (s.preempt(r["p1"]), s.grant_decodes(), s.hold()),
    "a decode preempted": lambda s, r: (s.grant_decodes(), s.preempt(r["d2"]), s.hold()),
    "one decode left out": lambda s, r: (s.grant(r["d1"]), s.hold()),
    "only chunks": lambda s, r: (s.grant(r["p1"], 1), s.hold()),
    "said before the chunk": lambda s, r: (s.grant_decodes(), s.hold(), s.grant(r["p1"], 1)),
    "with a time": lambda s, r: (s.grant(r["d1"]), s.hold(s.now + 1)),
    "while idling": lambda s, r: (s.idle_until(s.now + 1), s.hold()),
}


@pytest.mark.parametrize("case", HOLDS)
@pytest.mark.parametrize("honoured", [True, False])
def test_hold_is_legal_only_for_all_of_decoding_and_nothing_else(case, honoured):
    broken(lambda step: HOLDS[case](step, named(step)), "hold", honour_holds=honoured)


def test_idling_with_nobody_decoding_is_no_decision_that_stands():
    with pytest.raises(PolicyError, match="hold"):
        idling(lambda step: (step.idle_until(step.now + 1), step.hold())).engine.step()


@pytest.mark.parametrize("executor", [StubExecutor, JumpingExecutor])
def test_a_held_decision_is_not_asked_again_until_it_ends(executor):
    """Two requests of 5 and 9 tokens: asked for the prefill, the first decode, and after the first finish."""
    asked = []

    def then(step):
        asked.append(step.now)
        step.grant_decodes()
        step.hold()

    trace = [Spec("a", 0, 4, 5), Spec("b", 0, 4, 9)]
    made = lab(Script(grants(a=None, b=None), then=then), trace, executor=executor())
    made.finish()
    assert len(asked) == 2


TWO = (Spec("a", 0, 4, 12), Spec("b", 0, 4, 12))


@pytest.mark.parametrize("executor", [StubExecutor, JumpingExecutor])
def test_a_hold_until_the_end_of_time_is_a_hold_without_a_time(executor):
    """As `idle_until` may be: the earliest of no deadlines is infinity."""
    asked = []

    def then(step):
        asked.append(step.now)
        step.grant_decodes()
        step.hold(until=math.inf)

    lab(Script(grants(a=None), then=then), [Spec("a", 0, 4, 9)], executor=executor()).finish()
    assert len(asked) == 1


ENDS = {  # trace, keys, the times in ms at which the policy is asked, until the hold has ended once
    "until": (TWO, {}, [1.08, 5.16]),
    "until between two boundaries": (TWO, {}, [1.08, 5.16]),
    "arrival": ((*TWO, Spec("c", 4 * MS, 4, 1)), {}, [1.08, 4.14]),
    "abort": ((TWO[0], Spec("b", 0, 4, 12, abort_ns=4 * MS)), {}, [1.08, 4.14]),
    "finish": ((Spec("a", 0, 4, 5), TWO[1]), {}, [1.08, 5.16]),
    "shortage": (TWO, {"num_blocks": 4}, [1.08, 5.16]),
    "eviction of a counted block": (
        (Spec("z", 0, 4, 1, ids=(1,), id_width=4), Spec("a", 0, 4, 12), Spec("w", 0, 8, 1, ids=(1, 2), id_width=4)),
        {"num_blocks": 4, "max_num_seqs": 1},
        [1.04, 2.08, 10.16],
    ),
    "eviction of a block nobody counts": (
        (Spec("z", 0, 4, 1, ids=(1,), id_width=4), Spec("a", 0, 4, 12), Spec("w", 0, 8, 1, ids=(3, 2), id_width=4)),
        {"num_blocks": 4, "max_num_seqs": 1},
        [1.04, 2.08, 2.08 + 11 * 1.01],
    ),
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("executor", [StubExecutor, JumpingExecutor])
def test_a_hold_ends_where_it_must(ends, executor):
    """Steps take 1 ms and 10 us a token: one decode 1.01 ms, two 1.02 ms; two prompts of 4 tokens end at 1.08 ms."""
    trace, keys, times = ENDS[ends]
    until = {"until": 0.00516, "until between two boundaries": 0.0049}.get(ends)
    asked = []

    def then(step):
        asked.append(round(step.now * 1000, 3))
        refused = step.grant_decodes()
        if refused:
            step.preempt(step.decoding[-1])
            step.grant_decodes([request for request in refused if request.state == "running"])
            return
        fitting = [r for r in step.waiting if step.fits(r) == r.num_tokens - step.cached_tokens(r)]
        if not [r for r in fitting if step.fits(r) and step.grant(r)]:
            step.hold(until if until and step.now < until else None)

    first = grants(z=None) if trace[0].name == "z" else grants(a=None, b=None)
    made = lab(Script(first, then=then), trace, executor=executor(), **keys)
    made.finish()
    assert asked[: len(times)] == [pytest.approx(t) for t in times]


# -- a dead step ------------------------------------------------------------------------------------------------------


MEMBERS = {
    "now": lambda s, r: s.now,
    "waiting": lambda s, r: s.waiting,
    "running": lambda s, r: s.running,
    "prefilling": lambda s, r: s.prefilling,
    "decoding": lambda s, r: s.decoding,
    "token_budget": lambda s, r: s.token_budget,
    "free_slots": lambda s, r: s.free_slots,
    "free_blocks": lambda s, r: s.free_blocks,
    "cache_changed": lambda s, r: s.cache_changed,
    "cached_tokens": lambda s, r: s.cached_tokens(r["w1"]),
    "pending_tokens": lambda s, r: s.pending_tokens(r["w1"]),
    "fits": lambda s, r: s.fits(r["w1"]),
    "blocks_needed": lambda s, r: s.blocks_needed(r["w1"], 1),
    "grant": lambda s, r: s.grant(r["d1"]),
    "grant_decodes": lambda s, r: s.grant_decodes(),
    "grant_decodes of none": lambda s, r: s.grant_decodes([]),
    "preempt": lambda s, r: s.preempt(r["d1"]),
    "idle_until": lambda s, r: s.idle_until(1.0),
    "hold": lambda s, r: s.hold(),
}


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("used", [False, True])
def test_a_step_is_dead_after_schedule(member, used):
    """Also for what was read while it lived."""
    kept = []

    def keep(step):
        requests = named(step)
        kept.append((step, requests))
        if used:
            for name in ("running", "cache_changed", "waiting", "prefilling", "decoding"):
                getattr(step, name)
        serve(step)

    def reach_back(step):
        dead, requests = kept[0]
        MEMBERS[member](dead, requests)

    made = populated(keep, reach_back)
    made.step()
    with pytest.raises(PolicyError, match=r"policy Script.*schedule returned"):
        made.engine.step()
