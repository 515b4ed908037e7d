"""Runs of the real engine, decided again at their logged times: under pressure, with swaps, aborts and sessions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
from conftest import SMALL

from schedlab.experiments import engines
from schedlab.experiments.analysis.decisions import DecidedAgain, decide_again, parting
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.api import Experiment
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.policy import Policy
from schedlab.framework.results.tables import RunTables
from schedlab.framework.step import Step
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.trace import Labels, Trace
from schedlab.workloads.workload import Offered

POLICIES: list[Callable[[], Policy]] = [
    lambda: FCFS(preempt_mode="swap"), lambda: ChunkedPrefill(24),
    lambda: DecodePriority(16, 2, 1, preempt_mode="swap"), lambda: PrefixReuse(24),
]  # fmt: skip
MS = 1_000_000


@dataclass(kw_only=True)
class Made(Offered):
    """A trace that was made up."""

    trace: Trace
    name: str = "made"

    def load(self, seed: int = 0) -> Trace:
        return self.trace


def sessions(turns: int = 3, count: int = 8, last_prompt: int = 40) -> Made:
    """Sessions of `turns`, each tied to the one before; the last request arrives late and alone.

    Nothing here depends on how fast steps are: the sessions begin together, and what is withdrawn, all requests of
    them that an engine could not finish in one step, is withdrawn at the first boundary after its arrival.
    """
    rng = np.random.default_rng(3)
    n = turns * count + 1
    turn = np.append(np.arange(n - 1) % turns, 0)
    after = np.where(turn > 0, np.arange(n) - 1, -1)
    prompt = np.append(20 + 25 * turn[:-1] + rng.integers(0, 20, n - 1), last_prompt)
    arrival = np.append(np.zeros(n - 1, dtype=np.int64), 60_000 * MS)
    trace = Trace(
        "made", np.arange(n), arrival, prompt, np.append(rng.integers(4, 25, n - 1), 3),
        session=Labels.of([*(f"s{i // turns}" for i in range(n - 1)), None]),
        after=after, think_ns=np.where(after >= 0, rng.integers(0, 30, n) * MS, -1),
        turn=np.append(turn[:-1], -1), grows=(after >= 0).astype(np.int64),
        abort_ns=np.where(np.arange(n) % 7 == 3, 1, -1),
    )  # fmt: skip
    order = np.argsort(trace.arrival_ns, kind="stable") if after.max() < 0 else slice(None)
    return Made(trace=trace.take(order))


def real_engine(**more: int) -> EngineSetup:
    limits = {"num_blocks": 32, "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 4}
    return engines.cpu(SMALL, swap_space_gib=30 * 4 * 128 / engines.GIB, **limits, **more)


def again(
    run: RunTables, policy: Policy, workload: Offered, setup: EngineSetup, shape: ModelConfig, cpu: Hardware
) -> DecidedAgain:
    executor = CostExecutor(shape, cpu, weight_dtype="fp32")
    assert executor.block_bytes(4) == setup.executor.block_bytes(4)
    return decide_again(run, policy, workload.source(setup.config.max_model_len), setup.config, executor)


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("clock, chained", [("busy", 1), ("wall", 1), ("busy", 4)])
def test_the_same_decisions_at_the_logged_times(
    make: Callable[[], Policy], clock: str, chained: int, shape: ModelConfig, cpu: Hardware
) -> None:
    workload, setup = sessions(), real_engine(max_chained_steps=chained)
    if clock == "wall":
        workload = replace(workload, stop_after_s=59.0)  # without the request that comes after a minute
    run = Experiment(make(), workload, setup, clock=clock).run()
    assert run.summary["requests/aborted"] and run.summary["requests/finished"]
    assert run.summary["preemptions/recompute"] or run.summary["preemptions/swap"]
    assert (run.steps["repeat"].max() > 1) == (chained > 1)
    agreement = again(run, make(), workload, setup, shape, cpu)
    assert agreement.equal and agreement.first is None and agreement.measured == run.digest


def test_a_rejected_last_request_ends_the_run(shape: ModelConfig, cpu: Hardware) -> None:
    """It brings no boundary of its own; the recorded clock must come to it all the same."""
    workload, setup = sessions(last_prompt=300), real_engine()
    run = Experiment(FCFS(), workload, setup).run()
    assert run.requests["status"][-1] == "rejected"
    assert again(run, FCFS(), workload, setup, shape, cpu).equal


class Impatient(FCFS):
    """Decides one step otherwise, as if it had looked at a clock that no log knows."""

    decided = False

    def schedule(self, step: Step) -> None:
        if not self.decided and len(step.decoding) > 1 and step.free_blocks:
            self.decided = True
            step.grant_decodes(step.decoding[:1])
        else:
            super().schedule(step)


def test_decisions_that_part_are_found(shape: ModelConfig, cpu: Hardware) -> None:
    workload, setup = sessions(), real_engine()
    run = Experiment(FCFS(), workload, setup).run()
    agreement = again(run, Impatient(), workload, setup, shape, cpu)
    assert not agreement.equal and agreement.first is not None
    assert 0 < agreement.first < run.summary["steps"]


def test_where_logs_part_is_told_by_the_step_of_each() -> None:
    def decisions(*rows: tuple[int, str]) -> dict[str, Any]:
        index, decodes = zip(*rows, strict=True)
        nothing: list[Any] = [[]] * len(rows)
        zeros = np.zeros(len(rows), dtype=np.int64)
        columns = {
            "preempted": nothing,
            "grants": nothing,
            "rejected": nothing,
            "decodes_at": zeros,
            "repeat": zeros + 1,
        }
        return {"index": np.array(index), "decodes": list(decodes), **columns}

    logged = decisions((0, "all"), (3, "a"), (9, "all"))
    assert parting(logged, decisions((0, "all"), (3, "b"), (9, "all"))) == (3, 3)
    assert parting(logged, decisions((0, "all"), (3, "a"))) == (9, 4)
    assert parting(decisions((0, "all")), logged) == (1, 3)


def test_only_measured_runs_are_decided_again(shape: ModelConfig, cpu: Hardware) -> None:
    workload: Any = sessions()
    setup = engines.virtual(SMALL, cpu, weight_dtype="fp32", num_blocks=200, max_num_seqs=6, max_model_len=256)
    run = Experiment(FCFS(), workload, setup).run()
    with pytest.raises(ConfigError, match="expected a step for each boundary, found jumps"):
        again(run, FCFS(), workload, setup, shape, cpu)
