"""The search finds the edge that is there, and studies say what their runs say."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments import cli, engines
from schedlab.experiments.run import compose
from schedlab.experiments.studies import capacity_result
from schedlab.experiments.studies.capacity import ATTAINMENT, CapacityBench, Grid, highest, judge, study, work_limit
from schedlab.experiments.studies.capacity_result import CapacityOptions
from schedlab.framework.admission import TokenBucket
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO
from schedlab.framework.stages import ClientView, Stage
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork

TIGHT = SLO("tight", ttft_s=0.5, tpot_s=0.03)
OPTIONS = CapacityOptions(policies=None, attainment=0.9, replicates=3, resolution=0.05, points=3)


@given(st.integers(-100, 100), st.integers(-60, 60))
def test_the_edge_is_found_from_anywhere(edge, start):
    asked = []

    def meets(step: int) -> bool:
        asked.append(step)
        return step <= edge

    assert highest(meets, start, 120) == edge
    assert len(asked) == len(set(asked)) <= 16  # nothing is run twice


def test_an_edge_that_is_not_there():
    assert highest(lambda step: False, 0, 50) is None
    with pytest.raises(ConfigError, match="attainment does not fall"):
        highest(lambda step: True, 0, 50)


def test_capacities_are_compared_by_replicate():
    first = [10.0, 20.0, 15.0]
    found = judge("b", [11.0, 22.2, 16.4], first)
    assert found.verdict == "better" and found.against_first == pytest.approx(0.1, abs=0.01)
    assert found.difference.low < 0.1 < found.difference.high and found.interval.low < found.mean < found.interval.high
    assert judge("a", first, first).verdict == "equal"
    assert judge("c", [None, 22.0, 16.0], first).verdict == "not judged"


@pytest.fixture(scope="module")
def bench() -> CapacityBench:
    model, hardware = compose.preset("model", "llama3.1-8b"), engines.hardware_preset("a100")
    return CapacityBench(
        policies={"fcfs": FCFS, "chunked": lambda: ChunkedPrefill(512)},
        workload=CommonWork(num_requests=60),
        make_engine=lambda: engines.virtual(model, hardware, max_num_seqs=16),
        slo=TIGHT,
    )


def test_a_study_finds_where_attainment_falls(bench, tmp_path):
    said: list[str] = []
    found = study(bench, OPTIONS, said.append)
    grid = Grid(bench.first_rate(1), OPTIONS.resolution)
    assert len(said) == 2 and [c.policy for c in found.capacities] == ["fcfs", "chunked"]
    for capacity in found.capacities:
        for seed, rate in enumerate(capacity.rates, 1):
            step = round(np.log(rate / grid.first) / np.log1p(grid.resolution))
            assert rate == grid.rate(step)
            assert bench.summary(capacity.policy, seed, rate)[ATTAINMENT] >= 0.9
            assert bench.summary(capacity.policy, seed, grid.rate(step + 1))[ATTAINMENT] < 0.9
    for curve in found.curves:
        assert len(curve.rates) == 3 and curve.attainment[0] > curve.attainment[-1]
        assert all(goodput <= found.limit for goodput in curve.goodput)
        assert curve.goodput == pytest.approx(np.multiply(curve.rates, curve.attainment))
    capacity_result.write(found, tmp_path, plots=True)
    assert json.loads((tmp_path / "capacity.json").read_text())["capacities"][0]["policy"] == "fcfs"
    assert "no schedule serves 90% of the requests at more than" in (tmp_path / "capacity.md").read_text()
    with (tmp_path / "capacity.csv").open() as file:
        rows = list(csv.DictReader(file))
    told = [(row["policy"], float(row["requests_per_s"])) for row in rows]
    assert told == [(capacity.policy, capacity.mean) for capacity in found.capacities]
    assert (tmp_path / "plots" / "capacity.png").stat().st_size > 10_000


def test_a_short_trace_is_not_served_beyond_the_work_that_there_is_time_for(bench):
    """Forty requests with seconds to spare are served at any rate, most of them after the last arrival."""
    lenient = replace(bench, slo=SLO("lenient", ttft_s=20.0), workload=CommonWork(num_requests=40), traces={}, known={})
    found = study(lenient, replace(OPTIONS, attainment=0.8, replicates=2), lambda line: None)
    limits = [work_limit(lenient, seed, 0.8) for seed in (1, 2)]
    assert found.limit == pytest.approx(np.sqrt(limits[0] * limits[1]))
    for capacity in found.capacities:
        assert all(rate <= limit for rate, limit in zip(capacity.rates, limits, strict=True))
    assert found.at_limit == {"fcfs": 2, "chunked": 2}
    assert any("longer traces would tell more" in note for note in capacity_result.notes(found))
    assert all(work_limit(lenient, 1, share) > work_limit(lenient, 1, 1.0) for share in (0.5, 0.9))


def test_replicates_are_drawn_by_the_seed(bench):
    seeds = [replace(bench, seed=seed).seeds(3) for seed in (0, 1)]
    assert [*seeds[0]] == [1, 2, 3] and not {*seeds[0]} & {*seeds[1]}
    tables = []
    for seed in (0, 1):
        found = study(replace(bench, seed=seed, traces={}, known={}), replace(OPTIONS, replicates=1, points=0), str)
        tables.append(capacity_result.rows(found))
    assert tables[0] != tables[1]


def test_every_policy_is_offered_the_same(bench):
    for seed in (1, 2):
        assert len({bench.summary(policy, seed, 5.0)["requests/offered"] for policy in bench.policies}) == 1
    workload = bench.trace(1)
    assert workload.mean_rate == pytest.approx(bench.workload.load(1).mean_rate)


def test_who_is_refused_is_missed_by_every_policy(bench):
    limited = replace(bench, make_admission=lambda: TokenBucket(rate=0.001, burst=20), known={})
    for policy in bench.policies:
        assert bench.summary(policy, 1, 5.0)["requests/rejected"] == 0
        assert limited.summary(policy, 1, 5.0)["requests/rejected"] == 40  # a fresh bucket in every run


@pytest.mark.parametrize("change", [{"attainment": 0.0}, {"replicates": 0}, {"resolution": 0.0}, {"points": -1}])
def test_options_out_of_range(change):
    keys = {"policies": None, "attainment": 0.9, "replicates": 3, "resolution": 0.05, "points": 3}
    with pytest.raises(ConfigError, match=f"capacity.{next(iter(change))}: expected"):
        CapacityOptions(**keys | change)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("capacity", "capacity.policies=[fcfs,chunked]"), "capacity.policies: policy=chunked: no such option; did"),
        (("capacity", "capacity.policies=[custom]"), "capacity.policies: policy._target_ has no default"),
        (("fidelity", "fidelity.policies=[nosuch]", "engine=cpu"), "fidelity.policies: policy=nosuch: no such option"),
        (("capacity", "measure.start_s=5"), "measure.start_s: capacity scales the times"),
        (("fidelity", "measure.stop_s=5", "engine=cpu"), "measure.stop_s: fidelity scales the times"),
    ],
)
def test_the_key_at_fault_is_named(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["schedlab", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and said.err.startswith(f"error: {told}") and not said.out


def test_a_client_s_stages_count_in_capacity(bench):
    """A delivery longer than the limit leaves nothing within it at any rate."""
    late = replace(bench, observed_at=ClientView(delivery=Stage(constant_s=2 * TIGHT.ttft_s)), known={})
    assert late.summary("fcfs", 1, 1.0)[ATTAINMENT] == 0 < bench.summary("fcfs", 1, 1.0)[ATTAINMENT]
