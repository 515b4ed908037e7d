"""The rules of grant, grant_decodes and preempt: what they refuse, what they refund, and the errors that name them."""

import pytest
from scripted import (
    HOST_BLOCK_GIB,
    Script,
    books,
    broken,
    check_all_tokens,
    checked,
    grants,
    ids,
    lab,
    named,
    populated,
    serve,
)

from schedlab.framework.errors import PolicyError
from schedlab.framework.policy import Preempted
from schedlab.framework.step import Grant
from schedlab.framework.testing.harness import Spec

# -- the rules of grant and preempt -----------------------------------------------------------------------------------


TWICE = {
    "chunk, chunk": ("p1", lambda s, r: (s.grant(r["p1"], 2), s.grant(r["p1"], 2))),
    "decode, decode": ("d1", lambda s, r: (s.grant(r["d1"]), s.grant(r["d1"]))),
    "admission, chunk": ("w1", lambda s, r: (s.grant(r["w1"], 2), s.grant(r["w1"], 2))),
    "all, one": ("d2", lambda s, r: (s.grant_decodes(), s.grant(r["d2"]))),
    "all, some": ("d2", lambda s, r: (s.grant_decodes(), s.grant_decodes([r["d2"]]))),
    "one, some": ("d1", lambda s, r: (s.grant(r["d1"]), s.grant_decodes([r["d1"]]))),
    "all, all": ("d1", lambda s, r: (s.grant_decodes(), s.grant_decodes())),
    "one, all": ("d2", lambda s, r: (s.grant(r["d2"]), s.grant_decodes())),
    "all, preemption, all": ("d2", lambda s, r: (s.grant_decodes(), s.preempt(r["d1"]), s.grant_decodes())),
    "all, preemption, one": ("d2", lambda s, r: (s.grant_decodes(), s.preempt(r["d1"]), s.grant(r["d2"]))),
    "preemption, all, one": ("d2", lambda s, r: (s.preempt(r["d1"]), s.grant_decodes(), s.grant(r["d2"]))),
    "chunk, all, one": ("d2", lambda s, r: (s.grant(r["p1"], 1), s.grant_decodes(), s.grant(r["d2"]))),
}


@pytest.mark.parametrize("case", TWICE)
def test_a_second_grant_is_a_policy_error(case):
    name, verbs = TWICE[case]
    broken(lambda step: verbs(step, named(step)), "second grant", name)


@pytest.mark.parametrize("case", TWICE)
def test_what_is_granted_already_fits_no_more(case):
    name, verbs = TWICE[case]
    seen = []

    def move(step):
        requests = named(step)

        class Last:
            """Looks where the second grant would be."""

            def __getattr__(self, verb):
                return lambda *arguments: record(verb, arguments)

        def record(verb, arguments):
            calls.append((verb, arguments))
            return None

        calls = []
        verbs(Last(), requests)
        for verb, arguments in calls[:-1]:
            getattr(step, verb)(*arguments)
        seen.append(step.fits(requests[name]))

    checked(populated(move))
    assert seen == [0]


@pytest.mark.parametrize("name", ["d1", "p1", "w1"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_what_was_preempted_in_a_step_is_not_granted_in_it(name, mode):
    def move(step):
        request = named(step)[name]
        if name == "w1":
            step.grant(request, 2)
        step.preempt(request, mode)
        assert step.fits(request) == 0
        step.grant(request)

    broken(move, "preempted in this step", name, swap_space_gib=8 * HOST_BLOCK_GIB)


def test_only_a_running_request_can_be_preempted():
    broken(lambda step: step.preempt(step.waiting[0]), "only a running request", "w1")


def test_a_request_is_preempted_once_a_step():
    broken(lambda step: [step.preempt(step.decoding[0]) for _ in range(2)], "only a running request", "d1")


def test_a_mode_of_preemption_that_does_not_exist_is_refused():
    broken(lambda step: step.preempt(step.decoding[0], "drop"), "drop", "d1", swap_space_gib=8 * HOST_BLOCK_GIB)


def test_an_admission_is_taken_back_once():
    def move(step):
        w1 = named(step)["w1"]
        step.grant(w1, 2)
        step.preempt(w1)
        step.preempt(w1)

    broken(move, "only a running request", "w1")


@pytest.mark.parametrize("name", ["p1", "w1"])
def test_grant_decodes_takes_decoding_requests_only(name):
    broken(lambda step: step.grant_decodes([named(step)[name]]), "decoding requests only", name)


def test_a_request_that_has_ended_cannot_be_granted():
    kept = []

    def keep(step):
        kept.append(named(step)["d1"])
        serve(step)

    def move(step):
        assert kept[0].state == "aborted"
        assert step.fits(kept[0]) == 0
        step.grant(kept[0])

    made = populated(keep, move)
    made.step()
    made.engine.abort("d1")
    with pytest.raises(PolicyError, match=r"policy Script on request d1: .*aborted"):
        made.engine.step()


class Faulty(Script):
    """Raises where it is told to."""

    def __init__(self, where):
        super().__init__()
        self._where = where

    def schedule(self, step):
        super().schedule(step)
        if self._where == "schedule":
            raise ValueError("first line\nsecond line")

    def observe(self, event):
        if self._where == type(event).__name__:
            raise ValueError("first line\nsecond line")


@pytest.mark.parametrize("where", ["schedule", "Arrived", "Admitted", "Progressed", "Finished", "Aborted"])
def test_what_a_policy_raises_is_one_line_that_names_it(where):
    made = lab(Faulty(where), [Spec("a", 0, 4, 3), Spec("b", 0, 4, 9, abort_ns=3_000_000)])
    with pytest.raises(PolicyError, match=r"policy Faulty: .*ValueError.*test_step_rules\.py") as caught:
        made.engine.run()
    assert "\n" not in str(caught.value)


# -- refunds ----------------------------------------------------------------------------------------------------------


def spare(step):
    return step.token_budget, step.free_slots, step.free_blocks


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(
    "name, grant, blocks_owned",
    [
        ("d1", lambda step, r: step.grant(r["d1"]), 2),
        ("d1", lambda step, r: step.grant_decodes([r["d1"]]), 2),
        ("p1", lambda step, r: step.grant(r["p1"], 7), 1),
        ("p1", lambda step, r: step.grant(r["p1"]), 1),
        ("w1", lambda step, r: step.grant(r["w1"], 7), 0),
        ("w1", lambda step, r: step.grant(r["w1"]), 0),
    ],
)
def test_preemption_refunds_what_this_step_granted(name, grant, blocks_owned, mode):
    """Budget as before; the slot and every block come back, for a running request also those that it had before."""

    def move(step):
        requests = named(step)
        budget, slots, blocks = spare(step)
        assert grant(step, requests) is not None
        assert step.preempt(requests[name], mode) in ("recompute", mode)
        held = name != "w1"
        assert spare(step) == (budget, slots + held, blocks + blocks_owned)
        assert step.grant(requests["w2"])

    checked(populated(move, swap_space_gib=8 * HOST_BLOCK_GIB))


@pytest.mark.parametrize("order", [("all", "d2"), ("d2", "all"), ("all", "d2", "d1"), ("d1", "all", "d2")])
def test_preemption_refunds_the_token_of_a_bulk_decode(order):
    def move(step):
        requests, before = named(step), step.token_budget
        for verb in order:
            step.grant_decodes() if verb == "all" else step.preempt(requests[verb])
        left = 2 - sum(verb != "all" for verb in order)
        assert step.token_budget == before - left
        assert step.grant(requests["w1"])

    checked(populated(move))


def test_a_bulk_decode_after_preemptions_leaves_the_victims_out():
    def move(step):
        step.preempt(step.decoding[0])
        assert step.grant_decodes() == []
        assert step.token_budget == 31

    made = populated(move)
    made.step()
    assert [made[name].num_output_tokens for name in ("d1", "d2")] == [1, 2]
    checked(made)


def test_a_decode_at_a_block_boundary_gives_its_new_block_back():
    """d1 and d2 stand at 8 computed tokens: each next token takes a third block."""

    def move(step):
        blocks = step.free_blocks
        step.grant_decodes()
        assert step.free_blocks == blocks - 2
        step.preempt(named(step)["d2"])
        assert step.free_blocks == blocks - 1 + 2, "its new block and the two it had"

    checked(populated(move))


def test_taking_back_an_admission_leaves_it_waiting_as_it_was():
    def move(step):
        w1 = named(step)["w1"]
        before = books(made.engine)
        assert step.grant(w1) and step.preempt(w1)
        after = books(made.engine)
        for key in ("free", "slots", "copies", "host", "places", "computing", "requests"):
            assert sorted(after[key]) == sorted(before[key]) if key in ("free", "slots") else after[key] == before[key]
        assert w1.num_preemptions == 0 and w1.state == "waiting"
        assert step.grant(named(step)["w2"])

    made = populated(move)
    made.step()
    assert [e for e in made.policy.events if isinstance(e, Preempted)] == [], "it never ran"
    checked(made)


def test_taking_back_a_resumed_swap_leaves_it_swapped_and_uncopied():
    def swap_out(step):
        assert step.preempt(named(step)["d1"], "swap") == "swap"
        assert step.grant_decodes() == []

    def take_back(step):
        d1 = named(step)["d1"]
        assert d1.state == "swapped" and d1.num_computed_tokens == 8
        before = spare(step)
        assert step.cached_tokens(d1) == 8 and step.grant(d1) == Grant(1)
        assert step.preempt(d1) == "swap", "what it had is still on the host"
        assert spare(step) == before and d1.state == "swapped" and d1.num_computed_tokens == 8
        step.grant_decodes()

    made = populated(swap_out, take_back, swap_space_gib=2 * HOST_BLOCK_GIB)
    made.step(2)
    assert made["d1"].num_preemptions == 1
    tables = made.finish()
    check_all_tokens(made)
    assert tables.summary["preemptions/swap"] == 1


@pytest.mark.parametrize("host_blocks, modes", [(0, ["recompute"] * 2), (2, ["swap", "recompute"]), (4, ["swap"] * 2)])
def test_a_swap_into_a_full_host_pool_is_a_counted_recompute(host_blocks, modes):
    def move(step):
        r = named(step)
        assert [step.preempt(r["d1"], "swap"), step.preempt(r["d2"], "swap")] == modes
        step.grant(r["w1"])

    made = populated(move, swap_space_gib=host_blocks * HOST_BLOCK_GIB)
    made.step()
    states = ["swapped" if mode == "swap" else "preempted" for mode in modes]
    assert [made[name].state for name in ("d1", "d2")] == states
    told = [(e.request.request_id, e.mode) for e in made.policy.events if isinstance(e, Preempted)]
    assert told == list(zip(("d1", "d2"), modes, strict=True))
    tables = made.finish()
    check_all_tokens(made)
    assert tables.summary["preemptions/swap"] == modes.count("swap")
    assert tables.summary["preemptions/recompute"] == modes.count("recompute")
    assert tables.decisions["preempted"][2] == [[name, mode] for name, mode in told]


# -- grant_decodes ----------------------------------------------------------------------------------------------------


def decoding_six(*moves, **keys):
    """Six requests of 8 prompt tokens that each stand before their first decode, which takes a block of 4."""
    keys = {"num_blocks": 14, "max_num_batched_tokens": 64, **keys}
    trace = [Spec(f"r{i}", 0, 8, 6) for i in range(6)]
    made = lab(Script(grants(**{spec.name: None for spec in trace}), *moves), trace, **keys)
    made.step()
    return made


def test_grant_decodes_refuses_in_order_what_lacks_a_block():
    def move(step):
        assert step.free_blocks == 2
        assert ids(step.grant_decodes()) == ["r2", "r3", "r4", "r5"]
        assert step.free_blocks == 0 and step.token_budget == 62
        assert ids(step.decoding) == [f"r{i}" for i in range(6)], "refused decodes stay"

    made = decoding_six(move)
    made.step()
    assert [made[f"r{i}"].num_output_tokens for i in range(6)] == [2, 2, 1, 1, 1, 1]
    assert made.tables().decisions["refusals"][1] == [[f"r{i}", "memory"] for i in range(2, 6)]
    checked(made)


def test_who_needs_no_block_is_not_refused_behind_one_who_does():
    """r0 decodes alone first, so it needs no block when only r1 .. r5 do and two are free."""

    def later(step):
        assert step.free_blocks == 1
        assert ids(step.grant_decodes()) == ["r2", "r3", "r4", "r5"]

    made = decoding_six(grants(r0=1), later)
    made.step(2)
    assert [made[f"r{i}"].num_output_tokens for i in range(6)] == [3, 2, 1, 1, 1, 1]
    checked(made)


def test_grant_decodes_refuses_in_order_what_lacks_budget():
    def move(step):
        assert step.grant(named(step)["w"], 5)
        assert ids(step.grant_decodes()) == ["r3"]
        assert step.token_budget == 0

    trace = [Spec(f"r{i}", 0, 2, 6) for i in range(4)] + [Spec("w", 0, 12, 2)]
    first = grants(r0=None, r1=None, r2=None, r3=None)
    made = lab(Script(first, move), trace, max_num_batched_tokens=8)
    made.step(2)
    assert [made[f"r{i}"].num_output_tokens for i in range(4)] == [2, 2, 2, 1]
    assert made.tables().decisions["refusals"][1] == [["r3", "budget"]]
    checked(made)


def test_grant_decodes_of_some_decodes_these_in_their_order():
    def move(step):
        r = named(step)
        assert step.grant_decodes([r["r4"], r["r1"]]) == []

    made = decoding_six(move, num_blocks=20)
    made.step()
    assert made.tables().decisions["decodes"][1] == ["r4", "r1"]
    checked(made)


def test_grant_decodes_never_preempts():
    def move(step):
        for request in step.grant_decodes():
            assert request.state == "running" and request.num_preemptions == 0

    checked(decoding_six(move))


def test_the_batch_has_the_order_of_the_grants():
    def move(step):
        r = named(step)
        for name in ("p2", "d2", "w1", "d1", "p1"):
            assert step.grant(r[name], 2)

    made = populated(move)
    made.step()
    rest = made.tables().decisions
    order, at = [name for name, _ in rest["grants"][2]], rest["decodes_at"][2]
    assert order[:at] + list(rest["decodes"][2]) + order[at:] == ["p2", "d2", "w1", "d1", "p1"]
    checked(made)
