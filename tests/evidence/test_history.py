"""What the logs say that requests went through, against a witness inside the run and against stepping."""

from __future__ import annotations

from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from witness import Witness

from schedlab.experiments.analysis.history import Histories, histories
from schedlab.framework.testing import strategies
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import TINY, run


def told(past: Histories, executed: list[int], decoding_all: set[int]) -> list[dict[str, tuple]]:
    """The same as Witness.seen, from the histories; `executed` are the rows in which a batch ran."""
    seen: dict[int, dict[str, tuple]] = {row: {} for row in executed}
    for history in past.requests:
        for phase in history.phases:
            granted = {grant.row: ("prefill", *grant[1:3]) for grant in phase.grants}
            decoded = decoding_all.union(history.listed) if phase.kind == "decode" else ()
            for row in seen.keys() & set(range(phase.first, phase.stop)):
                waits = (phase.kind,) if phase.kind in ("recompute", "swap") else ("left out",)
                seen[row][history.request_id] = ("decode",) if row in decoded else granted.get(row, waits)
    return [seen[row] for row in executed]


def check(policy, specs, limits):
    witness = Witness()
    outcome = run(policy, specs, TINY, witness, audited=False, **limits)
    steps, past = outcome.tables.steps, histories(outcome.tables)
    ran = (steps["prefill_tokens"] + steps["decode_tokens"] + steps["copied_blocks"]) > 0
    decoding_all = set((steps["decode_requests"] > 0).nonzero()[0].tolist()) - set(past.list_rows)
    assert told(past, ran.nonzero()[0].tolist(), decoding_all) == witness.seen


@given(st.sampled_from(sorted(ALL)), strategies.specs(), strategies.limits())
def test_the_logs_of_policies_tell_what_a_witness_saw(name, specs, limits):
    check(ALL[name](), specs, limits)


@given(st.integers(0, 10**6), strategies.specs(), strategies.limits())
def test_the_logs_of_a_random_policy_tell_what_a_witness_saw(seed, specs, limits):
    check(Chaos(seed), specs, limits)
