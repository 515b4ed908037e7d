"""What holds for every policy that ships: streams, holds, crowds, knobs, and travel to another process."""

import pickle

import pytest
from four import ESTIMATOR, EVERY, OTHERS
from hypothesis import given
from hypothesis import strategies as st
from scripted import MS, JumpingExecutor

from schedlab.framework.clock import VirtualClock
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import TINY, Spec, check_streams, run
from schedlab.framework.testing.strategies import limits, specs
from schedlab.policies.edf import EDF
from schedlab.policies.fair import Fair
from schedlab.policies.fastserve import FastServe
from schedlab.policies.hrrn import HRRN
from schedlab.policies.multilevel_feedback import MultilevelFeedback
from schedlab.policies.orca import Orca
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.policies.priority import Priority
from schedlab.policies.program_fcfs import ProgramFCFS
from schedlab.policies.program_feedback import ProgramFeedback
from schedlab.policies.program_las import ProgramLAS
from schedlab.policies.sarathi import Sarathi
from schedlab.policies.sglang_lpm import SGLangLPM
from schedlab.policies.shedding import Shedding
from schedlab.policies.sjf import SJF
from schedlab.policies.slo_aware import SLOAware
from schedlab.policies.srpt import SRPT
from schedlab.policies.static_batching import StaticBatching
from schedlab.policies.vllm_v1 import VLLMV1


@given(specs(), limits(), st.sampled_from(sorted(set(EVERY) - {"fcfs", "chunked_prefill", "prefix_reuse"})))
def test_every_policy_gives_every_request_its_tokens_and_ends(trace, keys, name):
    outcome = run(EVERY[name](), trace, **keys)
    check_streams(outcome)
    assert all(request.finished_ns is not None for request in outcome.requests)


@given(specs(), limits(), st.sampled_from(sorted(EVERY)))
def test_holds_change_nothing_but_the_work(trace, keys, name):
    """Jumped over, honoured step by step, or ignored: the same decisions at the same times."""
    runs = [
        run(EVERY[name](), trace, executor=JumpingExecutor(slope=300), **keys, **changes)
        for changes in ({}, {"fast_forward": False}, {"honour_holds": False})
    ]
    assert runs[0].digest == runs[1].digest == runs[2].digest
    assert runs[0].stamps == runs[1].stamps == runs[2].stamps


@pytest.mark.parametrize("name", OTHERS)
def test_a_crowd_is_served_under_every_policy_and_mode(name):
    """Sixteen requests that together need several times the pool, with host memory and without."""
    trace = [
        Spec(
            f"r{i}", i * 2 * MS, 20 + 3 * (i % 5), 20, ids=(0, 1, 2, 100 + i, 200 + i), id_width=8,
            priority=i % 3, client="ab"[i % 2],
        )
        for i in range(16)
    ]  # fmt: skip
    for kind in (name, f"{name}/swap"):
        outcome = run(EVERY[kind](), trace, num_blocks=20, max_num_batched_tokens=24, swap_space_gib=2000 * 8 / 2**30)
        check_streams(outcome)
        assert {request.state for request in outcome.requests} == {"finished"}


@pytest.mark.parametrize("name", EVERY)
def test_a_policy_can_be_sent_to_another_process(name):
    made = pickle.loads(pickle.dumps(EVERY[name]()))
    trace = [Spec(f"r{i}", i * MS, 8, 4) for i in range(3)]
    assert run(made, trace).digest == run(EVERY[name](), trace).digest


@pytest.mark.parametrize("policy", [SJF(), HRRN(), SRPT()])
def test_a_policy_that_needs_predictions_is_refused_without_a_predictor(policy):
    with pytest.raises(ConfigError, match=f"{type(policy).__name__}.*predictor"):
        Engine(policy, StubExecutor(), ListSource([]), TINY, VirtualClock(), Recorder(Measurement(6, 24)))


@pytest.mark.parametrize(
    "make",
    [
        *[lambda kind=kind: kind(chunk_size=0) for kind in (Priority, EDF, SJF, HRRN, Fair, MultilevelFeedback)],
        lambda: SLOAware(ESTIMATOR, chunk_size=0),
        *[lambda kind=kind: kind(preempt_mode="drop") for kind in (Priority, EDF, SJF, HRRN, Fair, Orca)],
        lambda: EDF(default_deadline_s=-1.0),
        lambda: EDF(default_deadline_s=float("nan")),
        lambda: EDF(default_deadline_s=float("inf")),
        lambda: SLOAware(ESTIMATOR, min_chunk=0),
        lambda: SLOAware(ESTIMATOR, patience_s=0.0),
        lambda: SLOAware(ESTIMATOR, patience_s=float("nan")),
        *[lambda value=value: SLOAware(ESTIMATOR, reject_after_s=value) for value in (0.0, -0.5, -1.0, float("nan"))],
        *[lambda value=value: ProgramLAS(patience_s=value) for value in (0.0, -0.5, float("nan"))],
        *[lambda kind=kind: kind(chunk_size=0) for kind in (ProgramFCFS, ProgramLAS, ProgramFeedback)],
        lambda: Shedding(ESTIMATOR, chunk_size=0),
        lambda: SJF(output_weight=-0.5),
        lambda: SJF(output_weight=-1.0),
        lambda: SJF(output_weight=float("inf")),
        lambda: SJF(aging_tokens_per_s=0.0),
        lambda: SJF(aging_tokens_per_s=float("inf")),
        lambda: HRRN(output_weight=-0.5),
        lambda: HRRN(output_weight=-1.0),
        lambda: HRRN(output_weight=float("inf")),
        *[lambda value=value: Fair(input_weight=value) for value in (0.0, -1.0, float("inf"), float("nan"))],
        *[lambda value=value: Fair(output_weight=value) for value in (0.0, -1.0, float("inf"), float("nan"))],
        lambda: MultilevelFeedback(quantum=0),
        lambda: MultilevelFeedback(num_levels=0),
        lambda: MultilevelFeedback(prompt_weight=-0.5),
        lambda: MultilevelFeedback(prompt_weight=-1.0),
        lambda: MultilevelFeedback(promote_after_s=0.0),
        lambda: StaticBatching(batch_size=0),
        lambda: VLLMV1(order="lifo"),
        lambda: VLLMV1(chunk_size=0),
        *[lambda kind=kind: kind(chunk_size=0) for kind in (Sarathi, SRPT, SGLangLPM)],
        lambda: Sarathi(order="lifo"),
        lambda: Sarathi(default_deadline_s=-1.0),
        *[lambda low=low: Sarathi(chunk_size=64, low_chunk_size=low) for low in (0, 65)],
        lambda: Sarathi(chunk_schedule_tokens=0),
        lambda: Sarathi(chunk_schedule_stages=0),
        *[lambda value=value: SRPT(output_weight=value) for value in (-0.5, float("inf"), float("nan"))],
        *[lambda value=value: SRPT(prompt_weight=value) for value in (-0.5, float("inf"), float("nan"))],
        *[lambda value=value: SJF(prompt_weight=value) for value in (-0.5, float("inf"), float("nan"))],
        *[lambda value=value: SGLangLPM(conservativeness=value) for value in (-0.5, float("inf"), float("nan"))],
        lambda: SGLangLPM(fcfs_above=-1),
        lambda: SGLangLPM(shared_threshold=-1),
        lambda: SGLangLPM(clip_max_new_tokens=-1),
        lambda: FastServe(None),
        lambda: FastServe(ESTIMATOR, max_batch_size=0),
        *[lambda value=value: FastServe(ESTIMATOR, base_quantum_s=value) for value in (0.0, -1.0, float("inf"))],
        *[lambda value=value: FastServe(ESTIMATOR, promote_after_s=value) for value in (0.0, float("nan"))],
        *[lambda value=value: Fair(client_weights={"a": value}) for value in (0.0, -1.0, float("inf"), float("nan"))],
        *[lambda value=value: PrefixReuse(aging_tokens_per_s=value) for value in (-1.0, float("nan"))],
    ],
)
def test_a_knob_out_of_range_is_refused(make):
    with pytest.raises(ValueError, match="policy"):
        make()


@pytest.mark.parametrize("seconds", [0.5, 1.0, 30.0])
def test_spans_above_nothing_are_taken(seconds):
    assert SLOAware(ESTIMATOR, reject_after_s=seconds).reject_after_s == seconds
    assert ProgramLAS(patience_s=seconds).patience_s == seconds
