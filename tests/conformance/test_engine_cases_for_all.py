"""Known ways in which serving engines go wrong, tried on every policy that `policy=` offers.

The engine's own part of them is in tests/framework/test_engine_*.py.
"""

from dataclasses import replace
from functools import cache

import pytest

from schedlab.experiments.policy import maker, options
from schedlab.experiments.run.compose import compose
from schedlab.framework.policy import Policy
from schedlab.framework.testing.behaviour import behave
from schedlab.framework.testing.case import Guess, Subject
from schedlab.framework.testing.harness import run
from schedlab.testing import Case, Spec, check_streams

MS = 1_000_000
NAMES = [option.name for option in options() if option.target.startswith("schedlab.policies.")]
BY_SERVICE = ("multilevel_feedback", "program_las", "fastserve", "sglang_lpm")
LOOK_AT_NEWCOMERS = ("shedding", "srpt", "fastserve")
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
    if name not in ("multilevel_feedback", "fastserve"):  # which take turns by design, a quantum at a time
        assert not any(request.num_preemptions for request in outcome.requests)


@all_policies
def test_many_equal_prompts_in_one_step_are_kept_once(name):
    trace = [Spec(f"r{i}", 0, 33, 4, ids=tuple(range(9)), id_width=4) for i in range(5)]
    outcome = served(name, trace, num_blocks=80)
    assert len({tuple(stream) for stream in outcome.streams.values()}) == 1


@all_policies
def test_a_live_answer_that_outgrows_the_pool_is_capped_and_the_others_live(name):
    """40 slots hold the prompt and 24 generated tokens; the 25th is emitted and has no place left."""
    trace = [Spec("it", 0, 16, 1000, live=True), Spec("b", 5 * MS, 12, 6), Spec("c", 9 * MS, 12, 6)]
    outcome = behave(Subject(of(name)), Case(tuple(trace), {"num_blocks": 10}))
    it = outcome.by_name["it"]
    assert it.state == "length_capped" and it.num_output_tokens == 25
    assert {outcome.by_name[other].state for other in "bc"} == {"finished"}


@all_policies
def test_what_can_never_fit_stops_nobody(name):
    trace = [Spec("a", 0, 20, 4), Spec("huge", 0, 97, 1), Spec("b", 0, 20, 4), Spec("vast", 0, 90, 200)]
    outcome = behave(Subject(of(name)), Case(tuple(trace)))
    states = {spec.name: outcome.by_name[spec.name].state for spec in trace}
    assert states == {"a": "finished", "huge": "rejected", "b": "finished", "vast": "rejected"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in BY_SERVICE])
def test_a_preempted_request_keeps_its_place(name):
    """Equal requests that outgrow the pool: nobody is admitted before one that came earlier and was thrown out.

    Under those of BY_SERVICE what a request was served decides who makes way: that is their rule.
    """
    trace = [Spec(f"r{i:02d}", i * MS, 12, 20) for i in range(12)]
    outcome = served(name, trace, num_blocks=20, max_num_seqs=5)
    rows = outcome.tables.decisions
    running, thrown_out, times = set(), set(), 0
    for preempted, granted in zip(rows["preempted"], rows["grants"], strict=True):
        victims = {who for who, _ in preempted}
        new = {who for who, _ in granted} - running
        assert not new or max(new) < min(thrown_out - new, default="s"), f"{new} before {thrown_out}"
        running, thrown_out = (running | new) - victims, (thrown_out - new) | victims
        times += len(victims)
    assert times or name in ("orca", "static_batching"), "nobody was thrown out"


class Watched:
    """A step that notes which requests it is asked about, each with its state then."""

    def __init__(self, step):
        self.step = step
        self.seen = set()

    def __getattr__(self, name):
        found = getattr(self.step, name)
        if name not in ("cached_tokens", "pending_tokens", "blocks_needed", "fits", "grant"):
            return found

        def asked(request, *args, **kwargs):
            self.seen.add((request.request_id, request.state))
            return found(request, *args, **kwargs)

        return asked


class Counting(Policy):
    """Hands calls on, counting the waiting requests that are looked up in steps that running ones use up."""

    def __init__(self, policy):
        self.policy = policy
        self.needs_prediction = policy.needs_prediction
        self.full = self.looked_up = 0

    def observe(self, event):
        self.policy.observe(event)

    def schedule(self, step):
        need = len(step.decoding) + sum(r.num_tokens - r.num_computed_tokens for r in step.prefilling)
        full = need >= step.token_budget and step.free_slots > 0
        watched = Watched(step)
        self.policy.schedule(watched)
        if full:
            self.full += 1
            self.looked_up = max(self.looked_up, sum(state != "running" for _, state in watched.seen))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOOK_AT_NEWCOMERS])
def test_a_used_up_budget_ends_the_scan(name):
    """A long prompt takes all that the decodes leave, with slots and blocks to spare for a queue of twenty: no more
    than its head is looked up, whatever the order of the queue.

    Those of LOOK_AT_NEWCOMERS look at everybody who arrives, once: `shedding` to see who would come too late, `srpt`
    who has less left than those that run; `fastserve` serves newcomers before a long prompt.
    """
    policy = Counting(of(name)())
    trace = [Spec(f"d{i}", 0, 3, 40) for i in range(4)] + [Spec("long", MS, 240, 2)]
    trace += [Spec(f"w{i}", 4 * MS, 8, 1) for i in range(20)]
    keys = {"max_num_batched_tokens": 26, "max_num_seqs": 26, "num_blocks": 200}
    outcome = run(policy, trace, predictor=Guess(), honour_holds=False, **keys)
    check_streams(outcome)
    assert policy.full > 3 and policy.looked_up <= 1
