"""Jump rows of a log, expanded, against the same run executed step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedlab.experiments import engines
from schedlab.experiments.notebook.runs import run
from schedlab.experiments.run import compose
from schedlab.framework.cost.expand import UNKNOWN_WITHIN, expand, expanded_steps, rates_of
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import RunTables
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.populations import CommonWork

POLICIES = [FCFS, ChunkedPrefill, DecodePriority, PrefixReuse]


@pytest.fixture(scope="module")
def presets() -> tuple[dict[str, Any], Hardware]:
    return compose.preset("model", "llama3.1-8b"), engines.hardware_preset("h100")


def common_work(
    presets: tuple[dict[str, Any], Hardware], policy: Policy, out: Path, num_blocks: int = 2000, **limits: object
) -> RunTables:
    engine = engines.virtual(*presets, num_blocks=num_blocks, max_model_len=4096, **limits)
    return run(policy, CommonWork(num_requests=40, rate=12.0, output=(20, 100)), engine, out=out)


def test_expanded_chains_take_the_logged_time(presets: tuple[dict[str, Any], Hardware], tmp_path: Path) -> None:
    expanded = []
    for name, fast in (("jumped", True), ("stepped", False)):
        common_work(presets, FCFS(), tmp_path / name, fast_forward=fast, max_chained_steps=4)
        log = read_run(tmp_path / name)
        assert log.steps["repeat"].max() == 4 or fast
        expanded.append(expanded_steps(log))
        assert expanded[-1]["duration_ns"].sum() == log.steps["duration_ns"].sum()
    for column in ("now_ns", "duration_ns", "context_tokens", "bound"):
        assert np.array_equal(expanded[0][column], expanded[1][column]), column


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_blocks", [2000, 120])
def test_expanded_jumps_equal_the_stepped_run(
    policy: type[Policy], num_blocks: int, presets: tuple[dict[str, Any], Hardware], tmp_path: Path
) -> None:
    common_work(presets, policy(), tmp_path, num_blocks)
    jumped = read_run(tmp_path)
    stepped = common_work(presets, policy(), tmp_path / "stepped", num_blocks, fast_forward=False)
    assert (jumped.steps["repeat"] > 1).any() and (stepped.steps["repeat"] == 1).all()
    assert jumped.digest == stepped.digest
    expanded = expanded_steps(jumped)
    assert [*expanded] == [name for name in stepped.steps if name not in UNKNOWN_WITHIN]
    for name, column in expanded.items():
        assert np.array_equal(column, stepped.steps[name]), name


def test_a_log_that_does_not_fit_its_manifest(presets: tuple[dict[str, Any], Hardware], tmp_path: Path) -> None:
    common_work(presets, ChunkedPrefill(), tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["cost"]["coefficients"]["step_ns"] += 1.0
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"steps: the \d+ steps from \d+ on take \d+ ns by the cost in the manifest"):
        expanded_steps(read_run(tmp_path))
    path.unlink()
    with pytest.raises(ConfigError, match="the log has jumps, and there is no manifest with the cost"):
        expanded_steps(read_run(tmp_path))


def test_a_run_without_jumps_needs_no_rates(tmp_path: Path) -> None:
    engine = engines.stub(num_blocks=256, max_model_len=2048)
    steps = run(FCFS(), CommonWork(num_requests=3), engine).steps
    assert rates_of(engine.executor) is None
    assert np.array_equal(expand(steps, {})["now_ns"], steps["now_ns"])
