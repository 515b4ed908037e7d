"""Hypothesis strategies: traces that queue, share prefixes, abort and outgrow tiny pools, and the engines to run
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from schedlab.framework.testing.case import Case
from schedlab.framework.testing.harness import Spec

MS = 1_000_000


@st.composite
def specs(draw: st.DrawFn, max_requests: int = 14, max_prompt: int = 60, max_output: int = 24) -> list[Spec]:
    """A trace: bursts and gaps, shared id prefixes of two widths, sessions, unique prompts, aborts, priorities,
    clients.
    """
    count = draw(st.integers(1, max_requests))
    width = draw(st.sampled_from([3, 4, 8, 16]))
    now, trace = 0, []
    for i in range(count):
        now += draw(st.sampled_from([0, 0, 1, 5, 30])) * MS
        trace.append(draw(_spec(i, now, width, max_prompt, max_output)))
    return trace


@st.composite
def _spec(draw: st.DrawFn, index: int, now: int, width: int, max_prompt: int, max_output: int) -> Spec:
    prompt = draw(st.integers(1, max_prompt))
    kind = draw(st.sampled_from(["ids", "ids", "ids", "unique"]))
    ids = None
    if kind == "ids":
        branch, shared = draw(st.integers(0, 2)), draw(st.integers(0, 8))
        blocks = -(-prompt // width)
        ids = tuple(i if i < shared else 1000 * (branch + 1) + i for i in range(blocks))
    abort = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 80)))
    return Spec(
        name=f"r{index}",
        arrival_ns=now,
        prompt=prompt,
        output=draw(st.integers(1, max_output)),
        ids=ids,
        id_width=width,
        abort_ns=None if abort is None else now + abort * MS,
        priority=draw(st.integers(0, 2)),
        client=draw(st.sampled_from(["a", "b"])),
    )


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Engine keys for a tiny pool in which capacity binds."""
    block_size = draw(st.sampled_from([1, 3, 4, 8]))
    budget = draw(st.sampled_from([6, 16, 32]))
    return {
        "block_size": block_size,
        "num_blocks": -(-draw(st.integers(84, 140)) // block_size),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget,
        "swap_space_gib": draw(st.sampled_from([0, 40, 400])) * 8 / (1 << 30),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
    }


@st.composite
def cases(draw: st.DrawFn, max_requests: int = 10) -> Case:
    """A trace, some of its requests live and some with a deadline, and an engine in which capacity binds."""
    trace = draw(specs(max_requests=max_requests, max_output=16))
    return Case(tuple(_varied(draw, spec) for spec in trace), draw(limits()))


def _varied(draw: st.DrawFn, spec: Spec) -> Spec:
    live = draw(st.sampled_from([False, False, False, True]))
    deadline = draw(st.sampled_from([None, None, 20, 100]))
    return replace(spec, live=live, deadline_ns=None if deadline is None else spec.arrival_ns + deadline * MS)
