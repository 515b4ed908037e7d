"""`schedlab.compare`, `explain`, `capacity`, `report` and `plot`: the commands' findings as objects.

Every figure is that of the command of the same name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.analysis import compare as comparing
from schedlab.experiments.analysis import curves
from schedlab.experiments.analysis import explain as explaining
from schedlab.experiments.analysis.bounds import as_json, of_variants
from schedlab.experiments.analysis.table import Comparison
from schedlab.experiments.analysis.verdicts import EFFECT, LEVEL, PRIMARY, Verdicts, compare_runs
from schedlab.experiments.notebook import pictures
from schedlab.experiments.notebook.shown import Row, Shown
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy, check_policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from schedlab.experiments.studies.capacity_result import CapacityStudy

# ---- verdicts ----


@dataclass(frozen=True)
class Compared(Shown):
    """`verdicts` on finished runs, and how far each variant is from what no schedule could beat (`bounds`)."""

    verdicts: Verdicts
    bounds: comparing.Bounds

    def rows(self) -> list[Row]:
        """A row a question and metric, as in verdicts.json."""
        return [
            {"question": told.name, "condition": told.condition, **asdict(finding)}
            for told in self.verdicts.answers for finding in told.findings
        ]  # fmt: skip

    def table(self) -> list[Row]:
        named = [(told.name, found) for told in self.verdicts.answers for found in comparing.telling(told)]
        return [{"question": name, **dict(zip(comparing.HEADINGS, comparing.row(f), strict=True))} for name, f in named]

    def as_json(self) -> dict[str, Any]:
        """What `--format json` prints."""
        return {**self.verdicts.as_json(), "bounds": as_json(self.bounds)}

    def picture(self) -> Figure:
        """Relative changes with their intervals."""
        return pictures.changes(self.verdicts)


def compare(
    *directories: str | Path,
    baseline: str | None = None,
    primary: str = PRIMARY,
    metrics: Sequence[str] | None = None,
    gates: Sequence[str] = (),
    level: float = LEVEL,
    effect: float = EFFECT,
    out: str | Path | None = None,
) -> Compared:
    """Verdicts on the runs in and below `directories`, as `schedlab compare`; written to `out`, if that is given."""
    found = compare_runs(
        directories, baseline=baseline, primary=primary, metrics=metrics, gates=gates, level=level, effect=effect
    )
    assert found.comparison is not None
    compared = Compared(found, of_variants(comparing.replicates_of(found.comparison)))
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        comparing.write(found, Path(out), compared.bounds)
    return compared


# ---- why ----


@dataclass(frozen=True)
class Explained(Shown):
    """Where the wait of a run came from, in seconds of a mean request and of the slowest hundredth."""

    explanation: explaining.Explanation

    def rows(self) -> list[Row]:
        told = self.explanation
        both = (("ttft", told.ttft, told.slowest_ttft), ("tpot", told.tpot, told.slowest_tpot))
        return [
            {"latency": name, "part": explaining.SAID[part], "mean_s": mean[part], "slowest_s": slowest[part]}
            for name, mean, slowest in both for part in mean
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """What `--format json` prints."""
        return self.explanation.as_json()

    def __str__(self) -> str:
        return "\n".join(explaining.lines(self.explanation)).rstrip()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def picture(self) -> Figure:
        return pictures.parts(self.explanation)


def explain(directory: str | Path, tried: bool | None = None, trust: bool = False) -> Explained:
    """As `schedlab explain`: suggestions are tried if `tried`; where it is left out, if this machine made the run."""
    return Explained(explaining.explain(Path(directory), tried, trust))


# ---- capacity ----


@dataclass(frozen=True)
class CapacityFound(Shown):
    """The highest rate at which each policy meets its SLO."""

    study: CapacityStudy

    def rows(self) -> list[Row]:
        """A row a policy; rates in requests/s, bounds of their 95 % interval."""
        from schedlab.experiments.studies import capacity_result

        return [*capacity_result.figures(self.study)]

    def as_json(self) -> dict[str, Any]:
        """What capacity.json holds."""
        from schedlab.experiments.studies import capacity_result

        return capacity_result.as_json(self.study)

    def picture(self) -> Figure:
        from schedlab.experiments.studies import capacity_result

        if not self.study.curves:
            raise ConfigError("capacity: there are no curves to draw with capacity.points=0")
        return capacity_result.picture(self.study)


def capacity(
    policies: Sequence[str | Policy],
    workload: str = "poisson",
    engine: str = "virtual",
    *words: str,
    out: str | Path | None = None,
    **more: Any,
) -> CapacityFound:
    """As `schedlab capacity`, of policies by name or as objects; `words` and `more` as in `schedlab.run`, for instance
    `capacity__replicates=4`. capacity.json and the like are written to `out`, if that is given."""
    from schedlab.experiments.notebook.words import told_words
    from schedlab.experiments.run import compose
    from schedlab.experiments.studies import capacity as studying
    from schedlab.experiments.studies import capacity_result

    names = [policy for policy in policies if isinstance(policy, str)]
    told = told_words({"workload": workload, "engine": engine}, words, {**more, "capacity.policies": names or None})
    config, chosen = compose.composed(told)
    options = capacity_result.CapacityOptions(**compose.resolve(config.capacity))
    bench = studying.bench_of(config, options, chosen)
    own = {name_of(policy): maker(policy) for policy in policies if not isinstance(policy, str)}
    makers = {**(bench.policies if names else {}), **own}
    if len(makers) < len(policies):
        found_names = ", ".join(map(name_of, policies))
        raise ConfigError(f"capacity: expected policies that differ in their names, found {found_names}")
    bench.policies = {name_of(policy): makers[name_of(policy)] for policy in policies}
    found = CapacityFound(studying.study(bench, options, say=lambda line: None))
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        capacity_result.write(found.study, Path(out), plots=config.plots)
    return found


def name_of(policy: str | Policy) -> str:
    return policy if isinstance(policy, str) else type(policy).__name__


def maker(policy: object) -> Callable[[], Any]:
    """A fresh copy for every run, as policies may keep state."""
    check_policy(policy)
    return partial(copy.deepcopy, policy)


# ---- report and curves ----


@dataclass(frozen=True)
class Reported(Shown):
    """Where the report and its pictures are."""

    path: Path
    pictures: Sequence[Path]

    def rows(self) -> list[Row]:
        return [{"file": str(path)} for path in (self.path, *self.pictures)]

    def _repr_html_(self) -> str:
        text = escape(str(self.path))
        return f'<a href="{text}">{text}</a>, and {len(self.pictures)} pictures'


def report(
    directory: str | Path, out: str | Path | None = None, tried: bool | None = None, trust: bool = False
) -> Reported:
    """As `schedlab report`: one HTML file on a run or a sweep."""
    from schedlab.experiments.analysis.report import write_report

    return Reported(*write_report(Path(directory), None if out is None else Path(out), tried, trust))


@dataclass(frozen=True)
class Plotted(Shown):
    """A metric against a number that was swept."""

    curves: curves.Curves

    def rows(self) -> list[Row]:
        """A row a point, as in the command's CSV, times in seconds."""
        told = self.curves
        ends = ("low", "high", "replicates", "attainment")
        return [
            {"variant": name, told.swept: point.number, told.x: point.x, told.y: point.y}
            | {end: getattr(point, end) for end in ends}
            for name, points in told.lines.items() for point in points
        ]  # fmt: skip

    def picture(self) -> Figure:
        return curves.picture(self.curves)

    def save(self, directory: str | Path) -> list[Path]:
        """PNG, SVG and CSV."""
        return curves.save(self.curves, Path(directory))


def plot(*directories: str | Path, x: str | None = None, y: str = "ttft/p99", pareto: bool = False) -> Plotted:
    """As `schedlab plot`, one picture: `y` against the number `x`, or throughput per device against that per user."""
    runs = list(Comparison.read(map(Path, directories), required=True).complete.values())
    return Plotted(curves.pareto(runs, x) if pareto else curves.curves(runs, x, y))
