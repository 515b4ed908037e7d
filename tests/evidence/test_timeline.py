"""timeline.json: what opens closes, in order, and says what the tables say."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.analysis.timeline import ENGINE, REQUESTS, TimeWindow, events, write_timeline
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing import strategies
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import TINY, Spec, run


def slices(found):
    """(name, begin, end, depth) of each track; fails where an event closes what is not open, or time runs back."""
    tracks, stacks, last = defaultdict(list), defaultdict(list), {}
    for event in found:
        track = event["pid"], event["tid"]
        if event["ph"] not in "BE":
            continue
        assert event["ts"] >= last.get(track, 0.0)
        last[track] = event["ts"]
        if event["ph"] == "B":
            stacks[track].append(event)
            continue
        begin = stacks[track].pop()
        assert begin["name"] == event["name"] and begin["ts"] < event["ts"]
        tracks[track].append((begin["name"], begin["ts"], event["ts"], len(stacks[track])))
    assert not any(stacks.values())
    return tracks


def tables_of(name, specs, limits):
    policy = Chaos(len(specs)) if name == "chaos" else ALL[name]()
    return run(policy, specs, TINY, StubExecutor(), audited=False, **limits).tables


@given(st.sampled_from(["chaos", *sorted(ALL)]), strategies.specs(), strategies.limits(), st.floats(0, 1))
def test_slices_pair_and_requests_are_covered_without_gaps(name, specs, limits, cut):
    tables = tables_of(name, specs, limits)
    everything = list(events(tables, TimeWindow.of(None, None)))
    tracks, requests = slices(everything), tables.requests
    names = {e["tid"]: e["args"]["name"] for e in everything if e["name"] == "thread_name" and e["pid"] == REQUESTS}
    at = {request_id: row for row, request_id in enumerate(requests["request_id"])}
    for track, request_id in names.items():
        outer = sorted((piece for piece in tracks[REQUESTS, track] if piece[3] == 0), key=lambda piece: piece[1])
        ends = [piece[2] for piece in outer]
        assert [piece[1] for piece in outer[1:]] == ends[:-1]
        row = at[request_id]
        assert outer[0][1] == pytest.approx(requests["arrival_s"][row] * 1e6)
        assert ends[-1] == pytest.approx(requests["finished_s"][row] * 1e6)
    preempted = sum(event["name"] == "preemption" for event in everything)
    assert preempted == requests["preemptions"].sum()
    assert sum(event["name"] == "rejected" for event in everything) == requests["status"].count("rejected")
    end = tables.steps["now_ns"].max(initial=1) / NS
    window = TimeWindow.of(cut * end / 2, (cut * end + end) / 2 + 1e-6)
    low, high = window.start_ns / 1000, window.stop_ns / 1000
    part = slices(events(tables, window))
    for track, found in tracks.items():
        expected = [(what, max(b, low), min(e, high), depth) for what, b, e, depth in found if b < high and e > low]
        assert sorted(part[track]) == sorted(expected)


def test_the_engine_track_is_the_steps_table():
    specs = [Spec(f"r{i}", i * 7_000_000, 20 + i, 10) for i in range(8)]
    tables = tables_of("chunked_prefill", specs, {})
    found = list(events(tables, TimeWindow.of(None, None)))
    steps = tables.steps
    begins = [event for event in found if event["ph"] == "B" and event["pid"] == ENGINE]
    for name in ("prefill_tokens", "decode_tokens", "index", "context_tokens"):
        assert [event["args"][name] for event in begins] == steps[name].tolist()
    assert [event["ts"] for event in begins] == (steps["now_ns"] / 1000).tolist()
    counters = [event for event in found if event["ph"] == "C" and event["name"] == "requests"]
    assert [event["args"]["waiting"] for event in counters] == steps["waiting"].tolist()


def test_chunks_lie_within_their_prefill():
    tables = tables_of("chunked_prefill", [Spec("long", 0, 50, 5), Spec("other", 0, 50, 5)], {})
    found = slices(events(tables, TimeWindow.of(None, None)))[REQUESTS, 1]
    chunks = [piece for piece in found if piece[3] == 1]
    assert [name for name, *_ in sorted(chunks, key=lambda c: c[1])] == ["chunk 12"] * 4 + ["chunk 2"]
    prefill = next(piece for piece in found if piece[0] == "prefill")
    assert all(prefill[1] <= begin < end <= prefill[2] for _, begin, end, _ in chunks)


def test_a_file_for_perfetto_and_a_window_of_it(tmp_path):
    tables = tables_of("fcfs", [Spec(f"r{i}", i * 7_000_000, 20, 10) for i in range(8)], {})
    count = write_timeline(tables, tmp_path / "whole.json")
    assert len(json.loads((tmp_path / "whole.json").read_text())["traceEvents"]) == count
    fewer = write_timeline(tables, tmp_path / "part.json", 0.02, 0.04)
    part = json.loads((tmp_path / "part.json").read_text())["traceEvents"]
    assert 0 < fewer < count and all(2e4 <= event["ts"] <= 4e4 for event in part if "ts" in event)
    with pytest.raises(ConfigError, match=r"timeline: expected 0 <= start < stop, found 3 and 2 s"):
        TimeWindow.of(3, 2)
