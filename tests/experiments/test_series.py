"""Curves against figures that are computed another way."""

from __future__ import annotations

import made_up
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedlab
from schedlab import engines
from schedlab.experiments.analysis import plots, series
from schedlab.experiments.analysis.pressure import pressure
from schedlab.framework.request import NS
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.lengths import Uniform
from schedlab.workloads.populations import Synthetic
from schedlab.workloads.prefixes import SystemPrompts


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return made_up.run(tmp_path_factory.mktemp("run"), requests=30)


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e", "queue"])
def test_distributions_are_those_of_the_summary(tables, name):
    values = series.latencies(tables.requests)[name]
    assert np.percentile(values, 99) == pytest.approx(tables.summary[f"{name}/p99"])
    assert values.mean() == pytest.approx(tables.summary[f"{name}/mean"])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(2, 50))
def test_a_cumulative_share_is_the_share_at_most_as_large(values, points):
    value, share = series.cumulative(np.array(values), points)
    assert len(value) <= points and share[-1] == 1
    for v, s in zip(value, share, strict=True):
        below = np.mean(np.array(values) < v)
        assert below < s <= np.mean(np.array(values) <= v) + 1e-12


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.floats(0, 9)), min_size=1, max_size=20),
    st.integers(1, 13),
)
def test_bin_means_integrate_a_signal(rows, bins):
    """Against a sum over every tick of time."""
    pauses, lasting, values = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    start = np.cumsum(pauses) + np.append(0, np.cumsum(lasting)[:-1])
    stop = start[-1] + lasting[-1]
    signal = np.zeros(int(stop))
    for begin, length, value in zip(start.astype(int), lasting.astype(int), values, strict=True):
        signal[begin : begin + length] = value
    edges = np.linspace(0, stop, bins + 1)
    integral = np.interp(edges, np.arange(stop + 1), np.append(0, np.cumsum(signal)))
    assert series.bin_means(start, lasting, values, edges) == pytest.approx(
        np.diff(integral) / np.diff(edges), abs=1e-9
    )


def test_rates_add_up_to_the_tokens(tables):
    curves = series.over_time(tables, 17)
    width = np.diff(curves["engine/time_s"]).mean()
    assert curves["sched/prefill_tokens_per_s"].sum() * width == pytest.approx(tables.steps["prefill_tokens"].sum())
    assert curves["sched/decode_tokens_per_s"].sum() * width == pytest.approx(tables.steps["decode_tokens"].sum())


def test_an_empty_run_has_no_curves(tmp_path):
    assert series.over_time(made_up.run(tmp_path, requests=0), 10) == {}


def by_grants(run) -> int:
    """Requests whose first grant is short of what the prefix cache left of their prompts."""
    first = {}
    for grants in run.decisions["grants"]:
        for name, tokens in grants:
            first.setdefault(name, tokens)
    columns = (run.requests[name] for name in ("request_id", "prompt_tokens", "cached_tokens"))
    return sum(
        first.get(name, np.inf) < prompt - np.nan_to_num(cached) for name, prompt, cached in zip(*columns, strict=True)
    )


@pytest.mark.parametrize("policy", [FCFS(), ChunkedPrefill(chunk_size=64), PrefixReuse(chunk_size=256)])
@pytest.mark.parametrize("rate", [4.0, 400.0])
def test_prompts_are_split_where_a_first_grant_is_short(policy, rate):
    drawn = {"lengths": Uniform((16, 900), (1, 40)), "prefixes": SystemPrompts(count=3, tokens=(64, 256))}
    work = Synthetic(name="mixed", arrivals=Poisson(rate), num_requests=60, **drawn)
    limits = {"num_blocks": 160, "max_num_seqs": 12, "max_num_batched_tokens": 512, "max_model_len": 2048}
    run = schedlab.run(policy, work, engines.virtual("llama3.1-8b", "h100", **limits))
    assert pressure(run)["pressure/split_prompts"] == by_grants(run)
    assert pressure(run)["pressure/queue"] == (np.repeat(run.steps["waiting"], run.steps["repeat"]) > 0).mean()


def test_pictures_have_units_and_survive_any_number_of_runs(tables, tmp_path):
    for path in plots.save_all(tables, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")
    for many in (1, 2, 9):
        figure = plots.latency_cdf({f"run {i}": tables for i in range(many)})
        assert all(axis.get_xlabel().endswith("(ms)") for axis in figure.axes)
        assert len({line.get_color() for line in figure.axes[0].lines}) == min(many, len(plots.COLOURS))
    assert plots.itl_over_time({"": tables}).axes[0].get_ylabel().endswith("(ms)")


def test_times_are_seconds_of_the_engine(tables):
    steps = tables.steps
    end = (steps["now_ns"][-1] + steps["duration_ns"][-1]) / NS
    assert series.over_time(tables, 50)["engine/time_s"][-1] == pytest.approx(end)
