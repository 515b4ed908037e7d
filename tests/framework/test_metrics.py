"""The definitions of metrics.py against hand-worked cases and against plain Python over rows."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.framework.content import UniqueContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.results import metrics
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.metrics import SUMMARY_KEYS, Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow
from schedlab.framework.results.step_totals import BOUNDS
from schedlab.framework.results.tables import RunTables

MS = 1_000_000
steady = settings(deadline=None, derandomize=True)
INTERACTIVE = SLO("interactive", ttft_s=0.105, tpot_s=0.025, e2e_s=0.180)


def ended(
    request_id: str = "r0",
    *,
    arrival: int = 0,
    visible: int | None = None,
    scheduled: int | None = 20,
    first: int | None = 100,
    last: int = 175,
    prompt: int = 1000,
    output: int = 4,
    delivery: int = 0,
    status: str = "finished",
    cached: int | None = 0,
    **fields: Any,
) -> EngineRequest:
    """A request at its end; times in ms."""
    slots = {name: fields.pop(name) for name in ("resumed_tokens", "recomputed_tokens", "swaps") if name in fields}
    preemptions = fields.pop("preemptions", 0)
    request = EngineRequest(
        request_id,
        arrival * MS,
        prompt,
        UniqueContent(0),
        visible_ns=(arrival if visible is None else visible) * MS,
        delivery_ns=delivery * MS,
        **fields,
    )
    request._state = status  # type: ignore[assignment]
    request._base_tokens = prompt + output
    request._num_preemptions = preemptions
    request.first_scheduled_ns = None if scheduled is None else scheduled * MS
    request._first_token_ns = None if first is None else first * MS
    request.finished_ns = last * MS
    request.cached_tokens = cached
    for name, value in slots.items():
        setattr(request, name, value)
    return request


_QUIET = dict.fromkeys(StepRow._fields, 0) | {"repeat": 1, "free_blocks": 100, "bound": None, "scheduler_us": None}


def step(recorder: Recorder, index: int, *free: int, now: int = 0, duration: int = 10, **fields: Any) -> None:
    """A step row, times in ms; what is not given is 0, nothing is bound and the pool is free."""
    times = {"now_ns": now * MS, "duration_ns": duration * MS}
    recorder.step(StepRow(**_QUIET | {"index": index} | times | fields), *free)


def run(*requests: EngineRequest, backlog_end: int = 0, gaps: dict[int, int] | None = None, **fields: Any) -> RunTables:
    recorder = Recorder(Measurement(**({"max_num_seqs": 8, "num_blocks": 100} | fields)))
    for request in requests:
        recorder.request(request)
    for gap, count in (gaps or {}).items():
        recorder.gap(gap * MS, count)
    return recorder.close(backlog_end=backlog_end, counters={})


def test_golden_case() -> None:
    """20 ms preparation and queue, 80 prefill, 5 delivery, three gaps of 25."""
    request = ended(visible=12, scheduled=20, first=100, last=175, delivery=5, output=4)
    tables = run(request, gaps={25: 3}, slo=INTERACTIVE)
    summary = tables.summary
    assert summary["ttft/mean"] == summary["ttft/max"] == 0.105
    assert summary["e2e/p50"] == 0.180
    assert summary["tpot/p99"] == summary["itl/mean"] == summary["itl/p99"] == 0.025
    assert summary["queue/mean"] == 0.008
    assert summary["slo/attainment"] == 1.0, "limits are inclusive"
    assert summary["makespan_s"] == 0.175
    assert summary["throughput/output_tokens_per_s"] == pytest.approx(4 / 0.175)
    assert summary["throughput/total_tokens_per_s"] == pytest.approx(1004 / 0.175)
    assert tables.result["measurement"]["observed_at"] == "client"


def test_every_key_is_present_and_unknown_is_none() -> None:
    summary = run().summary
    assert tuple(summary) == SUMMARY_KEYS
    zero = {key for key, value in summary.items() if value == 0}
    assert zero == {
        "requests/offered", "requests/finished", "requests/rejected", "requests/aborted", "requests/length_capped",
        "requests/failed", "backlog_end", "steps", "preemptions/recompute", "preemptions/swap", "recomputed_tokens",
    }  # fmt: skip
    assert all(summary[key] is None for key in summary if key not in zero)
    json.dumps(summary, allow_nan=False)


def test_a_single_token_has_no_tpot_and_meets_that_limit() -> None:
    summary = run(ended(output=1, first=100, last=100), slo=SLO("tight", tpot_s=1e-9)).summary
    assert summary["tpot/mean"] is None and summary["itl/mean"] is None
    assert summary["slo/attainment"] == 1.0


@pytest.mark.parametrize("limits", [{"ttft_s": 0.104999999}, {"tpot_s": 0.024999999}, {"e2e_s": 0.179999999}])
def test_one_missed_limit_misses_the_slo(limits: dict[str, float]) -> None:
    request = ended(delivery=5, slo=SLO("mine", **limits))
    summary = run(request, slo=INTERACTIVE).summary
    assert summary["slo/attainment"] == 0.0 and summary["goodput/requests_per_s"] == 0.0


def test_each_request_is_judged_by_its_own_class() -> None:
    fast, slow = SLO("fast", ttft_s=0.05), SLO("slow", ttft_s=1.0)
    summary = run(ended("a", slo=fast), ended("b", slo=slow), ended("c", slo=slow), ended("d"), slo=fast).summary
    assert summary["slo/attainment"] == 0.5
    assert summary["goodput/requests_per_s"] == pytest.approx(2 / 0.175)


def test_without_any_class_attainment_is_unknown() -> None:
    summary = run(ended()).summary
    assert summary["slo/attainment"] is None and summary["goodput/requests_per_s"] is None


def test_who_has_no_limit_is_told_apart_from_who_meets_one() -> None:
    """One in two of those with a limit meets it, and whoever has none does not make that two in three."""
    strict, free = SLO("strict", ttft_s=0.05), SLO("free")
    generous = SLO("generous", ttft_s=1.0)
    summary = run(ended("a", slo=strict), ended("b", slo=generous), ended("c", slo=free)).summary
    assert summary["slo/attainment"] == pytest.approx(2 / 3) and summary["slo/attainment_limited"] == 0.5
    assert run(ended("a", slo=strict), ended("b", slo=generous)).summary["slo/attainment_limited"] is None
    assert run(ended("a", slo=generous), ended("b", slo=free), backlog_end=1).summary["slo/attainment_limited"] == 0.5


def test_where_nobody_is_served_goodput_is_nought() -> None:
    nothing: dict[str, Any] = {"scheduled": None, "first": None, "output": 0, "cached": None}
    tables = run(ended(status="rejected", **nothing), slo=INTERACTIVE)
    assert tables.summary["goodput/requests_per_s"] == tables.summary["slo/attainment"] == 0.0
    assert tables.vllm_bench is not None and tables.vllm_bench["request_goodput"] == 0.0


def test_two_classes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two SLO classes are named a"):
        run(ended("a", slo=SLO("a", ttft_s=1)), ended("b", slo=SLO("a", ttft_s=2)))


def test_what_enters_by_how_a_request_ended() -> None:
    generous = SLO("generous", ttft_s=100, tpot_s=100, e2e_s=100)
    nothing: dict[str, Any] = {"scheduled": None, "first": None, "output": 0, "cached": None}
    summary = run(
        ended("finished", first=100, last=200),
        ended("capped", first=300, last=600, status="length_capped"),
        ended("aborted", first=500, last=5000, status="aborted", output=2),
        ended("aborted early", status="aborted", **nothing),
        ended("rejected", status="rejected", **nothing),
        ended("failed", first=900, last=9000, status="failed", output=2),
        backlog_end=4,
        slo=generous,
    ).summary
    assert summary["requests/offered"] == 10
    assert [summary[f"requests/{s}"] for s in metrics.STATUSES] == [1, 1, 2, 1, 1]
    assert summary["ttft/mean"] == pytest.approx((0.1 + 0.3 + 0.5) / 3)
    assert summary["e2e/mean"] == pytest.approx((0.2 + 0.6) / 2)
    assert summary["tpot/max"] == pytest.approx(0.1)
    assert summary["slo/attainment"] == 1 / 10
    assert summary["makespan_s"] == 9.0
    assert summary["throughput/requests_per_s"] == pytest.approx(1 / 9)
    assert summary["throughput/output_tokens_per_s"] == pytest.approx((4 + 4 + 2 + 2) / 9)


def test_hit_rate_is_of_first_admissions_and_null_without_identity() -> None:
    known = run(
        ended("a", prompt=1024, cached=992, resumed_tokens=64, preemptions=3, swaps=1, recomputed_tokens=100),
        ended("b", prompt=1024, cached=0),
        ended("c", scheduled=None, first=None, output=0, cached=None, status="rejected"),
    ).summary
    assert known["prefix/hit_rate"] == 992 / 2048
    assert (known["prefix/tokens_reused"], known["prefix/tokens_resumed"]) == (992, 64)
    assert (known["preemptions/recompute"], known["preemptions/swap"], known["recomputed_tokens"]) == (2, 1, 100)
    unknown = run(ended(cached=None)).summary
    assert unknown["prefix/hit_rate"] is None and unknown["prefix/tokens_reused"] is None


def test_steps_are_weighted_by_time() -> None:
    recorder = Recorder(Measurement(max_num_seqs=10, num_blocks=100))
    step(recorder, 0, duration=10, prefill_tokens=500, decode_tokens=2, prefill_requests=1, decode_requests=2,
         free_blocks=90, bound="compute", scheduler_us=3.0)  # fmt: skip
    step(recorder, 1, duration=30, repeat=3, decode_tokens=4, decode_requests=4, free_blocks=50, bound="memory")
    summary = recorder.close(backlog_end=0, counters={}).summary
    assert summary["steps"] == 4
    assert summary["batch/tokens_mean"] == (502 * 10 + 4 * 30) / 40
    assert summary["batch/requests_mean"] == (3 * 10 + 4 * 30) / 40
    assert summary["batch/idle_slot_share"] == pytest.approx(1 - 3.75 / 10)
    assert summary["kv/utilization_mean"] == pytest.approx(1 - (90 * 10 + 50 * 30) / 40 / 100)
    assert summary["kv/utilization_max"] == 0.5
    assert [summary[f"bound/{b}"] for b in BOUNDS] == [0.25, 0.75, 0.0]
    assert summary["scheduler/us_per_step"] == 3.0, "over the steps whose scheduler time is known"


def test_a_row_of_several_steps_counts_the_blocks_that_each_left_free() -> None:
    stepped, jumped = Recorder(Measurement(10, 100)), Recorder(Measurement(10, 100))
    for i, (duration, free) in enumerate([(10, 90), (11, 70), (12, 69)]):
        step(stepped, i, duration=duration, decode_tokens=4, decode_requests=4, free_blocks=free)
    free_block_ns = (10 * 90 + 11 * 70 + 12 * 69) * MS
    step(jumped, 0, free_block_ns, 69, duration=33, repeat=3, decode_tokens=4, decode_requests=4, free_blocks=90)
    expected = stepped.close(backlog_end=0, counters={}).summary
    assert jumped.close(backlog_end=0, counters={}).summary == expected
    assert expected["kv/utilization_max"] == 0.31


def test_jain() -> None:
    assert metrics.jain([1, 1, 1]) == 1.0
    assert metrics.jain([1, 0, 0, 0]) == 0.25
    assert metrics.jain([]) is None and metrics.jain([0, 0]) is None


def test_fairness_is_served_over_demanded_at_the_last_arrival() -> None:
    recorder = Recorder(Measurement(8, 100))
    recorder.last_arrival(0, {"a": 1})
    recorder.last_arrival(5, {"a": 500, "b": 100})
    recorder.request(ended("1", client="a", prompt=900, output=100))
    recorder.request(ended("2", client="b", prompt=300, output=2, recorded_output_tokens=100, status="aborted"))
    recorder.request(ended("3", client="c", prompt=50, output=0, status="rejected", scheduled=None, first=None))
    summary = recorder.close(backlog_end=0, counters={}).summary
    assert summary["fairness/jain"] == pytest.approx((0.5 + 0.25) ** 2 / (3 * (0.5**2 + 0.25**2)))


def test_demands_that_are_given_win_over_those_of_ended_requests() -> None:
    recorder = Recorder(Measurement(8, 100))
    recorder.last_arrival(5, {"a": 500, "b": 100}, {"a": 1000, "b": 200})
    assert recorder.close(backlog_end=2, counters={}).summary["fairness/jain"] == 1.0


def test_a_window_leaves_out_and_counts() -> None:
    recorder = Recorder(Measurement(8, 100, start_s=1.0, stop_s=2.0))
    for i, now in enumerate((500, 1000, 1999, 2000)):
        step(recorder, i, now=now, duration=1, decode_tokens=1, decode_requests=i + 1)
        recorder.gap((i + 1) * MS, 1)
        recorder.request(ended(str(i), arrival=now, scheduled=now + 20, first=now + 100, last=now + 175))
    tables = recorder.close(backlog_end=0, counters={})
    assert tables.summary["requests/offered"] == 2 and tables.summary["steps"] == 2
    assert tables.summary["batch/requests_mean"] == 2.5
    assert tables.summary["itl/mean"] == 0.0025
    assert tables.result["measurement"]["window"] == {"start_s": 1.0, "stop_s": 2.0, "requests_outside": 2}


def test_vllm_names() -> None:
    tables = run(ended(output=4), ended("b", output=1, first=200, last=200), gaps={25: 3}, slo=INTERACTIVE)
    bench = tables.vllm_bench
    assert bench is not None
    assert bench["completed"] == 2 and bench["total_input_tokens"] == 2000 and bench["total_output_tokens"] == 5
    assert bench["mean_ttft_ms"] == pytest.approx(150) and bench["std_ttft_ms"] == pytest.approx(50)
    assert bench["median_tpot_ms"] == bench["p99_tpot_ms"] == 25.0
    assert bench["p99_itl_ms"] == bench["median_itl_ms"] == 25.0 and bench["std_itl_ms"] == 0.0
    assert bench["mean_e2el_ms"] == pytest.approx((175 + 200) / 2)
    assert bench["request_throughput"] == pytest.approx(2 / 0.2)
    assert bench["request_goodput"] == tables.summary["goodput/requests_per_s"]
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2e", "e2el")):
        for statistic, word in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p99", "p99")):
            assert bench[f"{word}_{theirs}_ms"] == pytest.approx(tables.summary[f"{ours}/{statistic}"] * 1e3)
    withdrawn = ended("c", first=100, last=200, status="aborted", output=2)
    bench = run(ended(output=4), withdrawn, gaps={25: 3}).vllm_bench
    assert bench is not None and bench["completed"] == 1 and bench["total_output_tokens"] == 4
    assert bench["output_throughput"] * bench["duration"] == pytest.approx(bench["total_output_tokens"])
    tokens = bench["total_output_tokens"] + bench["total_input_tokens"]
    assert bench["total_token_throughput"] * bench["duration"] == pytest.approx(tokens)
    assert "aborted ones that had a first token" in bench["definitions"]["ttft"]
    empty = run().vllm_bench
    assert empty is not None and empty["mean_ttft_ms"] is None and empty["request_goodput"] is None
    json.dumps(empty, allow_nan=False)


counts = st.dictionaries(st.integers(0, 10**7), st.integers(1, 40), min_size=1, max_size=30)


@steady
@given(counts, st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_histogram_percentiles_are_numpys(counts: dict[int, int], ranks: list[float]) -> None:
    expanded = np.repeat(list(counts), list(counts.values()))
    histogram = Histogram(counts)
    assert histogram.percentiles(ranks) == list(np.percentile(expanded, ranks))
    assert histogram.mean() == pytest.approx(expanded.mean())
    assert histogram.std() == pytest.approx(expanded.std(), abs=1e-6)
    assert histogram.max() == expanded.max()


@steady
@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 5)), min_size=1))
def test_gaps_are_rounded_to_a_microsecond(gaps: list[tuple[int, int]]) -> None:
    one, bulk = Recorder(Measurement(1, 1)), Recorder(Measurement(1, 1))
    for gap, count in gaps:
        one.gap(gap, count)
        bulk.gaps([gap] * count, 1)
    exact = np.repeat([gap for gap, _ in gaps], [count for _, count in gaps])
    summary = one.close(backlog_end=0, counters={}).summary
    assert summary == bulk.close(backlog_end=0, counters={}).summary
    assert summary["itl/p99"] == pytest.approx(np.percentile(exact, 99) / 1e9, abs=0.5001e-6)
    assert summary["itl/mean"] == pytest.approx(exact.mean() / 1e9, abs=0.5001e-6)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    arrival = draw(st.integers(0, 1000))
    visible = arrival + draw(st.integers(0, 50))
    scheduled = visible + draw(st.integers(0, 500))
    output = draw(st.integers(1, 5))
    first = scheduled + draw(st.integers(1, 100))
    last = first if output == 1 else first + draw(st.integers(1, 400))
    return ended(
        arrival=arrival,
        visible=visible,
        scheduled=scheduled,
        first=first,
        last=last,
        output=output,
        delivery=draw(st.integers(0, 5)),
        status=draw(st.sampled_from(["finished", "finished", "length_capped", "aborted", "failed"])),
        slo=draw(st.sampled_from([None, SLO("a", ttft_s=0.3), SLO("b", tpot_s=0.05, e2e_s=0.6)])),
        cached=draw(st.none() | st.integers(0, 999)),
    )


def naive(rows: list[EngineRequest], default: SLO) -> dict[str, float]:
    """The definitions read off the page, one request at a time, in milliseconds as floats."""
    served = [r for r in rows if r.state in ("finished", "length_capped")]
    ttft = {r: (r._first_token_ns - r._arrival_ns + r.delivery_ns) / MS for r in rows}  # type: ignore[operator]
    e2e = {r: (r.finished_ns - r._arrival_ns + r.delivery_ns) / MS for r in rows}  # type: ignore[operator]
    tpot = {
        r: (r.finished_ns - r._first_token_ns) / MS / (r.num_output_tokens - 1)  # type: ignore[operator]
        for r in rows
        if r.num_output_tokens > 1
    }

    def good(r: EngineRequest) -> bool:
        slo = r.slo or default
        limits = [(ttft[r], slo.ttft_s), (tpot.get(r, 0.0), slo.tpot_s), (e2e[r], slo.e2e_s)]
        return r.state == "finished" and all(s is None or ms <= s * 1e3 + 1e-7 for ms, s in limits)

    span = (max(r.finished_ns for r in rows) - min(r._arrival_ns for r in rows)) / 1e9  # type: ignore[type-var,operator]
    first = [ttft[r] for r in rows if r in served or r.state == "aborted"]
    return {
        "ttft/p95": float(np.percentile(first, 95)) / 1e3 if first else math.nan,
        "e2e/mean": float(np.mean([e2e[r] for r in served])) / 1e3 if served else math.nan,
        "tpot/p50": float(np.percentile(t, 50)) / 1e3 if (t := [tpot[r] for r in served if r in tpot]) else math.nan,
        "slo/attainment": sum(map(good, rows)) / len(rows),
        "goodput/requests_per_s": sum(map(good, rows)) / span,
        "makespan_s": span,
    }


@settings(steady, max_examples=60)
@given(st.lists(requests(), min_size=1, max_size=12))
def test_summary_equals_the_definitions_one_by_one(rows: list[EngineRequest]) -> None:
    default = SLO("default", ttft_s=0.2, tpot_s=0.1)
    tables = run(*rows, slo=default)
    for key, value in naive(rows, default).items():
        found = tables.summary[key]
        assert found is None if math.isnan(value) else found == pytest.approx(value), key
    percentiles = [tables.summary[f"ttft/{s}"] for s in ("p50", "p90", "p95", "p99", "max")]
    assert percentiles[0] is None or percentiles == sorted(percentiles)


@settings(steady, max_examples=30)
@given(st.lists(requests(), min_size=1, max_size=12))
def test_a_requests_table_gives_back_what_was_measured(rows: list[EngineRequest]) -> None:
    recorder = Recorder(Measurement(8, 100))
    for row in rows:
        recorder.request(row)
    tables = recorder.close(backlog_end=0, counters={})
    measured, slos = recorder._requests.whole(), list(recorder._requests.slos.values())
    assert np.array_equal(metrics.from_table(tables.requests, slos, ["default"]), measured)
