"""Between two steps: commit, aborts, arrivals, in this order; aborts in every state."""

import pytest
from four import FOUR
from hypothesis import given
from scripted import (
    HOST_BLOCK_GIB,
    MS,
    PART,
    Script,
    Told,
    check_all_tokens,
    grants,
    heard,
    lab,
    named,
    serve,
)

from schedlab.framework.policy import Aborted, Arrived, Finished
from schedlab.framework.testing.harness import Spec, run
from schedlab.framework.testing.strategies import limits, specs

# -- order at a boundary ----------------------------------------------------------------------------------------------


def test_a_finish_beats_an_abort_at_the_same_boundary():
    """The only step ends at 1.04 ms; the abort is due within it, or exactly at its end."""
    for abort_ns in (1, 500_000, 1_040_000):
        made = lab(Script(), [Spec("a", 0, 4, 1, abort_ns=abort_ns)])
        tables = made.finish()
        assert made["a"].state == "finished" and made["a"].num_output_tokens == 1
        assert heard(made, Finished, Aborted) == [("Finished", "a")]
        assert tables.summary["requests/aborted"] == 0


def test_a_finish_beats_an_abort_by_name_at_the_same_boundary():
    made = lab(Script(lambda step: (serve(step), made.engine.abort("a"))), [Spec("a", 0, 4, 1)])
    made.finish()
    assert made["a"].state == "finished"


def test_an_abort_due_at_a_boundary_comes_before_the_arrivals_of_that_boundary():
    """b arrives when a is withdrawn; with one slot it can run in that very step."""
    at = 1_040_000
    made = lab(Script(), [Spec("a", 0, 4, 5, abort_ns=at), Spec("b", at, 4, 1)], max_num_seqs=1)
    made.finish()
    assert heard(made, Aborted, Arrived) == [("Arrived", "a"), ("Aborted", "a"), ("Arrived", "b")]
    assert made["b"].first_scheduled_ns == at


def test_a_step_never_contains_a_request_that_arrived_after_it_began():
    made = lab(Script(), [Spec("a", 0, 4, 3), Spec("early", 1_040_000, 4, 1), Spec("late", 1_040_001, 4, 1)])
    made.finish()
    assert made["early"].first_scheduled_ns == 1_040_000, "an arrival at the boundary is in its step"
    assert made["late"].first_scheduled_ns == 1_040_000 + 1_000_000 + 10_000 * 5


@PART
@given(specs(), limits())
def test_no_stamp_precedes_its_cause(trace, keys):
    outcome = run(FOUR["chunked_prefill"](), trace, **keys)
    steps = outcome.tables.steps
    boundaries = set(steps["now_ns"].tolist())
    for request in outcome.requests:
        if request.first_scheduled_ns is not None:
            assert request.visible_ns <= request.first_scheduled_ns and request.first_scheduled_ns in boundaries
        if request._first_token_ns is not None:
            assert request.first_scheduled_ns < request._first_token_ns <= request.finished_ns
        assert request.finished_ns >= request.visible_ns


def test_requests_of_one_instant_keep_the_order_of_the_trace():
    names = ["m", "b", "z", "a", "k"]
    made = lab(Script(), [Spec(name, MS, 4, 1) for name in names])
    made.finish()
    assert [name for _, name in heard(made, Arrived)] == names


def test_the_events_of_a_commit_come_in_order():
    """Preempted, Admitted, Progressed, then Finished in batch order, then Aborted, then Arrived."""

    def move(step):
        r = named(step)
        step.preempt(r["p2"])
        assert step.grant(r["w1"]) and step.grant(r["d2"]) and step.grant(r["d1"])

    trace = [Spec("d1", 0, 8, 2), Spec("d2", 0, 8, 2), Spec("p2", 0, 12, 4), Spec("w1", 0, 10, 1)]
    trace += [Spec("gone", 0, 8, 1, abort_ns=2_200_000), Spec("new", 2_200_000, 4, 1)]
    made = lab(Script(grants(d1=None, d2=None, p2=4), move), trace)
    made.step(3)
    assert [type(e).__name__ for e in made.policy.events if not isinstance(e, Arrived)][4:8] == [
        "Preempted",
        "Admitted",
        "Progressed",
        "Finished",
    ]
    after = [type(e).__name__ for e in made.policy.events]
    last = after[after.index("Preempted") :]
    assert last[:8] == ["Preempted", "Admitted", "Progressed", *["Finished"] * 3, "Aborted", "Arrived"]
    assert [name for _, name in heard(made, Finished)][:3] == ["w1", "d2", "d1"], "batch order"


def test_a_successor_without_think_time_is_in_the_next_step():
    """A closed loop: turn 2 becomes visible at the instant at which turn 1 finished."""
    turns = [Spec("one", 0, 4, 2).request(), Spec("two", 0, 4, 2).request()]
    source = Told(turns[:1], after={"one": turns[1]})
    made = lab(Script(), [*turns, other := Spec("other", 0, 4, 9).request()], source=source)
    source.add(other)
    made.finish()
    assert made["two"].visible_ns == made["one"].finished_ns == made["two"].first_scheduled_ns


@pytest.mark.parametrize("end", ["rejected", "aborted before it was visible"])
def test_a_successor_of_what_ends_on_arrival_is_in_the_same_step(end):
    """It arrives at this boundary too: `arrival <= now` comes before `schedule`."""
    it = Spec("it", 2_050_000, 4, 2).request()
    if end == "rejected":
        it = Spec("it", 2_050_000, 500, 2).request()
    else:
        it.abort_ns = 1_000
    follower = Spec("follower", 0, 4, 2).request()
    other = Spec("other", 0, 4, 9).request()
    source = Told([other, it], after={"it": follower})
    made = lab(Script(), [other, it, follower], source=source)
    made.finish()
    assert follower.visible_ns == it.finished_ns == 2_050_000
    assert follower.first_scheduled_ns == 2_050_000


def test_a_request_submitted_by_hand_is_in_the_next_step_and_ends_a_hold():
    asked = []

    def stand(step):
        asked.append(step.now)
        step.grant_decodes()
        if step.waiting:
            step.grant(step.waiting[0])
        else:
            step.hold()

    made = lab(Script(grants(a=None), then=stand), [Spec("a", 0, 4, 12)])
    made.step(4)
    assert len(asked) == 1
    made.engine.submit(by_hand := Spec("b", 0, 4, 2).request())
    made.step()
    assert len(asked) == 2 and by_hand.first_scheduled_ns == asked[1] * 1e9
    made.finish()


# -- aborts in every state --------------------------------------------------------------------------------------------


def swap_out(step):
    assert step.preempt(named(step)["it"], "swap") == "swap"
    step.grant(named(step)["other"])


def throw_out(step):
    step.preempt(named(step)["it"])
    step.grant_decodes()


ABORTS = {  # moves, then the state and the number of tokens in which the abort finds the request
    "waiting": ([grants(other=None)], "waiting", 0),
    "within its prompt": ([grants(it=4, other=None)], "running", 0),
    "after its prompt": ([grants(it=None, other=None)], "running", 1),
    "decoding": ([grants(it=None, other=None), grants(it=1), grants(it=1)], "running", 3),
    "preempted": ([grants(it=None, other=None), throw_out], "preempted", 1),
    "swapped": ([grants(it=None, other=None), swap_out], "swapped", 1),
    "resumed from swap": ([grants(it=None, other=None), swap_out, grants(it=1)], "running", 2),
    "swapped within its prompt": ([grants(it=6, other=None), swap_out], "swapped", 0),
}


@pytest.mark.parametrize("case", ABORTS)
@pytest.mark.parametrize("by", ["name", "time", "a time just before"])
@pytest.mark.parametrize("prefix", [None, (1, 2, 3)])
def test_an_abort_in_any_state_gives_everything_back_once(case, by, prefix):
    moves, state, emitted = ABORTS[case]

    def built(abort_ns=None):
        it = Spec("it", 0, 10, 20, ids=prefix, id_width=4, abort_ns=abort_ns)
        trace = [it, Spec("other", 0, 8, 6), Spec("sharing", 0, 10, 3, ids=prefix, id_width=4)]
        source = Told([spec.request() for spec in trace])
        made = lab(Script(*moves), source.requests, source=source, swap_space_gib=4 * HOST_BLOCK_GIB)
        made.step(len(moves))
        assert (made["it"].state, made["it"].num_output_tokens) == (state, emitted)
        return made, source

    made, source = built()
    if by == "name":
        made.engine.abort("it")
    else:
        made, source = built(made.engine.now_ns - (by == "a time just before"))
    made.step()
    assert made["it"].state == "aborted" and made["it"].num_output_tokens == emitted
    made.engine.abort("it")  # again, and in vain
    tables = made.finish()
    check_all_tokens(made)
    assert source.told == {"it": 1, "other": 1, "sharing": 1}
    assert heard(made, Aborted) == [("Aborted", "it")] and ("Finished", "it") not in heard(made, Finished)
    assert tables.summary["requests/aborted"] == 1 and tables.summary["requests/finished"] == 2
    assert len(made["it"].output_token_ids) == emitted, "a token after the abort, or one lost"


def test_an_abort_before_it_is_visible_is_never_scheduled():
    request = Spec("it", 0, 4, 3).request()
    request.visible_ns, request.abort_ns = 5 * MS, 2 * MS
    made = lab(Script(), [Spec("a", 0, 4, 9), request])
    made.finish()
    assert made["it"].state == "aborted" and made["it"].first_scheduled_ns is None
    assert made["it"].num_output_tokens == 0


def test_an_abort_of_nobody_is_ignored():
    made = lab(Script(), [Spec("a", 0, 4, 3)])
    made.engine.abort("nobody")
    made.step()
    made.engine.abort("nobody")
    assert made.finish().summary["requests/finished"] == 1


def test_aborts_alone_can_empty_the_engine():
    made = lab(Script(), [Spec(f"r{i}", 0, 10, 9, abort_ns=MS + i) for i in range(4)], max_num_seqs=2)
    assert made.finish().summary["requests/aborted"] == 4
