"""Metrics against swept numbers: which runs are a line, what a point is, and that pictures tell what they show."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from fake_runs import fake_run, offered

from schedlab.experiments.analysis.curves import as_number, curves, of_sweep, pareto, picture, plot, rows, swept, unit
from schedlab.experiments.analysis.statistics import interval
from schedlab.experiments.analysis.table import Comparison
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import SUMMARY_KEYS

RATE, SLOTS = "workload.arrivals.rate", "engine.max_num_seqs"


@pytest.fixture
def sweep(tmp_path):
    """Two policies, two numbers of slots, three rates, three seeds."""
    job = 0
    for policy, factor in (("fcfs", 1.0), ("chunked", 2.0)):
        for slots in ("8", "128"):
            for rate in ("4", "16", "2"):
                for seed in range(3):
                    value = factor * float(rate) * (1 + 0.1 * seed) / float(slots)
                    summary = {
                        "ttft/p99": value, "tpot/mean": 0.01 * float(rate), "slo/attainment": 1.0 - float(rate) / 40,
                        "throughput/output_tokens_per_s": 100 * float(rate),
                    }  # fmt: skip
                    overrides = {RATE: rate, SLOTS: slots}
                    fake_run(tmp_path / str(job), policy, offered(seed), summary, overrides=overrides, seed=seed)
                    job += 1
    return tmp_path


def runs_of(directory):
    return list(Comparison.read([directory]).complete.values())


def test_the_numbers_that_vary_are_found(sweep):
    assert swept(runs_of(sweep)) == [RATE, SLOTS]
    assert as_number("0.5") == 0.5 and as_number("fcfs") is None and as_number(None) is None


def test_only_what_differs_in_the_number_and_the_seed_is_a_line(sweep):
    found = curves(runs_of(sweep), "rate", "ttft/p99")
    assert len(found.lines) == 4 and found.limit == 1.0
    assert all("max_num_seqs" in name for name in found.lines)
    for points in found.lines.values():
        assert [point.number for point in points] == [2, 4, 16] and {point.replicates for point in points} == {3}
    point = found.lines[f"chunked {SLOTS}=8"][1]
    values = np.array([2 * 4 * (1 + 0.1 * seed) / 8 for seed in range(3)])
    bounds = interval(values)
    assert (point.y, point.low, point.high) == pytest.approx((values.mean(), bounds.low, bounds.high))
    assert point.attainment == pytest.approx(0.9)
    by_slots = curves(runs_of(sweep), SLOTS, "ttft/p99")
    assert len(by_slots.lines) == 6 and all("rate" in name for name in by_slots.lines)


def test_throughput_per_user_against_that_per_device(sweep):
    found = pareto(runs_of(sweep), "rate")
    point = found.lines[f"fcfs {SLOTS}=8"][0]
    assert (point.number, point.x, point.y) == pytest.approx((2, 50.0, 200.0))
    text = rows(found)
    assert text[0][:4] == ["variant", RATE, "throughput per user", "throughput per device"]


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (None, "ttft/p99", "expected --x, one of the numbers that vary: workload.arrivals.rate, engine.max_num_seqs"),
        ("chunk_size", "ttft/p99", "--x chunk_size: none of the numbers that vary"),
        ("rate", "ttft/p98", "--y ttft/p98: no such metric"),
        ("rate", "queue/mean", "--y queue/mean: unknown in all"),
    ],
)
def test_what_cannot_be_drawn_is_said(sweep, x, y, said):
    with pytest.raises(ConfigError, match=said):
        curves(runs_of(sweep), x, y)


def test_pictures_and_data_are_saved(sweep):
    paths = plot([sweep], "rate", ["ttft/p99"], True, None)
    assert [path.suffix for path in paths] == [".png", ".svg", ".csv"] * 2
    assert paths[0].read_bytes().startswith(b"\x89PNG") and paths[1].read_text().lstrip().startswith("<?xml")
    told = list(csv.DictReader(paths[2].open()))
    assert len(told) == 12 and {float(row["replicates"]) for row in told} == {3}
    assert paths[0].parent == sweep / "plots" and json.dumps([row["ttft/p99"] for row in told])


def test_every_picture_names_axes_units_and_limits(sweep):
    for found in (*of_sweep(Comparison.read([sweep])), pareto(runs_of(sweep), "rate")):
        figure = picture(found)
        (axis,) = figure.axes
        assert axis.get_xlabel().endswith(")") and axis.get_ylabel().endswith(")")
        shown = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
        assert set(found.lines) <= shown and ("limit of the SLO" in shown) == (found.limit is not None)
    rated = picture(curves(runs_of(sweep), "rate", "ttft/p99")).axes[0]
    assert [tick.get_text() for tick in rated.get_xticklabels()] == ["2", "4", "16"]
    rings = [line for line in rated.lines if line.get_markersize() == 11]
    assert len(rings) == 4 and {float(line.get_xdata()[0]) for line in rings} == {4.0}
    assert rated.get_yscale() == "log"


def test_every_metric_has_a_unit():
    assert all(unit(key)[1].endswith(")") for key in SUMMARY_KEYS)
