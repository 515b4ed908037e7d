"""What the prefix cache may give away and when, and what metrics say of it: known ways in which engines go wrong."""

import pytest
from four import FOUR
from scripted import (
    MS,
    Script,
    ScriptedExecutor,
    grants,
    lab,
    named,
    serve,
)

from schedlab.framework.policy import Arrived
from schedlab.framework.testing.harness import Spec

# -- prefix cache -----------------------------------------------------------------------------------------------------

SAME = {"ids": (1, 2, 3), "id_width": 4}


def test_blocks_are_visible_when_the_step_has_committed_and_not_before():
    seen = []

    def look(step):
        b = named(step)["b"]
        seen.append((step.cached_tokens(b), step.pending_tokens(b)))

    def first(step):
        look(step)
        step.grant(named(step)["a"], 6)
        look(step)

    def second(step):
        look(step)
        step.grant(named(step)["a"])
        look(step)

    made = lab(Script(first, second, lambda step: (look(step), serve(step))), [Spec(n, 0, 12, 2, **SAME) for n in "ab"])
    made.finish()
    assert seen == [(0, 0), (0, 8), (4, 4), (4, 4), (8, 0)], "b may reuse 8 of its 12 tokens"


def test_the_same_prompt_twice_in_a_step_is_computed_twice_and_kept_once():
    executor = ScriptedExecutor(1)
    trace = [Spec(n, 0, 13, 3, ids=(1, 2, 3, 4), id_width=4) for n in "ab"]
    made = lab(Script(grants(a=None, b=None)), trace, executor=executor)
    made.step()
    assert executor.batches[0][0] == [("a", 0, 13), ("b", 0, 13)]
    ledger = made.engine.ledger
    tables = [made[n].block_table for n in "ab"]
    assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
    assert ledger.cache.num_free == 24 - 5
    made.finish()


def test_a_duplicate_of_a_running_prefix_is_deferred_by_prefix_reuse():
    executor = ScriptedExecutor(1)
    made = lab(FOUR["prefix_reuse"](), [Spec(n, 0, 12, 3, **SAME) for n in "ab"], executor=executor)
    made.finish()
    granted = [prefill for prefills, _ in executor.batches for prefill in prefills]
    assert granted == [("a", 0, 12), ("b", 8, 4)]


@pytest.mark.parametrize("block_size", [1, 2, 4, 12])
def test_a_fully_cached_prompt_still_computes_its_last_token(block_size):
    executor = ScriptedExecutor(1)
    trace = [Spec(n, t * MS, 12, 2, **SAME) for n, t in (("a", 0), ("b", 10))]
    made = lab(Script(), trace, executor=executor, block_size=block_size, num_blocks=96 // block_size)
    made.finish()
    granted = {name: (start, tokens) for prefills, _ in executor.batches for name, start, tokens in prefills}
    start = 11 // block_size * block_size
    assert granted["b"] == (start, 12 - start)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_latencies_of_a_preempted_request():
    """1 ms a step. First token at 1 ms; two more; out for 10 ms; two more: TTFT stays, the gap is an ITL."""

    def preempt(step):
        step.preempt(step.decoding[0])
        step.idle_until(step.now + 0.010)

    moves = [grants(a=None), grants(a=1), grants(a=1), preempt]
    made = lab(Script(*moves), [Spec("a", 0, 9, 5)], executor=ScriptedExecutor(1))
    summary = made.finish().summary
    assert summary["ttft/max"] == summary["queue/max"] + 0.001 == 0.001
    assert summary["e2e/max"] == 0.015
    assert summary["itl/max"] == 0.011 and summary["itl/p50"] == 0.001
    assert summary["itl/mean"] == pytest.approx((0.001 * 3 + 0.011) / 4)
    assert summary["tpot/mean"] == pytest.approx((0.015 - 0.001) / 4)


def test_reuse_counts_at_the_first_admission_and_what_a_resume_finds_apart():
    """b reuses 8 of its 12 prompt tokens once; its resume finds 12 of the 13 computed and computes one again."""

    def preempt(step):
        step.preempt(named(step)["b"])
        step.idle_until(step.now + 0.001)

    moves = [grants(a=None), grants(b=None), grants(b=1), preempt]
    trace = [Spec("a", 0, 12, 1, **SAME), Spec("b", 0, 12, 4, **SAME)]
    summary = lab(Script(*moves), trace).finish().summary
    assert summary["prefix/tokens_reused"] == 8
    assert summary["prefix/hit_rate"] == 8 / 24
    assert summary["prefix/tokens_resumed"] == 12
    assert summary["recomputed_tokens"] == 1
    assert (summary["preemptions/recompute"], summary["preemptions/swap"]) == (1, 0)


def test_a_trace_without_identity_has_no_hit_rate():
    summary = lab(Script(), [Spec("a", 0, 12, 3), Spec("b", 0, 12, 3)]).finish().summary
    assert summary["prefix/hit_rate"] is None


def test_open_loop_arrivals_wait_for_no_slot():
    """One slot, taken for 40 ms: the others arrive when the trace says, and their TTFT has the whole wait in it."""
    trace = [Spec("first", 0, 4, 40), *[Spec(f"r{i}", i * MS, 4, 1) for i in range(1, 20)]]
    arrivals = {}

    def look(step):
        for event in made.policy.events:
            arrivals.setdefault(event.request.request_id, step.now) if isinstance(event, Arrived) else None
        serve(step)

    made = lab(Script(then=look), trace, max_num_seqs=1, executor=ScriptedExecutor(1))
    tables = made.finish()
    assert arrivals == {spec.name: pytest.approx(spec.arrival_ns / 1e9) for spec in trace}
    ttft = tables.requests["first_token_s"] - tables.requests["arrival_s"]
    assert sorted(tables.requests["first_token_s"][1:]) == pytest.approx([0.041 + 0.001 * i for i in range(19)])
    assert tables.summary["ttft/max"] == pytest.approx(max(ttft)) and max(ttft) >= 0.039


def test_one_token_has_no_tpot():
    summary = lab(Script(), [Spec("a", 0, 12, 1)]).finish().summary
    assert summary["tpot/mean"] is None and summary["itl/mean"] is None and summary["ttft/mean"] is not None
