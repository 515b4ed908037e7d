"""Known ways in which serving engines go wrong, tried on every policy that `policy=` offers.

The engine's own part of them is in tests/framework/test_engine_*.py.
"""

from dataclasses import replace
from functools import cache

import pytest

from schedlab.experiments.compose import compose
from schedlab.experiments.policy import maker, options
from schedlab.framework.policy import Policy
from schedlab.framework.testing.behaviour import behave
from schedlab.framework.testing.case import Guess, Subject
from schedlab.framework.testing.harness import run
from schedlab.testing import Case, Spec, check_streams

MS = 1_000_000
NAMES = [option.name for option in options() if option.origin == "schedlab" and option.name != "custom"]
all_policies = pytest.mark.parametrize("name", NAMES)


@cache
def of(name):
    return maker(compose([f"policy={name}"]).policy)


def served(name, trace, **engine):
    """Run the trace watched and audited; every request that was not aborted has finished."""
    outcome = behave(Subject(of(name)), Case(tuple(trace), engine))
    for spec in trace:
        assert outcome.by_name[spec.name].state == "finished" or spec.abort_ns is not None
    assert outcome.engine.ledger.cache.num_free == outcome.engine.config.num_blocks
    return outcome


@all_policies
def test_a_prompt_above_the_step_budget_is_served(name):
    served(name, [Spec("long", 0, 70, 3), Spec("short", 0, 4, 3)], max_num_batched_tokens=8)


@all_policies
def test_a_prompt_of_the_whole_pool_is_served_among_others(name):
    """One that fits only when nobody else runs, behind and before small ones."""
    trace = [Spec(f"s{i}", i * MS, 8, 6) for i in range(6)]
    trace.insert(2, Spec("whole", MS, 90, 7))
    served(name, trace)


@all_policies
def test_a_pool_for_one_answer_serves_several(name):
    """Alone each takes the whole pool at its end: no deadlock of half-computed ones."""
    served(name, [Spec(f"r{i}", 0, 40, 57) for i in range(3)])


@all_policies
def test_an_abort_at_any_time_gives_everything_back(name):
    """Two thirds of a crowd are aborted at once, whatever state they are in then; with and without a host pool."""
    for at in range(3, 40, 12):
        trace = [Spec(f"r{i}", i * MS, 20, 16, ids=(0, 1, 100 + i)) for i in range(7)]
        trace = [replace(spec, abort_ns=at * MS if i % 3 else None) for i, spec in enumerate(trace)]
        served(name, trace, num_blocks=16, swap_space_gib=60 * 32 / 2**30 if at in (15, 39) else 0.0)


@all_policies
def test_equal_requests_of_equal_priority_never_take_turns(name):
    """Full slots and a queue of equals: who runs, runs on."""
    trace = [Spec(f"r{i}", i * MS, 12, 20, priority=3) for i in range(8)]
    outcome = served(name, trace, max_num_seqs=2, num_blocks=60)
    if name != "multilevel_feedback":  # which takes turns by design, a quantum at a time
        assert not any(request.num_preemptions for request in outcome.requests)


@all_policies
def test_many_equal_prompts_in_one_step_are_kept_once(name):
    trace = [Spec(f"r{i}", 0, 33, 4, ids=tuple(range(9)), id_width=4) for i in range(5)]
    outcome = served(name, trace, num_blocks=80)
    assert len({tuple(stream) for stream in outcome.streams.values()}) == 1


class Counting(Policy):
    """Hands calls on, counting lookups of waiting requests in steps that decodes have used up."""

    def __init__(self, policy):
        self.policy = policy
        self.needs_prediction = policy.needs_prediction
        self.full = self.lookups = 0

    def observe(self, event):
        self.policy.observe(event)

    def schedule(self, step):
        full = len(step.decoding) >= step.token_budget
        real, seen = step._ledger.start_of, []
        step._ledger.start_of = lambda request: (seen.append(request.state), real(request))[1]
        try:
            self.policy.schedule(step)
        finally:
            del step._ledger.start_of
        if full:
            self.full += 1
            self.lookups = max(self.lookups, sum(state != "running" for state in seen))


@pytest.mark.parametrize("name", ["fcfs", "chunked_prefill", "decode_priority", "prefix_reuse"])
def test_a_used_up_budget_ends_the_scan(name):
    """Six decodes take a budget of six: no more than the head of a queue of thirty is looked up."""
    policy = Counting(of(name)())
    trace = [Spec(f"d{i}", 0, 4, 20) for i in range(6)] + [Spec(f"w{i}", 15 * MS, 8, 1) for i in range(30)]
    outcome = run(policy, trace, predictor=Guess(), max_num_batched_tokens=6, max_num_seqs=6, honour_holds=False)
    check_streams(outcome)
    assert policy.full > 3 and policy.lookups <= (30 if name == "prefix_reuse" else 1)
