"""The parts of every latency: exact sums, none negative, and what a witness inside the run saw."""

from __future__ import annotations

import numpy as np
import pytest
from four import ALL
from hypothesis import given
from hypothesis import strategies as st
from witness import Witness

import schedlab
from schedlab.experiments.analysis.attribution import TPOT_PARTS, TTFT_PARTS, Attribution, attribute
from schedlab.framework.cost.expand import rates_of
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables
from schedlab.framework.testing import strategies
from schedlab.framework.testing.chaos import Chaos
from schedlab.framework.testing.harness import TINY, run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork


def check_exact(tables: RunTables) -> Attribution:
    parts, requests = attribute(tables), tables.requests
    ns = {name: np.rint(requests[f"{name}_s"] * NS) for name in ("arrival", "first_token", "finished", "delivery")}
    ttft, total = ns["first_token"] - ns["arrival"] + ns["delivery"], ns["finished"] - ns["first_token"]
    has = ~np.isnan(requests["first_token_s"])
    assert (sum(parts.ttft.values())[has] == ttft[has]).all()
    assert (sum(parts.tpot.values())[has] == total[has]).all()
    assert min(values.min(initial=0) for values in (*parts.ttft.values(), *parts.tpot.values(), parts.weights)) >= 0
    assert (parts.weights <= parts.tpot["decode"]).all()
    queue = np.rint((requests["first_scheduled_s"] - requests["visible_s"]) * NS)
    assert (parts.ttft["queue"][has] == queue[has]).all()
    return parts


def made(name):
    return Chaos(int(name)) if name.isdigit() else ALL[name]()


@given(st.one_of(st.sampled_from(sorted(ALL)), st.integers(0, 10**6).map(str)), strategies.specs(), strategies.limits())
def test_parts_add_up_to_the_nanosecond_and_tell_what_a_witness_saw(name, specs, limits):
    witness = Witness()
    tables = run(made(name), specs, TINY, witness, audited=False, **limits).tables
    parts, requests, steps = check_exact(tables), tables.requests, tables.steps
    ran = (steps["prefill_tokens"] + steps["decode_tokens"] + steps["copied_blocks"]) > 0
    if not ran.all():  # the witness sees no idling
        return
    seen = {request_id: {"preemption": 0, "alone": 0} for request_id in requests["request_id"]}
    first = dict(zip(requests["request_id"], np.rint(requests["first_token_s"] * NS), strict=True))
    for row, doing in enumerate(witness.seen):
        now, duration = int(steps["now_ns"][row]), int(steps["duration_ns"][row])
        for request_id, what in doing.items():
            if now >= first[request_id] and what[0] in ("prefill", "recompute", "swap"):
                seen[request_id]["preemption"] += duration
            elif what == ("decode",) and not steps["prefill_requests"][row]:
                seen[request_id]["alone"] += duration
    for at, request_id in enumerate(requests["request_id"]):
        between = sum(
            int(steps["duration_ns"][row])
            for row, doing in enumerate(witness.seen)
            if doing.get(request_id) == ("left out",) and steps["now_ns"][row] >= first[request_id]
        )
        told = parts.tpot["preemption"][at]
        assert seen[request_id]["preemption"] <= told <= seen[request_id]["preemption"] + between
        assert parts.tpot["decode"][at] >= seen[request_id]["alone"]


@pytest.mark.parametrize("policy", [FCFS, ChunkedPrefill, DecodePriority])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_jumps_give_the_same_parts_as_steps(policy, mode):
    """On the virtual clock, in a pool that preempts, with rates and without."""
    found = []
    for fast in (True, False):
        swap = 4.0 if mode == "swap" else 0.0
        engine = schedlab.engines.virtual(
            "llama3.1-8b", "h100", num_blocks=500, swap_space_gib=swap, fast_forward=fast, max_model_len=4096
        )
        work = CommonWork(num_requests=60, rate=30, prompt=(50, 400), output=(100, 400))
        tables = schedlab.run(policy(preempt_mode=mode), work, engine)
        assert tables.summary[f"preemptions/{mode}"] > 0
        check_exact(tables)
        tables.manifest = {"cost": rates_of(engine.executor)}
        found.append(check_exact(tables))
    jumped, stepped = found
    for name in TTFT_PARTS:
        assert (jumped.ttft[name] == stepped.ttft[name]).all(), name
    for name in TPOT_PARTS:
        assert (jumped.tpot[name] == stepped.tpot[name]).all(), name


def test_a_prompt_alone_and_a_stream_alone_are_all_their_own():
    """One request on an idle engine: no interference, no stalls."""
    engine = schedlab.engines.virtual("llama3.1-8b", "h100", max_model_len=4096)
    tables = schedlab.run(FCFS(), CommonWork(num_requests=1), engine)
    tables.manifest = {"cost": rates_of(engine.executor)}
    parts = check_exact(tables)
    assert parts.ttft["interference"] == 0 and parts.ttft["prefill"] > 0
    assert parts.tpot["stalls"] == 0 and parts.tpot["decode"] > 0


def test_client_stages_are_parts(tmp_path):
    from schedlab.framework.stages import ClientView, Stage

    engine = schedlab.engines.virtual("llama3.1-8b", "h100", max_model_len=4096)
    view = ClientView(preparation=Stage(constant_s=0.02), delivery=Stage(constant_s=0.005))
    parts = check_exact(schedlab.run(FCFS(), CommonWork(num_requests=5), engine, observed_at=view))
    assert (parts.ttft["preparation"] == 20_000_000).all() and (parts.ttft["delivery"] == 5_000_000).all()
