"""Whatever a policy decides, every request generates the tokens that the stub's definition gives it."""

import pytest
from four import ALL
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import Spec, check_streams, expected_stream, run, same_tokens
from schedlab.framework.testing.strategies import limits, specs


@settings(max_examples=settings.default.max_examples * 2 // 5)  # each runs every policy
@given(specs(), limits())
def test_every_policy_gives_every_request_its_tokens(trace, keys):
    same_tokens(list(ALL.values()), trace, **keys)


@given(specs(), limits(), st.integers(0, 2**32))
def test_random_decisions_give_every_request_its_tokens(trace, keys, seed):
    check_streams(run(Chaos(seed), trace, **keys))


def crowded(count=16, output=20):
    """Requests that share prefixes and together need several times the pool."""
    return [
        Spec(f"r{i}", i * 2_000_000, 20 + 3 * (i % 5), output, ids=(0, 1, 2, 100 + i, 200 + i), id_width=8)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ALL)
def test_the_crowded_trace_exercises_what_it_is_for(name):
    outcome = run(ALL[name](), crowded(), num_blocks=20, max_num_batched_tokens=24, swap_space_gib=2000 * 8 / 2**30)
    check_streams(outcome)
    summary = outcome.tables.result["summary"]
    assert summary["prefix/tokens_reused"] > 0
    kind = "swap" if name.endswith("swap") else "recompute"
    assert summary[f"preemptions/{kind}"] > 0, "capacity does not bind"


def test_streams_are_not_degenerate():
    prompt = Spec("r", 0, 30, 64).request().content.tokens(30, 1000)
    assert len(set(expected_stream(prompt, 64))) > 48
