"""Better, worse or inconclusive: what paired replicates of runs say of a variant against its baseline.

statistics.py has the inference, replicates.py says which runs belong together. Shows and writes nothing: see
compare.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.analysis.metrics import check_metric
from schedlab.experiments.analysis.statistics import Interval, holm, holm_intervals, interval, pairs_needed
from schedlab.experiments.analysis.table import Comparison, Run
from schedlab.experiments.sweep.replicates import Question, questions
from schedlab.framework.errors import ConfigError

LEVEL = 0.95
EFFECT = 0.01
"""Smallest relative change that matters, where nothing is asked."""
PRIMARY = "goodput/requests_per_s"
SECONDARY = (
    "ttft/mean", "ttft/p50", "ttft/p99", "tpot/mean", "tpot/p99", "itl/p99", "e2e/mean", "e2e/p99", "queue/mean",
    "throughput/output_tokens_per_s", "slo/attainment", "prefix/hit_rate", "preemptions/recompute", "fairness/jain",
)  # fmt: skip
"""What is looked at beside the primary metric where nothing is asked; those that no run knows are left out."""
LOWER_IS_BETTER = (
    "ttft", "tpot", "itl", "e2e", "queue", "preemptions", "recomputed_tokens", "backlog_end", "makespan_s", "scheduler",
    "batch/idle_slot_share", "requests/rejected",
    "requests/shed", "requests/queue_full", "requests/rate_limited", "shed_share", "requests/timed_out",
    "requests/abandoned", "offered/given_up", "offered/attempts", "offered/ttft", "offered/e2e",
    "program", "requests/aborted", "requests/length_capped", "requests/failed",
)  # fmt: skip
HIGHER_IS_BETTER = ("throughput", "goodput", "slo", "prefix", "fairness", "requests/finished")


BETTER_IN_A_PART = {
    "slo_attainment": 1, "finished": 1, "output_tokens_per_s": 1, "ttft_p99": -1, "tpot_p99": -1, "rejected": -1,
}  # fmt: skip
"""Of the figures of one SLO class or client."""


def better_when(metric: str) -> int:
    """-1 if lower is better, 1 if higher is, 0 for a metric that is neither."""
    group = metric.partition("/")[0]
    if group in ("class", "client"):
        return BETTER_IN_A_PART.get(metric.rpartition("/")[2], 0)
    if {metric, group, metric.rpartition("/")[0]} & set(LOWER_IS_BETTER):
        return -1
    return int(metric in HIGHER_IS_BETTER or group in HIGHER_IS_BETTER)


@dataclass(frozen=True, slots=True)
class Paired:
    """One metric of both sides, a pair for each replicate. `scale` is `ratio` where all values are above 0, for then
    log-ratios can be taken; else `difference`, in the metric's own unit."""

    metric: str
    variant_N: tuple[float, ...]
    baseline_N: tuple[float, ...]

    @property
    def scale(self) -> str:
        return "ratio" if min(self.variant_N + self.baseline_N) > 0 else "difference"

    @property
    def differences_N(self) -> np.ndarray:
        variant, baseline = np.array(self.variant_N), np.array(self.baseline_N)
        if self.scale == "ratio":
            return np.asarray(np.log(variant) - np.log(baseline))
        return np.asarray(variant - baseline)

    def mattering(self, effect: float) -> float:
        """The smallest change that matters, as `shown` tells changes; `effect` is relative."""
        if self.scale == "ratio":
            return effect
        return effect * max(abs(float(np.mean(side))) for side in (self.variant_N, self.baseline_N))

    def shown(self, difference: float) -> float:
        """A mean difference as it is told: relative, or as it is."""
        return math.expm1(min(difference, 700.0)) if self.scale == "ratio" else difference


@dataclass(frozen=True, slots=True)
class Finding:
    """What the pairs say of one metric.

    `change`, `low` and `high` are relative (0.05 is 5 % more) where `scale` is ratio, else in the metric's unit. The
    bounds are those of an interval of level `level`, which is Holm's for all but the primary metric: its verdict is
    whether it excludes 0, and whether `change` is as large as `matters`, in the same terms. `low_alone` and
    `high_alone` bound the metric looked at by itself. `p` is that of the interval alone, `p_holm` corrected for the
    family: the interval excludes 0 where this is at most 1 - the level of the answer. `needed`: about so many pairs
    would do. Without an interval `low` and the like are None.
    """

    metric: str
    primary: bool
    pairs: int
    scale: str
    baseline: float
    variant: float
    change: float
    low: float | None
    high: float | None
    level: float
    low_alone: float | None
    high_alone: float | None
    method: str | None
    p: float | None
    p_holm: float | None
    matters: float
    verdict: str
    needed: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and what was found. `effect`: the smallest relative change that matters. `refused` says why no
    interval is given, where none is."""

    condition: str
    variant: str
    baseline: str
    pairs: int
    effect: float
    findings: tuple[Finding, ...]
    refused: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        where = f" ({self.condition})" if self.condition else ""
        return f"{self.variant} against {self.baseline}{where}"

    def finding(self, metric: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.metric == metric), None)


@dataclass(frozen=True, slots=True)
class Gate:
    """`METRIC ±N%`: a regression beyond `margin` (relative, signed) is not wanted."""

    metric: str
    margin: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        """From `ttft/p99 +5%`. ConfigError for anything else, and for a gate against an improvement."""
        match = re.fullmatch(r"\s*(\S+)\s+([+-]\d+(?:\.\d+)?)\s*%\s*", text)
        if match is None:
            raise ConfigError(f"--gate {text!r}: expected a metric and a change, as in 'ttft/p99 +5%'")
        metric, margin = match[1], float(match[2]) / 100
        check_metric(metric, "--gate")
        good = better_when(metric)
        if not good:
            raise ConfigError(f"--gate {text!r}: {metric} is neither better when higher nor when lower")
        if match[2][0] != "-+"[good < 0]:
            expected = f"{'+' if good < 0 else '-'}{match[2][1:]}%"
            raise ConfigError(f"--gate {text!r}: a change for the worse is expected, {metric} {expected}")
        if margin <= -1:
            raise ConfigError(f"--gate {text!r}: nothing falls by {-margin:.0%}")
        return cls(metric, margin)

    def __str__(self) -> str:
        return f"{self.metric} {self.margin * 100:+g}%"


@dataclass(frozen=True, slots=True)
class Judged:
    """A gate on one question: `regressed` only if the interval of level `level` lies beyond the margin as a whole."""

    gate: str
    question: str
    regressed: bool
    low: float | None
    high: float | None
    level: float
    reason: str


@dataclass(frozen=True)
class Verdicts:
    """All answers. `notes` are what a reader must know besides."""

    primary: str
    level: float
    answers: tuple[Answer, ...]
    gates: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()
    runs: int = 0
    comparison: Comparison | None = field(default=None, repr=False, compare=False)

    @property
    def regressed(self) -> bool:
        return any(gate.regressed for gate in self.gates)

    def as_json(self) -> dict[str, Any]:
        return {
            "primary": self.primary,
            "level": self.level,
            "runs": self.runs,
            "answers": [asdict(answer) for answer in self.answers],
            "gates": [asdict(gate) for gate in self.gates],
            "notes": list(self.notes),
            "settings": self.comparison.settings if self.comparison else [],
        }


def compare_runs(
    directories: Iterable[str | Path], *, baseline: str | None = None, primary: str = PRIMARY,
    metrics: Sequence[str] | None = None, gates: Sequence[str] = (), level: float = LEVEL, effect: float = EFFECT,
) -> Verdicts:  # fmt: skip
    """Judge all finished runs in and below `directories`, paired by what they were offered.

    `baseline` names a variant, a policy or one of the directories; the first found, if None. `primary` is the one
    metric that a question is about; `metrics` are the others, a family that is corrected for its size. `effect` is the
    smallest relative change that matters; that is never less than the error which the runs' clock states. ConfigError
    for a name that is none, and for directories without runs.
    """
    wanted = [Gate.parse(gate) for gate in gates]
    check_metric(primary, "--primary")
    for metric in metrics or ():
        check_metric(metric, "--metric")
    roots = list(dict.fromkeys(Path(directory) for directory in directories))
    found = {root: Comparison.read([root], required=True) for root in roots}
    runs = {root: comparison.runs for root, comparison in found.items()}
    everything = Comparison([run for of_root in runs.values() for run in of_root])
    asked, notes = questions(roots, runs, baseline)
    looked_at = tuple(dict.fromkeys((primary, *(SECONDARY if metrics is None else metrics))))
    answers = tuple(answer(question, looked_at, level, effect) for question in asked)
    judged = judge_all(wanted, asked, answers, level)
    if not asked:
        notes.append("nothing to compare: the runs are of one variant")
    total = len(everything.complete)
    return Verdicts(primary, level, answers, judged, tuple(notes), total, everything)


# ---- one question ----


def answer(question: Question, metrics: Sequence[str], level: float, effect: float = EFFECT) -> Answer:
    """The first of `metrics` is the primary one."""
    pairs = question.shared
    notes, refused = pairing_notes(question), refusal(question)
    if (stated := stated_error(question)) > effect:
        notes.append(f"changes below {stated:.1%} do not matter here: it is the error that the clock's profile states")
    samples = [s for s in (paired(question, metric) for metric in metrics) if s is not None and len(s.variant_N)]
    judging = Judging(metrics[0], level, max(effect, stated))
    findings = [simple_finding(s, judging) for s in samples] if refused else judge(samples, judging)
    return Answer(
        question.condition, question.variant, question.baseline, len(pairs), judging.effect, tuple(findings), refused,
        tuple(notes),
    )  # fmt: skip


def stated_error(question: Question) -> float:
    """Of times modelled by a profile: its mean relative error over steps that it had not seen; 0 where none is."""
    sides = (*question.variant_runs.values(), *question.baseline_runs.values())
    stated = [(run.manifest.get("cost") or {}).get("held_out_error") for runs in sides for run in runs]
    return max((float(error) for error in stated if isinstance(error, int | float)), default=0.0)


def refusal(question: Question) -> str | None:
    """Why the pairs allow no interval, or None."""
    distinct = len(question.shared)
    if distinct >= 2:
        return None
    runs = min(
        sum(len(runs) for runs in question.variant_runs.values()),
        sum(len(runs) for runs in question.baseline_runs.values()),
    )
    if distinct == 1 and runs > 1 and len(question.variant_runs) == 1:
        return f"the {runs} replicates are copies: they were offered the same requests; draw others with seed=1,2,…"
    if distinct == 1:
        return "one pair has no spread; more replicates are drawn with seed=1,2,…"
    return "no run of the one was offered what any run of the other was"


def pairing_notes(question: Question) -> list[str]:
    """Runs that are counted once, and runs that stay without a partner."""
    notes = []
    for name, runs in ((question.variant, question.variant_runs), (question.baseline, question.baseline_runs)):
        if repeated := sum(len(same) > 1 for same in runs.values()):
            notes.append(f"{name}: {repeated} replicates were run more than once; each counts once, by its mean")
        if alone := len(runs) - len(question.shared):
            notes.append(f"{name}: {alone} replicates have no partner")
    return notes


def paired(question: Question, metric: str) -> Paired | None:
    """The pairs in which both sides know `metric`; None where there is none."""
    pairs = []
    for offered in question.shared:
        sides = value_of(question.variant_runs[offered], metric), value_of(question.baseline_runs[offered], metric)
        if sides[0] is not None and sides[1] is not None:
            pairs.append((sides[0], sides[1]))
    if not pairs:
        return None
    variant_N, baseline_N = zip(*pairs, strict=True)
    return Paired(metric, variant_N, baseline_N)


def value_of(runs: Sequence[Run], metric: str) -> float | None:
    """Of runs that were offered the same: their mean, geometric where it can be."""
    values = [run.tables.summary.get(metric) for run in runs]
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not len(known):
        return None
    return float(np.exp(np.log(known).mean()) if known.min() > 0 and len(known) > 1 else known.mean())


@dataclass(frozen=True, slots=True)
class Judging:
    """The primary metric, the level of all intervals, and the smallest relative change that matters."""

    primary: str
    level: float = LEVEL
    effect: float = EFFECT


def judge(samples: Sequence[Paired], judging: Judging) -> list[Finding]:
    """The primary metric by itself, the others as a family."""
    level = judging.level
    family = [s for s in samples if len(s.variant_N) > 1 and s.metric != judging.primary]
    together = holm_intervals([sample.differences_N for sample in family], level)
    adjusted = holm([bounds.p for bounds, _ in together])
    judged = dict(zip([s.metric for s in family], zip(together, adjusted, strict=True), strict=True))
    found = []
    for sample in samples:
        if len(sample.variant_N) < 2:
            found.append(simple_finding(sample, judging))
            continue
        alone = interval(sample.differences_N, level)
        (bounds, own_level), p_holm = judged.get(sample.metric, ((alone, level), alone.p))
        found.append(finding(sample, judging, bounds, own_level, alone, p_holm))
    return found


def finding(
    sample: Paired, judging: Judging, judged: Interval, own_level: float, alone: Interval, p_holm: float
) -> Finding:
    differences = sample.differences_N
    mean, deviation = float(differences.mean()), float(differences.std(ddof=1))
    change, matters = sample.shown(mean), sample.mattering(judging.effect)
    bounds = sample.shown(judged.low), sample.shown(judged.high)
    verdict = verdict_of(bounds, change, matters, better_when(sample.metric))
    needed = None
    if verdict == "inconclusive":
        needed = pairs_needed(mean, deviation, own_level, at_least=len(differences) + 1)
    return Finding(
        sample.metric, sample.metric == judging.primary, len(differences), sample.scale,
        float(np.mean(sample.baseline_N)), float(np.mean(sample.variant_N)), change, *bounds, own_level,
        sample.shown(alone.low), sample.shown(alone.high), judged.method, judged.p, p_holm, matters, verdict, needed,
    )  # fmt: skip


def simple_finding(sample: Paired, judging: Judging) -> Finding:
    """Means and their difference, where nothing can be inferred from them."""
    change = sample.shown(float(sample.differences_N.mean()))
    base, own = float(np.mean(sample.baseline_N)), float(np.mean(sample.variant_N))
    return Finding(
        sample.metric, sample.metric == judging.primary, len(sample.variant_N), sample.scale, base, own, change,
        None, None, judging.level, None, None, None, None, None, sample.mattering(judging.effect), "not judged", None,
    )  # fmt: skip


def verdict_of(bounds: tuple[float, float], change: float, matters: float, good: int) -> str:
    """`equal` where every pair is; `small` where the change is known and less than what matters, or where the bounds
    are; `higher` or `lower` of a metric that is neither good nor bad."""
    low, high = bounds
    if low == high == 0:
        return "equal"
    known = low > 0 or high < 0
    if (known and abs(change) < matters) or max(-low, high) < matters:
        return "small"
    if not known:
        return "inconclusive"
    if not good:
        return "higher" if change > 0 else "lower"
    return "better" if (change > 0) == (good > 0) else "worse"


# ---- gates ----


def judge_all(
    gates: Sequence[Gate], asked: Sequence[Question], answers: Sequence[Answer], level: float
) -> tuple[Judged, ...]:
    """Every gate on every question. The chance that any fires without a cause is 1 - `level` at most, for each has its
    share of that (Bonferroni)."""
    number = len(gates) * len(asked)
    return tuple(
        judge_gate(gate, question, told, 1 - (1 - level) / number)
        for gate in gates for question, told in zip(asked, answers, strict=True)
    )  # fmt: skip


def judge_gate(gate: Gate, question: Question, told: Answer, level: float) -> Judged:
    """A margin below what matters is judged at that."""
    sample = paired(question, gate.metric)
    if told.refused or sample is None or len(sample.variant_N) < 2:
        reason = told.refused or f"fewer than two pairs know {gate.metric}"
        return Judged(str(gate), told.name, False, None, None, level, f"not judged: {reason}")
    if sample.scale != "ratio":
        reason = f"not judged: {gate.metric} is 0 in some run, and has no relative change"
        return Judged(str(gate), told.name, False, None, None, level, reason)
    found = interval(sample.differences_N, level)
    low, high = sample.shown(found.low), sample.shown(found.high)
    margin = max(abs(gate.margin), told.effect)
    regressed = low > margin if better_when(gate.metric) < 0 else high < -margin
    said = "regressed" if regressed else "no confident regression"
    if margin > abs(gate.margin):
        said += f", judged at {margin:.1%}, the smallest change that matters"
    return Judged(str(gate), told.name, bool(regressed), low, high, level, said)
