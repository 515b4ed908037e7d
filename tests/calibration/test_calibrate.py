"""The grid against what an engine does with it, and the fit against a machine whose costs are known."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
from conftest import LIMITS, PlantedExecutor, planted

from schedlab.experiments.studies.calibrate import (
    fitted,
    held_out_errors,
    make_profile,
    tolerated,
)
from schedlab.experiments.studies.grid import Extent, make_cells
from schedlab.experiments.studies.measuring import Bench, MeasuredStep, run_grid
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import Point, Profile, predict_ns
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

MACHINE = Coefficients(
    step_ns=2e6, request_ns=8e4, prefill_ns=1e5, prefill_step_ns=5e5, token_ns=5e4, head_ns=2e5, pair_ns=60.0,
    key_ns=900.0, decode_key_ns=1100.0, copy_ns=2e5, copied_byte_ns=4.0,
)  # fmt: skip
EXTENT = Extent(max_batch=8, max_context=400, max_prefill=256, max_cell_tokens=1024)


def noisy(sigma: float, spikes: float = 0.0) -> Callable[[], float]:
    draw = random.Random(0)
    return lambda: float(np.exp(draw.gauss(0, sigma))) * (3.0 if draw.random() < spikes else 1.0)


def grid_on(executor: PlantedExecutor, passes: int = 3) -> list[MeasuredStep]:
    return run_grid(planted(executor), EXTENT, passes=passes, budget_s=60.0, say=lambda line: None)


def unseen() -> list[Work]:
    """Steps that a run takes and the grid does not contain."""
    return [
        Work.total([Work.decode(context)] * n + [Work.prefill(start, chunk, False)])
        for n in (2, 5, 7) for context in (90, 300) for start, chunk in ((0, 30), (300, 200))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "extent", [EXTENT, Extent(1, 1, 1, 1), Extent(5, 100, 7, 90), Extent(32, 1500, 700, 4000), Extent(40, 30, 200, 12)]
)
@pytest.mark.parametrize("block_size", [1, 16, 50])
@pytest.mark.parametrize("caching", [True, False])
def test_an_engine_does_what_the_cells_say(extent: Extent, block_size: int, caching: bool) -> None:
    """Bench itself asserts the columns of the log; here every input of the cost is compared with the batch's."""
    executor = PlantedExecutor(MACHINE)
    config = replace(LIMITS, block_size=block_size, num_blocks=16384 // block_size, enable_prefix_caching=caching)
    bench = Bench(planted(executor, config), make_cells(extent, block_size, caching))
    executor.works.clear()
    measured = bench.run()
    assert [step.point.work for step in measured] == executor.works
    assert [step.point.duration_ns for step in measured] == [round(MACHINE.total_ns(work)) for work in executor.works]


def test_the_grid_reaches_its_extent() -> None:
    works = [work for cell in make_cells(EXTENT, 16) for work in cell.works]
    assert max(work.decodes for work in works) >= EXTENT.max_batch
    assert max(work.tokens - work.decodes for work in works) == EXTENT.max_prefill
    assert max(work.prefill_keys for work in works if work.prefills == 1) >= EXTENT.max_context
    kinds = {cell.name: any(cell.copies) for cell in make_cells(EXTENT, 16)}
    quiet = dict.fromkeys(("prefill", "long context", "short end", "decode", "mixed"), False)
    assert kinds == {**quiet, "swap": True}


def test_passes_visit_the_cells_in_orders_of_their_own() -> None:
    bench = Bench(planted(PlantedExecutor(MACHINE)), make_cells(EXTENT, 16, prefix_caching=True))
    first, second = ([step.cell for step in bench.run()] for _ in range(2))
    assert first != second and sorted(first) == sorted(second)


def test_a_planted_machine_is_found_again() -> None:
    measured = grid_on(PlantedExecutor(MACHINE), passes=2)
    truth = np.array([MACHINE.total_ns(work) for work in unseen()])
    rates = fitted([step.point for step in measured])
    assert np.abs(predict_ns(rates, [Point(work, 1) for work in unseen()]) / truth - 1).max() < 0.01
    assert held_out_errors(measured).mean() < 0.01
    assert rates.token_ns + rates.linear_ns == pytest.approx(MACHINE.token_ns, rel=0.02)
    for name in ("pair_ns", "decode_key_ns", "copied_byte_ns"):
        assert getattr(rates, name) == pytest.approx(getattr(MACHINE, name), rel=0.02), name


@pytest.mark.parametrize(("sigma", "spikes"), [(0.25, 0.0), (0.1, 0.05)])
def test_the_sum_of_disturbed_steps_is_met(sigma: float, spikes: float) -> None:
    """Of right-skewed durations a fit of relative residuals falls short: what counts in a run is their sum."""
    measured = grid_on(PlantedExecutor(MACHINE, noisy(sigma, spikes)), passes=4)
    rates = fitted([step.point for step in measured])
    truth = sum(MACHINE.total_ns(work) for work in unseen()) * np.exp(sigma**2 / 2) * (1 + 2 * spikes)
    modelled = predict_ns(rates, [Point(work, 1) for work in unseen()]).sum()
    assert modelled == pytest.approx(truth, rel=0.08)  # the typical step of the second machine is 10 % shorter


def test_held_out_steps_are_those_of_cells_that_the_fit_has_not_seen() -> None:
    """A machine that is slow in one cell only: a fit that had seen a step of it would model the others better."""
    executor = PlantedExecutor(MACHINE)
    measured = grid_on(executor, passes=2)
    slow = next(step.cell for step in measured if step.name == "mixed")
    bent = [
        replace_duration(step, 5 * step.point.duration_ns) if step.cell == slow else step for step in measured
    ]  # fmt: skip
    errors = held_out_errors(bent)
    of_slow = np.array([step.cell == slow for step in measured])
    assert errors[of_slow] == pytest.approx(0.8, abs=0.02)


def replace_duration(step: MeasuredStep, duration_ns: int) -> MeasuredStep:
    return step._replace(point=step.point._replace(duration_ns=duration_ns))


def test_a_profile_of_measured_steps_drives_the_virtual_clock(
    shape: ModelConfig, cpu: Hardware, tmp_path: Path
) -> None:
    measured = grid_on(PlantedExecutor(MACHINE, noisy(0.05)))
    errors = held_out_errors(measured)
    roofline = Roofline(shape, "fp32")
    profile = make_profile(measured, errors, roofline, cpu, {"engine": "planted"})
    assert profile.error.held_out_mean < tolerated(profile.error)
    assert profile.error.repeat_difference == pytest.approx(0.056, rel=0.2)  # 2 sigma / sqrt(pi)
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile and loaded.identity["measured"] == {"engine": "planted"}
    executor = CostExecutor(shape, cpu, weight_dtype="fp32", profile=tmp_path / "profile.json")
    assert executor.coefficients == profile.coefficients
    with pytest.raises(ConfigError, match="profile: measured with weight_dtype = fp32, this run has bf16"):
        CostExecutor(shape, cpu, weight_dtype="bf16", profile=tmp_path / "profile.json")


def test_passes_end_with_their_time() -> None:
    lines: list[str] = []
    measured = run_grid(planted(PlantedExecutor(MACHINE)), EXTENT, passes=9, budget_s=0.0, say=lines.append)
    steps = sum(len(cell.moves) for cell in make_cells(EXTENT, 16, prefix_caching=True))
    assert len(measured) == 2 * steps
    assert lines[-1] == "2 of 9 passes: another would exceed calibrate.budget_s=0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 16}, "calibrate.max_batch: the engine as it is set up admits 7 at most, found 8"),
        ({"max_model_len": 256}, "calibrate.max_context: the engine as it is set up admits 192 at most, found 400"),
        ({"max_num_batched_tokens": 200}, "calibrate.max_prefill: the engine as it is set up admits 183 at most"),
        ({"num_blocks": 100}, "calibrate.max_cell_tokens: the engine as it is set up admits 800 at most, found 1024"),
    ],
)
def test_a_grid_beyond_the_engines_limits(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_grid(planted(PlantedExecutor(MACHINE), replace(LIMITS, **changes)), EXTENT, passes=1, budget_s=1.0)


def test_a_grid_too_small_for_a_profile(shape: ModelConfig, cpu: Hardware) -> None:
    extent = Extent(2, 2, 2, 2)
    measured = run_grid(planted(PlantedExecutor(MACHINE)), extent, passes=2, budget_s=9.0, say=lambda line: None)
    with pytest.raises(ConfigError, match=r"profile: expected at least \d+ different steps, found \d+"):
        make_profile(measured, np.zeros(len(measured)), Roofline(shape, "fp32"), cpu, {})
    with pytest.raises(ConfigError, match=r"calibrate.max_batch: expected at least 1, found 0"):
        Extent(max_batch=0)
