"""Arrival processes, lengths, prefixes, clients, conversations and closed loops: their laws, and their independence."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay import facts, replay

from schedlab.framework.errors import ConfigError
from schedlab.workloads import arrivals
from schedlab.workloads.arrivals import AllAtOnce, Constant, Gamma, Poisson, RateCurve, Weibull, first_arrivals
from schedlab.workloads.lengths import Fixed, FromTrace, Lognormal, Uniform
from schedlab.workloads.populations import Client, CommonWork, Synthetic
from schedlab.workloads.prefixes import PrefixSpace, SystemPrompts
from schedlab.workloads.sessions import ClosedLoop, Conversations, ThinkTime
from schedlab.workloads.statistics import reuse
from schedlab.workloads.streams import stream

S = 10**9
LENGTHS = Uniform((10, 20), (3, 5))


def gaps(process, n=40_000):
    return np.diff(first_arrivals(process, stream(0, "gaps"), n))


@pytest.mark.parametrize(
    "process, cv",
    [
        (Poisson(5.0), 1.0),
        (Gamma(5.0, 0.5), 0.5),
        (Gamma(5.0, 3.0), 3.0),
        (Weibull(5.0, 1.0), 1.0),
        (Weibull(5.0, 0.6), math.sqrt(math.gamma(1 + 2 / 0.6) / math.gamma(1 + 1 / 0.6) ** 2 - 1)),
        (Weibull(5.0, 2.0), math.sqrt(math.gamma(2) / math.gamma(1.5) ** 2 - 1)),
        (Constant(5.0), 0.0),
    ],
    ids=repr,
)
def test_renewal_processes_have_their_rate_and_variation(process, cv):
    found = gaps(process)
    error = 5 * max(cv, 0.01) / math.sqrt(len(found))
    assert found.mean() == pytest.approx(0.2, rel=error)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_chunks_join_without_a_seam(monkeypatch):
    whole = first_arrivals(Constant(3.0), stream(0, "x"), 10_000)
    assert np.diff(whole) == pytest.approx(1 / 3)
    monkeypatch.setattr(arrivals, "CHUNK", 7)
    assert first_arrivals(Constant(3.0), stream(0, "x"), 100) == pytest.approx(whole[:100])


@given(
    st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 20)), min_size=2, max_size=6),
    st.sampled_from(["linear", "step"]),
)
def test_rate_curves_put_arrivals_where_the_integral_says(steps, shape):
    times = np.cumsum([length for length, _ in steps])
    points = list(zip(times.tolist(), [rate for _, rate in steps], strict=True))
    found = np.concatenate([*RateCurve(points, Constant(1.0), shape).times(stream(0, "x")), np.empty(0)])
    fine = np.linspace(times[0], times[-1], 20_001)
    rates = np.array([rate for _, rate in steps])
    if shape == "linear":
        value = np.interp(fine, times, rates)
    else:
        value = rates[np.searchsorted(times, fine, side="right") - 1]
    total = np.concatenate([[0], np.cumsum((value[1:] + value[:-1]) / 2 * np.diff(fine))])
    assert abs(len(found) - total[-1]) <= 1.01 + 0.01 * total[-1]
    assert np.interp(found, fine, total) == pytest.approx(np.arange(1, len(found) + 1), abs=0.02 * total[-1] + 0.05)


def test_a_ramp_of_poisson_arrivals_rises():
    found = np.concatenate(list(RateCurve([[0, 0], [100, 40]], Poisson(1.0)).times(stream(1, "x"))))
    assert found.max() < 100
    assert len(found) == pytest.approx(2000, abs=5 * math.sqrt(2000))
    assert (found < 50).sum() == pytest.approx(500, abs=5 * math.sqrt(500))


@pytest.mark.parametrize(
    "make",
    [lambda: Poisson(0), lambda: Poisson(float("nan")), lambda: Gamma(1, 0), lambda: Weibull(1, -1),
     lambda: Constant(float("inf")), lambda: RateCurve([[0, 1]], Poisson(1)),
     lambda: RateCurve([[0, 1], [-1, 1]], Poisson(1)),
     lambda: RateCurve([[0, 1], [1, 1]], Poisson(1), "cubic"), lambda: Fixed(0, 1), lambda: Uniform((5, 4), (1, 1)),
     lambda: Lognormal(0, 1, 1, 1), lambda: Lognormal(5, 1, 5, 1, correlation=2), lambda: SystemPrompts(0, 5),
     lambda: ThinkTime(-1), lambda: ThinkTime(float("inf")), lambda: Synthetic(arrivals=Poisson(1), lengths=LENGTHS),
     lambda: Synthetic(num_requests=5), lambda: Synthetic(num_requests=0, arrivals=Poisson(1), lengths=LENGTHS),
     lambda: CommonWork(rate=0), lambda: ClosedLoop(users=5, num_requests=4, lengths=LENGTHS),
     lambda: Conversations(num_sessions=0, arrivals=Poisson(1), lengths=LENGTHS)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(ConfigError):
        make()


# lengths


def test_lognormal_lengths():
    draw = Lognormal(200, 0.8, 50, 0.5, correlation=0.6, prompt_limit=4000, output_limit=500)
    prompt, output = draw.draw(stream(0, "l"), 50_000)
    assert prompt.min() >= 1 and prompt.max() <= 4000 and output.max() <= 500
    assert np.median(prompt) == pytest.approx(200, rel=0.03) and np.median(output) == pytest.approx(50, rel=0.03)
    assert np.log(prompt).std() == pytest.approx(0.8, rel=0.03)
    assert np.corrcoef(np.log(prompt), np.log(output))[0, 1] == pytest.approx(0.6, abs=0.02)


def test_pairs_from_a_trace_stay_together(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{p},{p * 10}\n" for p in range(1, 9)))
    prompt, output = FromTrace(str(path)).draw(stream(0, "l"), 500)
    assert (output == prompt * 10).all() and set(prompt.tolist()) == set(range(1, 9))


# open loop


def test_common_work_is_drawn_gap_prompt_output():
    draw, last, expected = random.Random(0), 0.0, []
    for _ in range(5000):
        last += draw.expovariate(8.0)
        expected.append((round(last * S), draw.randint(250, 750), draw.randint(100, 300)))
    trace = CommonWork(num_requests=5000).load()
    columns = trace.arrival_ns.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    assert list(zip(*columns, strict=True)) == expected


@pytest.mark.parametrize(
    "workload",
    [
        CommonWork(num_requests=9000),
        Synthetic(num_requests=9000, arrivals=Poisson(8), lengths=LENGTHS),
        Synthetic(num_requests=5000, arrivals=Poisson(8), lengths=LENGTHS, prefixes=SystemPrompts(3, (20, 60))),
        Synthetic(
            duration_s=300,
            clients={"a": Client(Poisson(4), LENGTHS), "b": Client(Gamma(2, 4), LENGTHS, priority=2, slo="x")},
        ),
    ],
    ids=["common", "plain", "prefixes", "clients"],
)
def test_a_stream_is_the_trace(workload):
    from schedlab.framework.request import SLO

    workload.slo_classes = {"x": SLO("x")}
    streamed = [facts(r) for _, r in replay(workload.source(8192), lambda r: 1)]
    loaded = [facts(r) for _, r in replay(workload.source(8192, trace=workload.load()), lambda r: 1)]
    assert streamed == loaded and len(streamed) > 1500
    assert workload.load(1).arrival_ns.tolist() != workload.load(0).arrival_ns.tolist()


def test_a_client_more_changes_no_draw_of_the_others():
    two = {"a": Client(Poisson(4), LENGTHS, SystemPrompts(2, 32)), "b": Client(Weibull(2, 0.5), LENGTHS)}
    three = {"z": Client(Constant(1), LENGTHS), **two}
    few, many = (Synthetic(duration_s=60, clients=clients).load() for clients in (two, three))
    for name in two:
        mine, theirs = (t.take(np.flatnonzero([c == name for c in t.client.tolist()])) for t in (few, many))
        for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
            assert np.array_equal(getattr(mine, column), getattr(theirs, column))
        if name == "a":
            assert np.array_equal(mine.ids.values, theirs.ids.values)
    assert len(many) == len(few) + 60 - 1


def test_a_burst_beside_a_stream():
    clients = {"steady": Client(Constant(1.0), LENGTHS), "burst": Client(AllAtOnce(5), LENGTHS)}
    trace = Synthetic(duration_s=10.5, clients=clients).load()
    assert trace.arrival_ns.tolist() == [0] * 5 + [S * i for i in range(1, 11)]


# prefixes


def test_system_prompts_are_shared_in_whole_blocks_only():
    total, ids = PrefixSpace(SystemPrompts(1, 40)).draw(stream(0, "p"), np.array([8, 30]))
    assert total.tolist() == [48, 70] and ids.counts.tolist() == [3, 5]
    first, second = ids.row(0).tolist(), ids.row(1).tolist()
    assert first[:2] == second[:2] and not set(first[2:]) & set(second[2:])


def test_popularity_follows_zipf():
    space = PrefixSpace(SystemPrompts(5, 16, zipf=1.0, share=0.5))
    counts = np.bincount(space.choose(stream(0, "p"), 100_000) + 1)
    assert counts[0] == pytest.approx(50_000, rel=0.03)
    assert counts[1:] / counts[1] == pytest.approx(1 / np.arange(1, 6), rel=0.05)


# sessions


def test_conversations_grow_by_answer_and_words():
    trace = Conversations(num_sessions=50, arrivals=Poisson(1), lengths=LENGTHS, turns=3).load()
    assert trace.grows.sum() == (trace.after >= 0).sum() > 50
    for row in np.flatnonzero(trace.after >= 0).tolist():
        before = int(trace.after[row])
        words = trace.prompt_tokens[row] - trace.prompt_tokens[before] - trace.output_tokens[before]
        assert 10 <= words <= 20 and trace.session[row] == trace.session[before]
        assert trace.turn[row] == trace.turn[before] + 1


def test_conversations_under_system_prompts_share_by_ids():
    trace = Conversations(
        num_sessions=40, arrivals=Poisson(1), lengths=LENGTHS, turns=3, system_prompts=SystemPrompts(2, 64)
    ).load()
    assert trace.grows is None
    for row in range(len(trace)):
        before = int(trace.after[row])
        whole = (trace.prompt_tokens[before] if before >= 0 else 64) // 16
        shared = trace.ids.row(before)[:whole] if before >= 0 else trace.ids.row(row)[:4]
        assert trace.ids.row(row)[:whole].tolist() == shared.tolist()
        assert trace.ids.counts[row] == -(-trace.prompt_tokens[row] // 16)
    assert reuse(trace).prefix > 0.6


def test_contexts_end_at_their_limit():
    trace = Conversations(
        num_sessions=20, arrivals=AllAtOnce(), lengths=Fixed(50, 50), turns=20, max_context=310
    ).load()
    assert (trace.prompt_tokens + trace.output_tokens).max() == 300
    assert trace.provenance.counts["turns_beyond_max_context"] > 0


def test_think_times_have_their_mean_and_variation():
    draws = ThinkTime(2.0, cv=0.5).draw_ns(stream(0, "t"), 50_000) / S
    assert draws.mean() == pytest.approx(2.0, rel=0.02) and draws.std() == pytest.approx(1.0, rel=0.03)
    assert ThinkTime(2.0, cv=0).draw_ns(stream(0, "t"), 3).tolist() == [2 * S] * 3
    assert ThinkTime(0).draw_ns(stream(0, "t"), 2).tolist() == [0, 0]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 10))
def test_a_closed_loop_never_has_more_than_its_users(users, more, service_s):
    loop = ClosedLoop(users=users, num_requests=users + more, lengths=LENGTHS, think=ThinkTime(1.0))
    running: dict[str, int] = {}
    seen = replay(loop.source(8192), lambda r: service_s * S)
    for now, request in seen:
        assert running.get(request.client, -1) <= now, "a user sends only after the end of the request before"
        running[request.client] = now + service_s * S
    assert len(seen) == users + more and len(running) == users


def test_a_slow_policy_shifts_when_requests_come_but_not_what_they_are():
    loop = ClosedLoop(users=3, num_requests=30, lengths=LENGTHS, think=ThinkTime(1.0))
    fast, slow = (replay(loop.source(8192), lambda r, s=s: s * S) for s in (1, 20))

    def what(seen):
        return sorted(
            (r.client, r.source_row, r.num_prompt_tokens, r.recorded_output_tokens, r.think_ns or 0) for _, r in seen
        )

    assert what(fast) == what(slow) and fast[-1][0] < slow[-1][0]
