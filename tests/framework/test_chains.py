"""Several steps of a held decision as one boundary: the same tokens, and what a chain may and may not run past."""

import math
from dataclasses import replace

import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, JumpingExecutor, Script, ScriptedExecutor, grants, interpreted_only, lab

from schedlab.framework import chain
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import StepResult
from schedlab.framework.policy import Finished, Progressed
from schedlab.framework.request import SamplingParams
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs


def stand(step):
    """All decodes, and if there is nobody else, for as long as it goes."""
    step.grant_decodes()
    for request in step.waiting:
        step.grant(request, step.fits(request))
    if not step.waiting and not step.prefilling:
        step.hold()


def standing(trace, steps, *, executor=None, **keys):
    """The trace under a policy that admits at once and holds, after its end."""
    made = lab(Script(then=stand), trace, executor=executor or StubExecutor(), max_chained_steps=steps, **keys)
    return made, made.finish()


# -- tokens -----------------------------------------------------------------------------------------------------------


@given(specs(), limits(), st.sampled_from([2, 4, 8]), st.sampled_from(list(ALL)))
def test_every_policy_gives_every_request_its_tokens(trace, keys, steps, name):
    check_streams(run(ALL[name](), trace, max_chained_steps=steps, **keys))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block_size", [1, 4])
def test_chains_happen_and_give_the_tokens_of_single_steps(name, block_size):
    trace = [Spec(f"r{i}", 30 * i * MS, 9 + i, 20 + 3 * i) for i in range(6)]
    keys = {"block_size": block_size, "num_blocks": 200 // block_size}
    single, *chained = (run(ALL[name](), trace, max_chained_steps=steps, **keys) for steps in (1, 4, 8))
    for outcome in chained:
        assert outcome.streams == single.streams
        assert max(outcome.tables.steps["repeat"]) == outcome.engine.config.max_chained_steps
        assert sum(outcome.tables.steps["repeat"]) == outcome.engine.num_steps
        check_streams(outcome)


def test_a_chain_that_computes_a_wrong_slot_is_found_out(monkeypatch):
    from schedlab.framework.batch import Inputs

    following = Inputs.following
    wrong = lambda self, *given: replace(following(self, *given), slots_T=self.slots_T)  # noqa: E731
    monkeypatch.setattr(Inputs, "following", wrong)
    with pytest.raises(AssertionError):
        check_streams(run(ALL["fcfs"](), [Spec("r", 0, 9, 20)], max_chained_steps=4))


# -- length -----------------------------------------------------------------------------------------------------------


def lengths(tables):
    """The lengths of the boundaries of decode-only steps, in order."""
    steps = tables.steps
    return [int(n) for n, prefills in zip(steps["repeat"], steps["prefill_requests"], strict=True) if not prefills]


def test_a_chain_ends_with_the_step_in_which_somebody_finishes():
    made, tables = standing([Spec("a", 0, 8, 7), Spec("b", 0, 8, 12)], 4)
    assert lengths(tables) == [4, 2, 4, 1]  # a emits 6 tokens after its first one, then b goes on
    assert [made[name].num_output_tokens for name in "ab"] == [7, 12]


def test_a_chain_ends_before_a_step_that_lacks_a_block():
    """8 + 7 tokens each need 4 blocks each of 4 tokens; with 7 blocks, the fourth of the second one is missing."""

    def make_room(step):
        if refused := step.grant_decodes():
            step.preempt(refused[-1])
        elif step.waiting and len(step.running) < 1:
            step.grant(step.waiting[0])
        elif step.decoding:
            step.hold()

    policy = Script(grants(a=None, b=None), then=make_room)
    made = lab(policy, [Spec("a", 0, 8, 12), Spec("b", 0, 8, 12)], num_blocks=7, max_chained_steps=8)
    tables = made.finish()
    assert lengths(tables)[0] == 4  # positions 8 to 11, for which the third blocks are there
    assert tables.summary["preemptions/recompute"] == 1


@pytest.mark.parametrize("sampling, chained", [(None, 1), ((False, ()), 1), ((True, ()), 4), ((True, (7,)), 1)])
def test_a_live_request_is_chained_only_where_no_token_can_end_it(sampling, chained):
    requests = [replace(Spec("a", 0, 8, 20), live=True).request(), Spec("b", 0, 8, 20).request()]
    if sampling is not None:
        requests[0].sampling = SamplingParams(ignore_eos=sampling[0], stop_token_ids=sampling[1])
    _, tables = standing(requests, 4)
    assert max(lengths(tables)) == chained


def test_a_decision_that_is_not_held_is_one_step():
    made = lab(Script(), [Spec("a", 0, 8, 20)], max_chained_steps=4)
    assert set(made.finish().steps["repeat"]) == {1}


def test_an_executor_that_cannot_chain_is_refused():
    class Plain(ScriptedExecutor):
        chains = False

    with pytest.raises(ConfigError, match="max_chained_steps: expected 1, as Plain runs one step at a time"):
        lab(Script(), [], executor=Plain(1), max_chained_steps=2)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_chain_has_at_least_one_step(steps):
    with pytest.raises(ConfigError, match="max_chained_steps"):
        lab(Script(), [], max_chained_steps=steps)


# -- the boundary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_arrivals_aborts_and_until_wait_for_the_end_of_the_chain(fast):
    """1 ms a step of one decode (but 10 us a token and 1/4 ms further ones): chains of 4 take 1.7675 ms."""
    trace = [Spec("a", 0, 8, 40), Spec("late", round(2.9 * MS), 8, 2), Spec("gone", 0, 8, 40, abort_ns=5 * MS)]
    made, tables = standing(trace, 4, executor=JumpingExecutor(), fast_forward=fast)
    first_ns = made["a"]._first_token_ns
    chain_ns = [int(ns) for ns, n in zip(tables.steps["now_ns"], tables.steps["repeat"], strict=True) if n > 1]
    ends = {
        int(now + duration) for now, duration in zip(tables.steps["now_ns"], tables.steps["duration_ns"], strict=True)
    }
    assert chain_ns[0] == first_ns < 2.9 * MS < made["late"].first_scheduled_ns
    assert made["late"].first_scheduled_ns in ends and made["gone"].finished_ns in ends
    assert made["gone"].finished_ns > 5 * MS


def test_the_tokens_of_a_chain_become_visible_at_its_end():
    """The gap of the first is that since the last boundary, those of the others are 0; the sum is the time it took."""
    made, tables = standing([Spec("a", 0, 8, 9)], 4)  # 1 prefill, two chains of 4
    gap_ns = 4 * 1_010_000
    assert tables.summary["itl/max"] == pytest.approx(gap_ns / 1e9)
    assert tables.summary["itl/p50"] == 0 and tables.summary["itl/mean"] == pytest.approx(gap_ns / 4e9)
    assert made["a"].finished_ns - made["a"]._first_token_ns == 2 * gap_ns
    assert tables.summary["tpot/mean"] == pytest.approx(gap_ns / 4e9)


def test_progress_is_told_once_with_its_steps():
    made, _ = standing([Spec("a", 0, 8, 9)], 4)
    told = [(event.steps, len(event.decodes)) for event in made.policy.events if isinstance(event, Progressed)]
    assert told == [(1, 0), (4, 1), (4, 1)]
    assert isinstance(made.policy.events[-1], Finished)


@pytest.mark.parametrize("fast", [True, False])
def test_rows_are_one_a_boundary_and_the_digest_counts_steps(fast):
    trace = [Spec("a", 0, 8, 30), Spec("b", 0, 8, 21)]
    _, single = standing(trace, 1, executor=JumpingExecutor(), fast_forward=False)
    _, chained = standing(trace, 4, executor=JumpingExecutor(), fast_forward=fast)
    assert chained.digest == single.digest, "nothing happens on the way, so that the same is decided"
    assert chained.summary["steps"] == single.summary["steps"] == chained.steps["repeat"].sum()
    assert chained.summary["makespan_s"] < single.summary["makespan_s"], "a chain saves time of the host's"
    if not fast:
        assert [n for n in lengths(chained) if n != 4] == [1]  # a's 29 and b's 20 steps after the first tokens


def test_a_request_that_fails_within_a_chain_keeps_what_it_had():
    class Failing(StubExecutor):
        def execute(self, batch):
            result = super().execute(batch)
            if batch.steps > 1 and len(batch.decodes) == 2:
                result.tokens[1, 2:] = -1
                return StepResult(result.duration_ns, result.tokens, failed={1: "no number"})
            return result

    made, _ = standing([Spec("a", 0, 8, 9), Spec("b", 0, 8, 9)], 4, executor=Failing())
    assert (made["b"].state, made["b"].reason, made["b"].num_output_tokens) == ("failed", "no number", 1)
    assert made["a"].state == "finished" and made["a"].num_output_tokens == 9


# -- mutants: each rule ignored ---------------------------------------------------------------------------------------

MUTANTS = {
    "a finish": (chain.Chains, "take", lambda real: lambda self: self.limit()),
    "a live request": (chain, "ends_by_length", lambda real: lambda request: True),
    "an arrival is seen in the middle": (chain.Chains, "take", lambda real: lambda self: 1),
}


@interpreted_only
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_chain_that_ignores_a_rule_is_found_out(mutant, monkeypatch):
    module, name, make = MUTANTS[mutant]
    monkeypatch.setattr(module, name, make(getattr(module, name)))
    with pytest.raises(AssertionError):
        test_a_chain_ends_with_the_step_in_which_somebody_finishes()
        test_a_live_request_is_chained_only_where_no_token_can_end_it(None, 1)
        test_arrivals_aborts_and_until_wait_for_the_end_of_the_chain(True)
        test_rows_are_one_a_boundary_and_the_digest_counts_steps(True)


def test_a_hold_ends_at_the_first_boundary_at_or_after_its_time():
    def until(step):
        step.grant_decodes()
        step.hold(until=0.0065)

    calls = []
    policy = Script(
        grants(a=None), then=lambda step: (calls.append(step.now), until(step) if step.now < 0.0065 else stand(step))
    )
    lab(policy, [Spec("a", 0, 8, 30)], max_chained_steps=4).finish()
    assert len(calls) >= 2 and calls[1] >= 0.0065 and math.isclose(calls[1], 1.08e-3 + 8 * 1.01e-3)
