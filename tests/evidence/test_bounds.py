"""No schedule beats the bounds: scheduling against brute force, and every policy on random traces."""

from __future__ import annotations

import itertools
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedlab
from schedlab.experiments import engines
from schedlab.experiments.analysis.bounds import bounds_of, shared_tokens, tightness
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.api import Experiment
from schedlab.framework.cost.bounds import (
    Prices,
    busy_until,
    least_per_unit,
    longest_shared,
    shortest_remaining_first,
)
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.engine import EngineConfig
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.populations import CommonWork
from schedlab.workloads.trace import BlockIds, Labels, Trace
from schedlab.workloads.workload import Offered

POLICIES = {
    "fcfs": lambda: FCFS(),
    "chunked_prefill": lambda: ChunkedPrefill(chunk_size=24),
    "decode_priority": lambda: DecodePriority(stall_tokens=5, max_prefill_streak=2, watermark_blocks=2),
    "prefix_reuse": lambda: PrefixReuse(chunk_size=24, preempt_mode="swap"),
}
SHAPE = {
    "architecture": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 4096, "dtype": "float32",
}  # fmt: skip
LOWER = ("ttft", "e2e", "makespan_s")
MS = 1_000_000


# ---- one machine ----


def best_preemptive_sum(release: list[int], work: list[int]) -> int:
    """The least sum of completion times in unit slots, by trying every order in which the machine may serve units."""
    totals = []
    for order in set(itertools.permutations([job for job, units in enumerate(work) for _ in range(units)])):
        now, ends = 0, {}
        for job in order:
            now = max(now, release[job]) + 1
            ends[job] = now
        totals.append(sum(ends.values()))
    return min(totals)


jobs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=3)


@given(jobs)
def test_shortest_remaining_first_is_as_good_as_any_schedule(jobs):
    release, work = (list(column) for column in zip(*jobs, strict=True))
    ends = shortest_remaining_first(np.array(release, dtype=float), np.array(work, dtype=float))
    assert ends.sum() == best_preemptive_sum(release, work)
    assert ends.max() == busy_until(np.array(release), np.array(work))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 50), st.integers(1, 60))
def test_no_batch_is_cheaper_a_unit(floor, rate, ridge, most):
    cheapest = min((floor + rate * max(0, x - ridge)) / x for x in range(1, most + 1))
    assert least_per_unit(floor, rate, ridge, most) <= cheapest * (1 + 1e-12) + 1e-12


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=6))
def test_what_others_share_is_the_longest_common_prefix(prompts):
    trace = trace_of(prompts)
    for i, own in enumerate(prompts):
        others = [other for j, other in enumerate(prompts) if j != i]
        common = max((common_prefix(own, other) for other in others), default=0)
        assert shared_tokens(trace)[i] == min(4 * common, 4 * len(own) - 1)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def trace_of(prompts: list[list[int]]) -> Trace:
    n, counts = len(prompts), [len(ids) for ids in prompts]
    ids = BlockIds(np.concatenate([[0], np.cumsum(counts)]), np.array([i for ids in prompts for i in ids]), 4)
    zeros = np.zeros(n, dtype=np.int64)
    return Trace("made", np.arange(n), zeros, np.array(counts) * 4, zeros + 3, ids=ids)


def test_keys_of_one_row_are_not_shared():
    assert longest_shared(np.array([5, 5]), np.array([0, 0]), np.array([4, 4]), 1).tolist() == [0]


# ---- every run ----


class Made(Offered):
    def __init__(self, trace: Trace) -> None:
        super().__init__(name="made")
        self.trace = trace

    def load(self, seed: int = 0) -> Trace:
        return self.trace


requests = st.lists(
    st.tuples(
        st.integers(0, 30), st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 30), st.booleans()
    ),
    min_size=1, max_size=12,
)  # fmt: skip
rates = st.builds(
    Coefficients,
    **{
        name: st.sampled_from([0.0, 0.7, 13.0, 900.0])
        for name in (
            "step_ns", "request_ns", "prefill_ns", "prefill_step_ns", "decode_step_ns", "matrix_ns", "weights_ns",
            "linear_ns", "linear_ridge", "token_ns", "head_ns", "logits_ns", "logits_ridge", "row_ns", "key_ns",
            "pair_ns", "pair_ridge", "decode_key_ns", "copied_byte_ns",
        )
    },
)  # fmt: skip


@lru_cache
def machine() -> Hardware:
    return engines.hardware_preset("cpu")


def run_of(rows, coefficients, policy, tmp: Path, **limits):
    arrival = np.sort(np.array([row[0] for row in rows])) * 20_000
    prompts = [row[1] for row in rows]
    trace = trace_of(prompts).with_columns(
        arrival_ns=arrival, output_tokens=np.array([row[2] for row in rows]),
        request_id=Labels.of(f"q{i}" for i in range(len(rows))),
        abort_ns=np.array([300_000 if row[3] else -1 for row in rows]),
        preparation_ns=np.full(len(rows), 1000), delivery_ns=np.arange(len(rows)) % 2 * 700,
    )  # fmt: skip
    executor = CostExecutor(ModelConfig.from_mapping(SHAPE), machine(), weight_dtype="fp32")
    executor.coefficients = coefficients
    config = EngineConfig(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=48, block_size=4, **limits)
    setup = EngineSetup("virtual", executor, config, ("virtual",))
    Experiment(policy, Made(trace), setup).run(tmp)
    return read_run(tmp)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_run_beats_its_bounds(policy, tmp_path_factory, request):
    """Prefix hits, chunks, tiny pools with preemption and swap, aborts, stages of the client; any rates."""

    @settings(max_examples=500 if request.config.getoption("--full") else 20)
    @given(requests, rates, st.sampled_from([60, 2000]))
    def respected(rows, coefficients, blocks):
        tmp = tmp_path_factory.mktemp("run")
        swap = 0.001 if policy == "prefix_reuse" else 0.0
        tables = run_of(rows, coefficients, POLICIES[policy](), tmp, num_blocks=blocks, swap_space_gib=swap)
        check(tables, bounds_of(tmp, tables))

    respected()


def check(tables, limits) -> None:
    for metric, bound in limits.items():
        value, slack = tables.summary[metric], 1e-9
        if value is None:
            continue
        if metric.startswith(LOWER):
            assert value >= bound.value * (1 - slack) - 1e-12, (metric, value, bound)
        else:
            assert value <= bound.value * (1 + slack) + 1e-12, (metric, value, bound)
    served = sum(status in ("finished", "length_capped") for status in tables.requests["status"])
    assert bool(limits) == bool(served)


def test_a_request_alone_attains_its_bound(tmp_path):
    """One whole prompt in one step, then a token a step: nothing is lost to rounding but nanoseconds."""
    engine = schedlab.engines.virtual("llama3.1-8b", "h100")
    tables = schedlab.run(FCFS(), CommonWork(num_requests=1), engine, out=tmp_path)
    tables = read_run(tmp_path)
    limits = bounds_of(tmp_path, tables)
    for metric in ("ttft/mean", "ttft/p99", "e2e/mean", "e2e/max", "makespan_s", "throughput/output_tokens_per_s"):
        assert tables.summary[metric] == pytest.approx(limits[metric].value, rel=1e-3), metric
    assert all(found.tight == found.runs == 1 for found in tightness([(tables, limits)]))


def test_work_bounds_an_overloaded_run(tmp_path):
    engine = schedlab.engines.virtual("llama3.1-8b", "h100")
    schedlab.run(ChunkedPrefill(2048), CommonWork(num_requests=300, rate=200.0), engine, out=tmp_path)
    tables = read_run(tmp_path)
    limits = bounds_of(tmp_path, tables)
    check(tables, limits)
    assert limits["ttft/mean"].by == "work" and limits["ttft/p99"].weak
    assert limits["ttft/mean"].value > 3 * limits["ttft/p50"].value


def test_prices_of_a_roofline_are_its_rates():
    executor = CostExecutor(engines.model_preset("llama3.1-8b")[0], engines.hardware_preset("h100"))
    c = executor.coefficients
    prices = Prices(c, 2048, 128)
    assert prices.token_ns == pytest.approx(c.token_ns + c.linear_ns)  # 2,048 tokens are beyond the ridge
    assert prices.row_ns == pytest.approx(c.row_ns + c.request_ns + c.head_ns / 128)  # 128 rows are not
    assert prices.pair_ns == pytest.approx(c.pair_ns) and 0.999 < prices.kept < 1
