"""What a capacity study finds, and how it is shown: a table, capacity.json, .md, .csv, the curves with their knees."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.statistics import Interval
from schedlab.experiments.analysis.table import csv_of, slo_line
from schedlab.experiments.analysis.verdicts import EFFECT
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "–"
WIDTH = 140
HEADINGS = ("policy", "capacity req/s", "95 % interval", "against first", "interval", "p", "verdict", "best goodput")


@dataclass(frozen=True)
class CapacityOptions:
    """The keys of `capacity`."""

    policies: list[str] | None
    attainment: float
    replicates: int
    resolution: float
    points: int

    def __post_init__(self) -> None:
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"capacity.attainment: expected a share above 0, up to 1, found {self.attainment}")
        if self.replicates < 1:
            raise ConfigError(f"capacity.replicates: expected at least 1, found {self.replicates}")
        if not 0 < self.resolution <= 1:
            raise ConfigError(f"capacity.resolution: expected a relative step in (0, 1], found {self.resolution}")
        if self.points < 0:
            raise ConfigError(f"capacity.points: expected at least 0, found {self.points}")


@dataclass(frozen=True)
class Capacity:
    """Of one policy. `rates` in requests/s of each replicate, None where no rate is low enough; `mean` geometric.

    `against_first`: the relative difference to the first policy, its interval and p, paired by replicate.
    """

    policy: str
    rates: tuple[float | None, ...]
    mean: float | None
    interval: Interval | None
    against_first: float | None
    difference: Interval | None
    p: float | None
    verdict: str
    needed: int | None


@dataclass(frozen=True)
class Curve:
    """Goodput and attainment of one policy at each rate, means over replicates, with the interval of goodput: the
    requests that meet the SLO, by the time in which all arrive."""

    policy: str
    rates: tuple[float, ...]
    goodput: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    attainment: tuple[float, ...]

    @property
    def peak(self) -> tuple[float, float]:
        """Rate and goodput where this is highest."""
        at = int(np.argmax(self.goodput))
        return self.rates[at], self.goodput[at]


@dataclass(frozen=True)
class CapacityStudy:
    """All that one command found. `limit`: requests/s at which no schedule meets the SLO, if arrivals do not end; the
    geometric mean over the replicates, None where the cost is not modelled. `at_limit`: in how many replicates a policy
    meets it up to there, so that their traces are too short to tell more."""

    options: CapacityOptions
    slo: SLO
    predictor: str
    workload: str
    requests: int
    capacities: tuple[Capacity, ...]
    curves: tuple[Curve, ...]
    limit: float | None
    at_limit: Mapping[str, int]
    runs: int


def rows(study: CapacityStudy) -> list[list[str]]:
    peaks = {curve.policy: "{1:.3g} req/s at {0:.3g}".format(*curve.peak) for curve in study.curves}
    first, *others = [[*row(capacity), peaks.get(capacity.policy, UNKNOWN)] for capacity in study.capacities]
    first[3:7] = [UNKNOWN] * 4  # against itself
    return [first, *others]


def row(found: Capacity) -> list[str]:
    spread, difference = found.interval, found.difference
    verdict = found.verdict
    if verdict == "inconclusive":
        verdict += f" (about {found.needed:,} replicates needed)" if found.needed else " (more than 10,000 needed)"
    elif verdict == "small":
        verdict = f"below {EFFECT:.0%}"
    return [
        found.policy,
        UNKNOWN if found.mean is None else f"{found.mean:.3g}",
        UNKNOWN if spread is None else f"{spread.low:.3g} … {spread.high:.3g}",
        UNKNOWN if found.against_first is None else f"{found.against_first:+.1%}",
        UNKNOWN if difference is None else f"{difference.low:+.1%} … {difference.high:+.1%}",
        UNKNOWN if found.p is None else f"{found.p:.2g}",
        verdict,
    ]


def notes(study: CapacityStudy) -> list[str]:
    """What a reader must know besides the table."""
    options, slo = study.options, slo_line(asdict(study.slo))
    lines = [
        f"capacity: the highest rate at which {options.attainment:.0%} of the requests meet SLO {slo}",
        f"predictor: {study.predictor}",
        f"{study.workload}: {options.replicates} replicates of {study.requests / options.replicates:,.0f} requests, "
        f"rates in steps of {options.resolution:.1%}, {study.runs:,} runs",
    ]
    if study.limit is not None:
        share = f"{options.attainment:.0%} of the requests"
        lines.append(f"no schedule serves {share} at more than {study.limit:.3g} requests/s without end (by work)")
    for policy, count in study.at_limit.items():
        lines.append(f"{policy}: meets it up to that limit in {count} replicates: longer traces would tell more")
    for found in study.capacities:
        missing = sum(rate is None for rate in found.rates)
        if missing:
            lines.append(f"{found.policy}: {missing} replicates meet it at no rate")
    return lines


def show(study: CapacityStudy) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("policy", "verdict") else "right")
    for line in rows(study):
        table.add_row(*line)
    console.print(table)
    for note in notes(study):
        console.print(note, markup=False, soft_wrap=True)


def figures(study: CapacityStudy) -> list[dict[str, Any]]:
    """A row a policy; rates in requests/s, bounds of their 95 % interval."""
    return [
        {
            "policy": found.policy, "requests_per_s": found.mean,
            "low": found.interval.low if found.interval else None,
            "high": found.interval.high if found.interval else None,
            "against_first": found.against_first, "p": found.p, "verdict": found.verdict,
        }
        for found in study.capacities
    ]  # fmt: skip


def as_json(study: CapacityStudy) -> dict[str, Any]:
    return {**asdict(study), "notes": notes(study)}


def markdown(study: CapacityStudy) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *rows(study)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{table}\n" + "".join(f"- {note}\n" for note in notes(study))


def write(study: CapacityStudy, directory: Path, *, plots: bool) -> None:
    """capacity.json, capacity.md, capacity.csv, and plots/capacity.png."""
    (directory / "capacity.json").write_text(json.dumps(as_json(study), indent=1) + "\n", encoding="utf-8")
    (directory / "capacity.md").write_text(markdown(study), encoding="utf-8")
    (directory / "capacity.csv").write_text(csv_of(figures(study)), encoding="utf-8")
    if plots and study.curves:
        from schedlab.experiments.analysis.plots import save

        save({"capacity": picture(study)}, directory / "plots")


def picture(study: CapacityStudy) -> Figure:
    """Goodput against the offered rate with its interval; a dot on each curve's knee, where it leaves what is asked."""
    from schedlab.experiments.analysis.bounds import draw_limit
    from schedlab.experiments.analysis.plots import panels, styles

    figure, (axis,) = panels(1, 1, (8, 5))
    rates = study.curves[0].rates
    asked = study.options.attainment
    axis.plot(rates, [asked * rate for rate in rates], color="#999999", lw=1, label=f"{asked:.0%} of what is offered")
    capacities = {found.policy: found for found in study.capacities}
    for style, curve in zip(styles(), study.curves, strict=False):
        axis.plot(curve.rates, curve.goodput, label=curve.policy, **style)
        if None not in curve.low:
            low, high = np.array(curve.low, dtype=np.float64), np.array(curve.high, dtype=np.float64)
            axis.fill_between(curve.rates, low, high, color=style["color"], alpha=0.15, lw=0)
        found = capacities[curve.policy]
        if found.mean is not None:
            knee = np.interp(found.mean, curve.rates, curve.goodput)
            axis.plot([found.mean], [knee], "o", color=style["color"])
    top = max(max(curve.goodput) for curve in study.curves)
    if study.limit is not None and study.limit < 2 * top:
        draw_limit(axis, study.limit, "no schedule serves as many")
    axis.set(xlabel="offered requests per second", xlim=(0, None))
    axis.set(ylabel="goodput (requests per second)", ylim=(0, None))
    axis.legend(frameon=False)
    return figure
