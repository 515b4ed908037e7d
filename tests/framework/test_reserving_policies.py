"""What static_batching and orca claim, which reserve memory for whole answers: batches to their end, whole prompts."""

import pytest
from hypothesis import given
from scripted import MS, PART, lab, log

from schedlab.framework.testing.harness import Spec, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.fcfs import FCFS
from schedlab.policies.orca import Orca
from schedlab.policies.static_batching import StaticBatching


def live(name, arrival_ns, prompt, output, **more):
    """Its max_tokens is what it generates, as a cautious client would say."""
    return Spec(name, arrival_ns, prompt, output, live=True, **more)


def test_static_batching_runs_a_batch_to_its_end_before_the_next():
    trace = [live(f"r{i}", 0, 4, 2 + 3 * (i % 3)) for i in range(7)]
    steps = log(StaticBatching(batch_size=3), trace, max_num_batched_tokens=64)
    started = [[name for name, _, _ in prefills] for prefills, _ in steps if prefills]
    assert started == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]
    assert [len(decodes) for _, decodes in steps[1:8]] == [3, 2, 2, 2, 1, 1, 1]


def test_static_batching_computes_all_prompts_before_any_decode():
    trace = [live(f"r{i}", 0, 10, 3) for i in range(4)]
    steps = log(StaticBatching(batch_size=4), trace, max_num_batched_tokens=16)
    assert [bool(prefills) for prefills, _ in steps] == [True] * 3 + [False] * 2


def test_static_batching_wastes_slots_that_iteration_level_scheduling_uses():
    trace = [live(f"r{i:02d}", 0, 6, 2 + 9 * (i % 4)) for i in range(24)]
    keys = {"max_num_seqs": 4, "num_blocks": 400, "max_num_batched_tokens": 64}
    waste = {p: lab(p(), trace, **keys).finish().summary["batch/idle_slot_share"] for p in (StaticBatching, Orca)}
    assert waste[StaticBatching] > 0.3 > 2 * waste[Orca]


def test_orca_mixes_whole_prompts_with_decodes():
    trace = [live("a", 0, 6, 6), live("b", MS, 10, 3), live("c", MS, 8, 2)]
    assert log(Orca(), trace)[:3] == [([("a", 0, 6)], []), ([("b", 0, 10)], ["a"]), ([("c", 0, 8)], ["a", "b"])]
    assert log(FCFS(), trace)[1] == ([("b", 0, 10)], []), "fcfs never mixes"


def test_orca_waits_for_a_step_of_its_own_with_a_prompt_of_the_whole_budget():
    steps = log(Orca(), [live("a", 0, 6, 4), live("b", MS, 16, 2)])
    assert [prefills for prefills, _ in steps if prefills] == [[("a", 0, 6)], [("b", 0, 16)]]


@PART
@given(specs(max_requests=10, max_prompt=40, max_output=30), limits())
def test_orca_never_preempts_and_never_splits_what_fits_a_step(trace, keys):
    trace = [live(s.name, s.arrival_ns, s.prompt, s.output, ids=s.ids, id_width=s.id_width) for s in trace]
    outcome = run(Orca(), trace, **keys)
    assert all(r.num_preemptions == 0 for r in outcome.requests)
    chunks = {r.request_id: 0 for r in outcome.requests}
    for row in outcome.tables.decisions["grants"]:
        for name, _ in row:
            chunks[name] += 1
    budget = keys["max_num_batched_tokens"]
    assert all(chunks[r.request_id] <= 1 for r in outcome.requests if r.num_prompt_tokens <= budget)


def test_orca_admits_fewer_than_what_would_fit_for_now():
    """24 blocks of 4; prompts take 2 blocks each, reservations 8: three run together where fcfs starts six."""
    trace = [live(f"r{i}", 0, 8, 25) for i in range(6)]
    keys = {"num_blocks": 24, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    assert len(log(Orca(), trace, **keys)[0][0]) == 3
    assert len(log(FCFS(), trace, **keys)[0][0]) == 6


@pytest.mark.parametrize("output, started", [(13, 2), (14, 1)])
def test_the_last_token_is_not_reserved_for(output, started):
    """9 blocks of 4: of 4 prompt tokens and 13 others all but the newest are computed: 4 blocks; of 14, 5."""
    for policy in (Orca(), StaticBatching()):
        steps = log(policy, [live(name, 0, 4, output) for name in "ab"], num_blocks=9)
        assert len(steps[0][0]) == started
