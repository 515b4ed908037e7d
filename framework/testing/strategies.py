"""Hypothesis strategies: traces that queue, share prefixes, abort and outgrow tiny pools, and the engines to run
them.
"""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import strategies as st

from schedlab.framework.request import SLO
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


ODD: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"abort_ns": 12 * MS}, {"abort_ns": 45 * MS}, {"abort_ns": 3 * MS}, {"live": True}, {"priority": 2},
    {"client": "b"}, {"client": "c"}, {"client": "d", "priority": 1},
    {"deadline_ns": 30 * MS}, {"priority": 1, "client": "b", "deadline_ns": 90 * MS},
    {"slo": SLO("fast", ttft_s=0.02, tpot_s=0.002)}, {"slo": SLO("slow", ttft_s=None, e2e_s=0.5)}, {"slo": SLO("any")},
)  # fmt: skip
"""What may be particular about a request; times are relative to its arrival."""
MAX_PROMPT, MAX_OUTPUT = 56, 16
POOL = MAX_PROMPT + MAX_OUTPUT
"""Tokens that the smallest pool holds: any request, alone."""


Burst = tuple[int, int, int, int, int, dict[str, Any]]


def cases(max_bursts: int = 10) -> st.SearchStrategy[Case]:
    """Bursts of equal requests, few draws each so that they shrink quickly, and an engine in which capacity binds."""
    burst = st.tuples(
        st.sampled_from([1, 1, 2, 4]),
        st.sampled_from([0, 0, 1, 4, 25]),
        st.integers(1, MAX_PROMPT),
        st.integers(1, MAX_OUTPUT),
        st.integers(0, 26),
        st.sampled_from(ODD),
    )
    return st.builds(_case, st.lists(burst, min_size=1, max_size=max_bursts), _engines(), st.sampled_from([0, 0, 1000]))


def crowds() -> st.SearchStrategy[Case]:
    """A hundred requests and more at once, of several clients, of which most are withdrawn or have short answers."""
    return st.builds(_crowd, st.integers(0, 1 << 32), st.integers(70, 160))


def _crowd(seed: int, count: int) -> Case:
    draw = Random(seed)
    trace = []
    for i in range(count):
        now, odd = i // 40 * MS, {**draw.choice(ODD), "client": f"c{i % 9}"}
        odd = {key: now + value if key.endswith("_ns") else value for key, value in odd.items()}
        trace.append(Spec(f"r{i}", now, draw.randint(1, 12), draw.randint(1, 3), **odd))
    return Case(tuple(trace), {"num_blocks": 40, "max_num_seqs": draw.choice([1, 6, 12]), "audit_every": 64})


def squeezes() -> st.SearchStrategy[Case]:
    """Long answers that fill the pool, and short ones of any priority that come in step after step: who is admitted in
    one step has to make way in the next.
    """
    return st.builds(_squeeze, st.integers(0, 1 << 32), st.integers(4, 16))


def _squeeze(seed: int, count: int) -> Case:
    draw, trace = Random(seed), []  # hypothesis repeats itself too much for what one case in fifty brings out
    for i in range(draw.randint(2, 3)):
        trace.append(Spec(f"r{i}", i * MS, draw.choice([60, 4, 30]), 60))
    now = draw.choice([4, 36, 45]) * MS
    engine: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": draw.choice([9, 9, 11]),
        "max_num_batched_tokens": 256,
        "audit_every": 64,
    }
    engine["swap_space_gib"] = draw.choice([0, 400]) * 8 / (1 << 30)
    for _ in range(count):
        now += draw.randint(1, 3) * MS
        prompt, output, priority = draw.choice([4, 40, 80]), draw.choice([1, 2, 4, 40]), draw.randint(0, 2)
        trace.append(Spec(f"r{len(trace)}", now, prompt, output, priority=priority))
    return Case(tuple(trace), engine)


def _engines() -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda size, room, seqs, budget, swap, caching: {
            "block_size": size,
            "num_blocks": -(-(POOL + room) // size),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": budget,
            "swap_space_gib": swap * 8 / (1 << 30),
            "enable_prefix_caching": caching,
        },
        st.sampled_from([4, 1, 3, 8]),
        st.integers(0, 60),
        st.sampled_from([1, 2, 3, 4, 5, 6, 1]),
        st.sampled_from([8, 6, 16, 32]),
        st.sampled_from([0, 400, 40]),
        st.sampled_from([True, True, False]),
    )


def _case(bursts: list[Burst], engine: dict[str, Any], begins_s: int) -> Case:
    trace: list[Spec] = []
    now = begins_s * 1000 * MS
    for times, gap, prompt, output, kin, odd in bursts:
        now += gap * MS
        odd = {key: now + value if key.endswith("_ns") else value for key, value in odd.items()}
        for _ in range(times):
            name = f"r{len(trace)}"
            trace.append(Spec(name, now, prompt, output, ids=_ids(prompt, kin), id_width=4, **odd))
    return Case(tuple(trace), engine)


def _ids(prompt: int, kin: int) -> tuple[int, ...] | None:
    """Ids of which the first `kin` % 9 are those of others, on one of two branches; none for a prompt like no other."""
    branch, shared = divmod(kin, 9)
    if branch == 0 and shared == 0:
        return None
    return tuple(i if i < shared else 100 * (branch + 1) + i for i in range(-(-prompt // 4)))
