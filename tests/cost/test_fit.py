"""The fit against planted rates, an independent solver, and its file."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schedlab.framework.batch import Batch
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import (
    Point,
    Profile,
    fit,
    fit_profile,
    nonnegative_least_squares,
    predict_ns,
    repeat_difference,
)
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

MIB = 1 << 20
PLANTED = Coefficients(
    step_ns=4e6, request_ns=3e4, prefill_ns=2e5, prefill_step_ns=6e5, token_ns=1e4, linear_ns=9e4, linear_ridge=32.0,
    head_ns=1e6, row_ns=2e4, pair_ns=40.0, key_ns=500.0, decode_key_ns=900.0, copy_ns=5e4, copied_byte_ns=0.06,
)  # fmt: skip


def designed_works() -> list[Work]:
    """A grid in the manner of a calibration: prefills, decodes, mixtures, long contexts, swaps."""
    decodes = [Work.total([Work.decode(context)] * n) for n in (1, 4, 16, 64, 128) for context in (16, 256, 2000)]
    prefills = [
        Work.prefill(start, count, emits)
        for start in (0, 1000) for count in (1, 8, 32, 128, 512, 2048) for emits in (True, False)
    ]  # fmt: skip
    mixed = [
        Work.total([Work.decode(300)] * n + [Work.prefill(0, count)] * k)
        for n in (2, 8, 32) for count in (16, 256) for k in (1, 4)
    ]  # fmt: skip
    swaps = [Work.total([Work.decode(100)] * 4) + Work(copied_bytes=k * MIB) for k in (1, 16, 256)]
    return decodes + prefills + mixed + swaps


def measured(works: list[Work], noise: float, outliers: float = 0.0, repeats: int = 3, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    factors = np.exp(noise * rng.standard_normal((repeats, len(works)))) * np.where(
        rng.random((repeats, len(works))) < outliers, 4.0, 1.0
    )
    return [
        Point(work, round(PLANTED.total_ns(work) * factor))
        for row in factors
        for work, factor in zip(works, row, strict=True)
    ]


@pytest.fixture(scope="module")
def profile(smollm: ModelConfig, h100: Hardware) -> Profile:
    return fit_profile(measured(designed_works(), noise=0.03), Roofline(smollm), h100)


def test_exact_points_give_the_planted_rates() -> None:
    fitted = fit(measured(designed_works(), noise=0.0, repeats=1))
    assert fitted.linear_ridge == PLANTED.linear_ridge
    for name in ("step_ns", "token_ns", "linear_ns", "pair_ns", "key_ns", "decode_key_ns", "copy_ns", "copied_byte_ns"):
        assert getattr(fitted, name) == pytest.approx(getattr(PLANTED, name), rel=0.01), name


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_noisy_points_predict_unseen_steps(outliers: float) -> None:
    fitted = fit(measured(designed_works(), noise=0.05, outliers=outliers))
    unseen = [
        Work.total([Work.decode(c)] * n + [Work.prefill(64, k)]) for c in (90, 700) for n in (2, 50) for k in (20, 700)
    ]
    truth = np.array([PLANTED.total_ns(work) for work in unseen])
    errors = np.abs(predict_ns(fitted, [Point(work, 1) for work in unseen]) / truth - 1)
    assert errors.mean() < 0.03 and errors.max() < 0.08
    assert fitted.decode_key_ns == pytest.approx(PLANTED.decode_key_ns, rel=0.1)
    assert fitted.pair_ns == pytest.approx(PLANTED.pair_ns, rel=0.1)
    assert fitted.copied_byte_ns == pytest.approx(PLANTED.copied_byte_ns, rel=0.1)


def test_held_out_error_is_that_of_the_noise(profile: Profile) -> None:
    """With 3 % of noise |error| averages 2.4 %, and two repeats differ by 3.4 %."""
    error = profile.error
    assert 0.015 < error.held_out_mean < 0.04 < error.held_out_p90 < 0.08
    assert error.repeat_difference == pytest.approx(0.034, rel=0.25)
    assert (error.num_points, error.num_works) == (3 * len(designed_works()), len(designed_works()))


def test_repeats_are_compared_with_the_one_before() -> None:
    a, b = Work.decode(1), Work.decode(2)
    assert repeat_difference([Point(a, 100), Point(b, 10), Point(a, 300), Point(b, 10)]) == pytest.approx(0.5)
    assert repeat_difference([Point(a, 100)]) is None


@pytest.mark.parametrize("seed", range(10))
def test_nonnegative_least_squares_by_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((12, 5)), rng.standard_normal(12)
    a[:, 4] = a[:, 3]  # collinear columns are common among features
    best = float(b @ b)
    for size in range(1, 6):
        for chosen in itertools.combinations(range(5), size):
            x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.sum((a[:, chosen] @ x - b) ** 2)))
    x = nonnegative_least_squares(a, b)
    assert (x >= 0).all()
    assert np.sum((a @ x - b) ** 2) == pytest.approx(best)


# ---- a profile in use ----


def test_an_executor_takes_its_durations_from_the_profile(
    profile: Profile, smollm: ModelConfig, h100: Hardware, make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    profile.save(tmp_path / "profile.json")
    executor = CostExecutor(smollm, h100, profile=tmp_path / "profile.json")
    executor.allocate(1000, 16, 1000, 128)
    batches = [make_batch(contexts=[300] * 16), make_batch([(0, 100, 100)], [50]), make_batch(contexts=[9], copies=4)]
    for batch in batches:
        work = Work.of_batch(batch, executor.block_bytes(16))
        result = executor.execute(batch)
        assert result.duration_ns == pytest.approx(profile.coefficients.total_ns(work), abs=1.0)
        assert result.bound == "overhead"  # the planted machine is far slower than the roofline of an H100
    assert executor.decode_cost(16).duration_ns(16 * 300) == executor.execute(batches[0]).duration_ns
    assert executor.jumpable


def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_rates_read_as_physics(profile: Profile, smollm: ModelConfig) -> None:
    achieved = profile.achieved(Roofline(smollm))
    assert achieved["copied_bytes_per_s"] == pytest.approx(1e9 / 0.06, rel=0.1)
    assert achieved["decode_kv_bytes_per_s"] == pytest.approx(23_040 / 900e-9, rel=0.1)
    assert achieved["linear_flops"] == pytest.approx(2 * 106_168_320 / 100e-6, rel=0.1)


def test_unmeasured_copies_come_from_the_preset(smollm: ModelConfig, h100: Hardware) -> None:
    points = [point for point in measured(designed_works(), 0.01, repeats=1) if not point.work.copied_bytes]
    profile = fit_profile(points, Roofline(smollm), h100)
    assert not profile.measured_copies and profile.error.repeat_difference is None
    coefficients = profile.coefficients_for(Roofline(smollm), h100)
    assert coefficients.copied_byte_ns == Coefficients.from_roofline(Roofline(smollm), h100).copied_byte_ns > 0
    assert coefficients.step_ns == profile.coefficients.step_ns


def test_a_profile_of_something_else_is_refused(
    profile: Profile, llama: ModelConfig, smollm: ModelConfig, h100: Hardware
) -> None:
    with pytest.raises(ConfigError, match="profile: measured with hidden_size = 576, this run has 4096"):
        CostExecutor(llama, h100, profile=profile)
    with pytest.raises(ConfigError, match="profile: measured with hardware = h100, this run has other"):
        CostExecutor(smollm, replace(h100, name="other"), profile=profile)
    with pytest.raises(ConfigError, match="profile: measured with kv_cache_dtype = bf16, this run has fp8"):
        CostExecutor(smollm, h100, kv_cache_dtype="fp8", profile=profile)


def test_files_that_are_no_profile(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="expected a readable file, found: No such file"):
        Profile.load(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        Profile.load(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="expected a file written by schedlab calibrate"):
        Profile.load(path)
    profile.save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(ConfigError, match="expected version 1, found 99; calibrate again"):
        Profile.load(path)
    del content["points"]["rows"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="incomplete or damaged: KeyError: 'rows'"):
        Profile.load(path)


def test_points_that_cannot_make_a_profile(smollm: ModelConfig, h100: Hardware) -> None:
    roofline = Roofline(smollm)
    decodes = [Point(Work.decode(c), 1000) for c in range(1, 50)]
    with pytest.raises(ConfigError, match="expected measured prefill steps, found none"):
        fit_profile(decodes, roofline, h100)
    with pytest.raises(ConfigError, match="expected at least 30 different steps, found 2"):
        fit_profile([Point(Work.decode(1), 9), Point(Work.prefill(0, 9), 9)], roofline, h100)
    with pytest.raises(ConfigError, match="expected durations above 0 ns, found 0"):
        fit_profile([*decodes, Point(Work.prefill(0, 9), 0)], roofline, h100)
