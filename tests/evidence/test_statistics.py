"""Inference against independent references: tables, enumeration, and thousands of simulated experiments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.analysis.statistics import (
    BOOTSTRAP_FROM,
    bootstrap_t_interval,
    holm,
    holm_intervals,
    interval,
    pairs_needed,
    power,
    t_cdf,
    t_interval,
    t_quantile,
)

DRAWS = 4000
PUBLISHED = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    4: (2.776, 4.604),
    9: (2.262, 3.250),
    15: (2.131, 2.947),
    30: (2.042, 2.750),
}
"""Two-sided 95 % and 99 % points of Student's t, from any printed table."""


def intervals(differences_DN: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """What `interval` uses for so many pairs, for all draws at once."""
    if differences_DN.shape[1] < BOOTSTRAP_FROM:
        return t_interval(differences_DN, level)
    parts = [bootstrap_t_interval(part, level) for part in np.array_split(differences_DN, 20)]
    return np.concatenate([low for low, _ in parts]), np.concatenate([high for _, high in parts])


def covered(differences_DN: np.ndarray) -> float:
    low, high = intervals(differences_DN)
    return float(((low <= 0) & (high >= 0)).mean())


@pytest.mark.parametrize("df", PUBLISHED)
def test_student_s_t_as_in_the_tables(df):
    assert (round(t_quantile(0.975, df), 3), round(t_quantile(0.995, df), 3)) == PUBLISHED[df]
    assert t_cdf(t_quantile(0.9, df), df) == pytest.approx(0.9)
    assert t_quantile(0.1, df) == -t_quantile(0.9, df)


@pytest.mark.parametrize("pairs", [5, 10, 16])
def test_a_95_percent_interval_covers_95_percent_of_normal_log_ratios(pairs):
    draws = np.random.default_rng(pairs).normal(size=(DRAWS, pairs))
    assert 0.93 <= covered(draws) <= 0.97


@pytest.mark.parametrize("pairs", [5, 10, 16])
def test_coverage_of_skewed_log_ratios_is_reported(pairs, record_property, capsys):
    """Short of 95 %, as theory says; with 16 pairs the bootstrap repairs most of it."""
    rng = np.random.default_rng(pairs)
    exponential = rng.exponential(size=(DRAWS, pairs)) - 1
    lognormal = rng.lognormal(size=(DRAWS, pairs)) - math.exp(0.5)
    found = {"exponential": covered(exponential), "lognormal": covered(lognormal)}
    for name, share in found.items():
        record_property(f"coverage_{name}_{pairs}", share)
    with capsys.disabled():
        print(
            f"\n  {pairs} pairs: coverage {', '.join(f'{name} {share:.1%}' for name, share in found.items())}", end=""
        )
    assert found["exponential"] > 0.85 and found["lognormal"] > 0.8
    if pairs >= BOOTSTRAP_FROM:
        low, high = t_interval(exponential)
        assert found["exponential"] > float(((low <= 0) & (high >= 0)).mean())


@pytest.mark.parametrize("pairs", [5, 10, 16])
@pytest.mark.parametrize("margin", [0.0, math.log(1.05)])
def test_no_gate_fires_on_equals_more_often_than_its_level(pairs, margin):
    draws = np.random.default_rng(pairs).normal(scale=0.1, size=(DRAWS, pairs))
    low, _ = intervals(draws)
    level = 0.025
    assert (low > margin).mean() <= level + 3 * math.sqrt(level * (1 - level) / DRAWS)


@pytest.mark.parametrize("pairs", [2, 4, 8, 16, 20])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.995])
def test_an_interval_excludes_0_where_its_p_is_at_most_what_is_left_to_its_level(pairs, level):
    rng = np.random.default_rng(pairs)
    for draw in range(25):
        differences = rng.exponential(size=pairs) - 1 + rng.choice([0, 0.3, 1]) * (draw % 2)
        found = interval(differences, level)
        touching = interval(differences, 1 - found.p)
        assert found.excludes_zero == (found.p <= 1 - level)
        assert min(abs(touching.low), abs(touching.high)) < 1e-6 or found.p <= 0.01


def test_p_of_student_is_that_of_the_tables():
    rng = np.random.default_rng(0)
    for df, (at_5, at_1) in PUBLISHED.items():
        for t, p in ((at_5, 0.05), (at_1, 0.01)):
            if df + 1 < BOOTSTRAP_FROM:
                draw = rng.normal(size=df + 1)
                centred = draw - draw.mean()
                differences = centred + t * centred.std(ddof=1) / math.sqrt(df + 1)
                assert interval(differences).p == pytest.approx(p, rel=2e-3)


@pytest.mark.parametrize("pairs", [8, 16])
def test_p_of_equals_is_uniform(pairs):
    draws = np.random.default_rng(1).normal(size=(400, pairs))
    p = np.array([interval(draw).p for draw in draws])
    for share in (0.05, 0.5):
        assert abs((p <= share).mean() - share) <= 3 * math.sqrt(share * (1 - share) / len(p))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.2))
def test_holm_rejects_step_by_step(p_values, alpha):
    rejected, order = set(), sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, i in enumerate(order):
        if p_values[i] * (len(p_values) - rank) > alpha:
            break
        rejected.add(i)
    assert {i for i, p in enumerate(holm(p_values)) if p <= alpha} == rejected


def test_a_family_of_equals_is_wrong_no_more_often_than_its_level():
    rng, experiments = np.random.default_rng(2), 600
    wrong = 0
    for _ in range(experiments):
        shared = rng.normal(size=10)
        family = [shared * weight + rng.normal(size=10) for weight in (0, 0.5, 1, 2, 3)]
        wrong += any(found.excludes_zero for found, _ in holm_intervals(family))
    assert wrong / experiments <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / experiments)


def test_a_family_s_intervals_are_wider_and_never_narrower_than_alone():
    rng = np.random.default_rng(3)
    family = [rng.normal(shift, 1, size=12) for shift in (0, 0.2, 1, 3)]
    for sample, (found, level) in zip(family, holm_intervals(family), strict=True):
        alone = interval(sample)
        assert level >= 0.95 and found.low <= alone.low and found.high >= alone.high
    assert holm_intervals(family)[3][0].excludes_zero and not holm_intervals(family)[0][0].excludes_zero


def test_equal_differences_have_an_interval_without_width():
    assert interval(np.zeros(5)).method == "equal" and not interval(np.zeros(5)).excludes_zero
    assert interval(np.full(20, 0.1)).excludes_zero


def test_few_values_that_differ_fall_back_to_student():
    """Most resamples of one value that stands out have no spread: bootstrap-t would have no bounds."""
    assert interval(np.append(np.zeros(15), 1.0)).method == "t"


@pytest.mark.parametrize(("mean", "deviation"), [(0.1, 0.15), (0.05, 0.2)])
def test_so_many_pairs_do_as_were_said_to_be_needed(mean, deviation):
    needed = pairs_needed(mean, deviation)
    draws = np.random.default_rng(4).normal(mean, deviation, size=(DRAWS, needed))
    low, high = t_interval(draws)
    assert 0.77 <= ((low > 0) | (high < 0)).mean() <= 0.84
    assert pairs_needed(0.0, 1.0) is None and pairs_needed(1e-6, 1.0) is None


@pytest.mark.parametrize(
    ("mean", "deviation", "level", "needed"),
    [(-0.38, 0.107, 0.9944, 5), (-0.38, 0.107, 0.95, 3), (-0.38, 0.2, 0.9944, 8), (1.0, 1.0, 0.95, 10)],
)
def test_pairs_that_are_needed_are_those_of_the_noncentral_t(mean, deviation, level, needed):
    """The last as in any table of sample sizes of the paired t test: effect 1, power 0.8."""
    assert pairs_needed(mean, deviation, level) == needed
    assert power(mean / deviation, needed - 1, level) < 0.8 <= power(mean / deviation, needed, level)
    assert pairs_needed(mean, deviation, level, at_least=needed + 3) == needed + 3


@pytest.mark.parametrize(
    ("effect", "pairs", "level"), [(3.55, 4, 0.9944), (0.3, 5, 0.95), (5.0, 2, 0.95), (0.1, 90, 0.9)]
)
def test_power_is_how_often_an_interval_excludes_0(effect, pairs, level):
    low, high = t_interval(np.random.default_rng(0).normal(effect, 1, size=(40_000, pairs)), level)
    assert power(effect, pairs, level) == pytest.approx(((low > 0) | (high < 0)).mean(), abs=0.008)
    assert power(-effect, pairs, level) == pytest.approx(power(effect, pairs, level))
