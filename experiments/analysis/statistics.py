"""Inference from paired differences: intervals, permutation p-values, Holm's correction, how many pairs would do.

Knows arrays of differences, one a pair, and nothing of runs or metrics. Everything is deterministic: resampling draws
from a fixed seed. Arrays end with an axis of pairs, `_N`; leading axes are independent samples, so that a simulation of
thousands of experiments is one call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

BOOTSTRAP_FROM = 16
"""Pairs from which on the distribution of t is taken from the data and no longer from Student."""
RESAMPLES = 9_999
EXACT_UP_TO = 20
"""Pairs up to which all sign flips are enumerated."""
MOST_NEEDED = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a mean difference; `method` is t, bootstrap-t, or equal where all differences are the same."""

    low: float
    high: float
    method: str

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


# ---- Student's t ----


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) for a whole number of degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (sine * cosine, 0.0) if df % 2 else (sine, 0.0)
    for k in range(2 + df % 2, df + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    inside = 2 / math.pi * (angle + total) if df % 2 else total
    return 0.5 + math.copysign(inside / 2, t)


@lru_cache(maxsize=1024)
def t_quantile(share: float, df: int) -> float:
    """The t with P(T <= t) = `share`, by bisection."""
    if share < 0.5:
        return -t_quantile(1 - share, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < share:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < share else (low, middle)
    return (low + high) / 2


def mean_and_error(differences_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and its standard error."""
    n = differences_N.shape[-1]
    return differences_N.mean(-1), differences_N.std(-1, ddof=1) / math.sqrt(n)


def t_interval(differences_N: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Student's interval of the mean. At least two pairs."""
    mean, error = mean_and_error(differences_N)
    half = t_quantile((1 + level) / 2, differences_N.shape[-1] - 1) * error
    return mean - half, mean + half


# ---- resampling ----


@lru_cache(maxsize=4)
def _resamples(pairs: int) -> np.ndarray:
    """How often each pair is drawn, float64 [pairs, RESAMPLES]."""
    rng = np.random.default_rng(pairs)
    return rng.multinomial(pairs, np.full(pairs, 1 / pairs), size=RESAMPLES).T.astype(np.float64)


def bootstrap_t_interval(differences_N: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Efron's bootstrap-t: the mean, minus its error times the quantiles of t among resamples.

    (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, 12.5.) A resample without spread has an infinite t,
    and so may a bound of a sample in which few values differ.
    """
    n = differences_N.shape[-1]
    mean, error = mean_and_error(differences_N)
    drawn = _resamples(n)
    centred = differences_N - mean[..., None]
    means = centred @ drawn / n
    spread = np.maximum(centred**2 @ drawn / n - means**2, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = means / np.sqrt(spread / (n - 1))
    t = np.where(np.isnan(t), 0.0, t)
    with np.errstate(invalid="ignore"):  # between infinite values
        low, high = np.quantile(t, [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return mean - high * error, mean - low * error


def interval(differences_N: np.ndarray, level: float = 0.95) -> Interval:
    """Of the mean of one sample: bootstrap-t from BOOTSTRAP_FROM pairs on where that is finite, else Student's."""
    differences = np.asarray(differences_N, dtype=np.float64)
    if not np.ptp(differences):
        return Interval(float(differences[0]), float(differences[0]), "equal")
    if len(differences) >= BOOTSTRAP_FROM:
        low, high = bootstrap_t_interval(differences, level)
        if np.isfinite([low, high]).all():
            return Interval(float(low), float(high), "bootstrap-t")
    low, high = t_interval(differences, level)
    return Interval(float(low), float(high), "t")


def sign_flip(differences_N: np.ndarray) -> tuple[float, float]:
    """Two-sided p of the hypothesis that each difference might as well have the other sign, and the smallest p that so
    many pairs can give.

    Fisher's randomisation test of the mean: exact up to EXACT_UP_TO pairs, else RESAMPLES random flips.
    """
    differences = np.asarray(differences_N, dtype=np.float64)
    observed = abs(differences.sum()) * (1 - 1e-12)
    if len(differences) <= EXACT_UP_TO:
        sums = np.zeros(1)
        for difference in differences[1:]:  # the sign of the first decides that of the sum alone
            sums = np.concatenate([sums + difference, sums - difference])
        extreme = np.abs(sums + differences[0]) >= observed
        return float(extreme.mean()), 1 / len(sums)
    signs = np.random.default_rng(len(differences)).choice([-1.0, 1.0], size=(RESAMPLES, len(differences)))
    extreme = np.abs(signs @ differences) >= observed
    return float((1 + extreme.sum()) / (1 + RESAMPLES)), 1 / (1 + RESAMPLES)


# ---- families ----


def holm(p_values: list[float]) -> list[float]:
    """Adjusted p-values: reject where at most alpha, and the chance of any false rejection is at most alpha.

    (Holm, Scandinavian Journal of Statistics 6(2), 1979.)
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        floor = max(floor, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = floor
    return adjusted


def holm_intervals(samples: list[np.ndarray], level: float = 0.95) -> list[tuple[Interval, float]]:
    """An interval for each of a family's samples and the level it is of: those that exclude 0 are Holm's rejections.

    Samples in the order of their t: the k-th of m has level 1 - (1 - level) / (m - k + 1); the first that does not
    exclude 0 ends the descent, and the rest keep its level. So the chance that any of them wrongly excludes 0 is at
    most 1 - `level`.
    """
    order = sorted(range(len(samples)), key=lambda i: -strength(samples[i]))
    found: dict[int, tuple[Interval, float]] = {}
    standing, descending = len(samples), True
    for i in order:
        own_level = 1 - (1 - level) / standing
        found[i] = (interval(samples[i], own_level), own_level)
        descending = descending and found[i][0].excludes_zero
        standing -= descending
    return [found[i] for i in range(len(samples))]


def strength(differences_N: np.ndarray) -> float:
    """|t| of the mean; infinite for equal differences other than 0."""
    mean, error = mean_and_error(np.asarray(differences_N, dtype=np.float64))
    if not error:
        return math.inf if mean else 0.0
    return float(abs(mean) / error)


# ---- planning ----


def pairs_needed(mean: float, deviation: float, level: float = 0.95, power: float = 0.8) -> int | None:
    """Pairs with which an interval would exclude 0 with probability `power`, if mean and deviation are as observed.

    n = ((t + z) s / mean)^2 with Student's t of n - 1 degrees, by fixed point from the normal one. None beyond
    MOST_NEEDED.
    """
    if not mean or not deviation:
        return None
    normal = NormalDist()
    effect, reserve = abs(mean) / deviation, normal.inv_cdf(power)
    needed = ((normal.inv_cdf((1 + level) / 2) + reserve) / effect) ** 2
    for _ in range(8):
        if needed > MOST_NEEDED:
            return None
        needed = ((t_quantile((1 + level) / 2, max(math.ceil(needed) - 1, 1)) + reserve) / effect) ** 2
        needed = max(needed, 2.0)
    return None if needed > MOST_NEEDED else math.ceil(needed)
