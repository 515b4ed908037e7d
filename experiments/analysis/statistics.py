"""Inference from paired differences: intervals and their p-values, Holm's correction, how many pairs would do.

Arrays of differences, one a pair. Everything is deterministic: resampling draws from a fixed seed. Arrays end with an
axis of pairs, `_N`; leading axes are independent samples, so that a simulation of thousands of experiments is one call.

An interval and a p-value come from the same distribution of t: an interval of level 1 - a excludes 0 where p is at most
a, so that a verdict by the one is a verdict by the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np

BOOTSTRAP_FROM = 16
"""Pairs from which on the distribution of t is taken from the data and no longer from Student."""
RESAMPLES = 9_999
TAIL = 10
"""Resamples that must lie beyond a bound for it to be taken from the data."""
MOST_NEEDED = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Bounds of a mean difference; `method` is t, bootstrap-t, or equal where all differences are the same.

    `p`: an interval of level 1 - a, by the same method, excludes 0 where p is at most a.
    """

    low: float
    high: float
    method: str
    p: float

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


def t_density(t: float, df: int) -> float:
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    return math.exp(log_scale - (df + 1) / 2 * math.log1p(t * t / df))


@lru_cache(maxsize=4096)
def t_quantile(share: float, df: int) -> float:
    """The t with P(T <= t) = `share`: Newton's steps from the normal one, which is nearer to 0, never go too far."""
    if share < 0.5:
        return -t_quantile(1 - share, df)
    t, step = NormalDist().inv_cdf(share), 1.0
    while step > 1e-12 * t:
        step = (share - t_cdf(t, df)) / t_density(t, df)
        t += step
    return t


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
    mean, error = mean_and_error(differences_N)
    with np.errstate(invalid="ignore"):  # between infinite values
        low, high = np.quantile(_resampled_t(differences_N), [(1 - level) / 2, (1 + level) / 2], axis=-1)
    return mean - high * error, mean - low * error


def _resampled_t(differences_N: np.ndarray) -> np.ndarray:
    """t of each resample about the mean, float64 [..., RESAMPLES]."""
    n = differences_N.shape[-1]
    drawn = _resamples(n)
    centred = differences_N - differences_N.mean(-1)[..., None]
    means = centred @ drawn / n
    spread = np.maximum(centred**2 @ drawn / n - means**2, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = means / np.sqrt(spread / (n - 1))
    return np.where(np.isnan(t), 0.0, t)


# ---- one sample ----


class Sample:
    """Differences of one metric: intervals of their mean at any level up to `strictest`, and their p, by one method.

    That is bootstrap-t from BOOTSTRAP_FROM pairs on, where resamples reach that far, else Student's t. At least two
    pairs.
    """

    def __init__(self, differences_N: np.ndarray, strictest: float = 0.95) -> None:
        differences = np.asarray(differences_N, dtype=np.float64)
        self.pairs = len(differences)
        mean, error = mean_and_error(differences)
        self.mean, self.error = float(mean), float(error)
        self._t_R: np.ndarray | None = None
        self.method = "t" if np.ptp(differences) else "equal"
        if self.method == "t" and self.pairs >= BOOTSTRAP_FROM and (1 - strictest) / 2 * RESAMPLES >= TAIL:
            t_R = np.sort(_resampled_t(differences))
            if np.isfinite(t_R[[TAIL, -TAIL - 1]]).all():
                self._t_R, self.method = t_R, "bootstrap-t"

    def interval(self, level: float) -> Interval:
        if self.method == "equal":
            return Interval(self.mean, self.mean, "equal", self.p)
        low, high = self._quantile((1 - level) / 2), self._quantile((1 + level) / 2)
        return Interval(self.mean - high * self.error, self.mean - low * self.error, self.method, self.p)

    def _quantile(self, share: float) -> float:
        if self._t_R is None:
            return t_quantile(share, self.pairs - 1)
        return float(np.quantile(self._t_R, share))

    @cached_property
    def p(self) -> float:
        """Two-sided. Of resamples it is never below that of TAIL of them."""
        if self.method == "equal":
            return 0.0 if self.mean else 1.0
        t = self.mean / self.error
        if self._t_R is None:
            return 2 * (1 - t_cdf(abs(t), self.pairs - 1))
        below = float(np.interp(t, self._t_R, np.linspace(0, 1, RESAMPLES)))
        return max(2 * min(below, 1 - below), 2 * TAIL / RESAMPLES)


def interval(differences_N: np.ndarray, level: float = 0.95) -> Interval:
    """Of the mean of one sample of two pairs or more."""
    return Sample(differences_N, level).interval(level)


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

    Samples in the order of their p: the k-th of m has level 1 - (1 - level) / (m - k + 1); the first that does not
    exclude 0 ends the descent, and the rest keep its level. So the chance that any of them wrongly excludes 0 is at
    most 1 - `level`.
    """
    if not samples:
        return []
    family = [Sample(sample, 1 - (1 - level) / len(samples)) for sample in samples]
    found: dict[int, tuple[Interval, float]] = {}
    standing, descending = len(family), True
    for i in sorted(range(len(family)), key=lambda i: family[i].p):
        own_level = 1 - (1 - level) / standing
        found[i] = (family[i].interval(own_level), own_level)
        descending = descending and found[i][0].excludes_zero
        standing -= descending
    return [found[i] for i in range(len(family))]


# ---- planning ----


def power(effect: float, pairs: int, level: float) -> float:
    """The chance that Student's interval of so many pairs excludes 0, `effect` being mean over deviation.

    The tails of the noncentral t, which is (Z + effect sqrt(n)) / S: Z's beyond the bound for a given S, over the
    distribution of S = sqrt(chi2 / df), by Gauss and Legendre's rule.
    """
    df, shift = pairs - 1, effect * math.sqrt(pairs)
    bound = t_quantile((1 + level) / 2, df)
    nodes, weights = _legendre()
    low, high = (max(1 + sign * 9 / math.sqrt(2 * df), 0.0) for sign in (-1, 1))
    spread_S = (low + high + (high - low) * nodes) / 2
    log_density = (df - 1) * np.log(spread_S) - df * (spread_S**2 - 1) / 2
    density = np.exp(log_density) * weights
    beyond = _normal_cdf(shift - bound * spread_S) + _normal_cdf(-shift - bound * spread_S)
    return float((density * beyond).sum() / density.sum())


@lru_cache
def _legendre() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(96)


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    return np.array([math.erfc(-value / math.sqrt(2)) / 2 for value in values.tolist()])


def pairs_needed(
    mean: float, deviation: float, level: float = 0.95, wanted: float = 0.8, at_least: int = 2
) -> int | None:
    """The fewest pairs, `at_least` of them, with which an interval would exclude 0 with probability `wanted`, if mean
    and deviation are as observed. None beyond MOST_NEEDED."""
    if not mean or not deviation:
        return None
    effect, normal = abs(mean) / deviation, NormalDist()
    fewest = ((normal.inv_cdf((1 + level) / 2) + normal.inv_cdf(wanted)) / effect) ** 2  # if the deviation were known
    pairs = max(at_least, min(int(fewest), MOST_NEEDED))
    while pairs <= MOST_NEEDED and power(effect, pairs, level) < wanted:
        pairs += 1
    return pairs if pairs <= MOST_NEEDED else None
