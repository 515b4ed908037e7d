"""`schedlab plot`: a metric against a number that a sweep varied, a line a variant with the interval of its replicates.

Runs are joined to a line if they differ in that number and the seed alone, so that points of one rate are never joined
with those of another. Figures are those of the runs' results; no log is read.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.metrics import check_metric
from schedlab.experiments.analysis.plots import panels, plain, styles
from schedlab.experiments.analysis.statistics import interval
from schedlab.experiments.analysis.table import Comparison, Run
from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = ("ttft/p99", "tpot/p99", "goodput/requests_per_s")
"""What is drawn where nothing is asked."""
PER_USER, PER_DEVICE = "throughput per user", "throughput per device"
ASKED = 0.9
"""Attainment up to which a rate is within a variant's capacity."""
MOST_TICKS = 10
WIDE = 20
"""Ratio of the largest number to the smallest from which on the axis is logarithmic."""
UNITS = {
    "rate": "requests/s", "chunk_size": "tokens", "stall_tokens": "tokens", "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests", "num_blocks": "blocks", "block_size": "tokens",
}  # fmt: skip
"""Of swept numbers, by the end of their key."""
NO_CONDITION = ("seed", "wandb", "plots", "progress", "timeline", "record", "resume", "hydra", "log_format")


@dataclass(frozen=True)
class Point:
    """Means over replicates; bounds of y are None for a single one. `attainment` is None where there is no SLO."""

    number: float
    x: float
    y: float
    low: float | None
    high: float | None
    replicates: int
    attainment: float | None


@dataclass(frozen=True)
class Curves:
    """`lines`: points by variant, in the order of the number that was swept. `limit`: what the SLO allows of y."""

    swept: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Point]]
    limit: float | None = None

    @property
    def name(self) -> str:
        return f"{self.y}_by_{self.x}".replace("/", "_").replace(" ", "_")


# ---- what was swept ----


def asked(run: Run) -> dict[str, str]:
    """What told a run from others: its choices and overrides."""
    return {key: str(value) for key, value in run.labels.items() if key.partition(".")[0] not in NO_CONDITION}


def as_number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def swept(runs: Sequence[Run]) -> list[str]:
    """The keys that are numbers in every run that has them, and vary."""
    facts = [asked(run) for run in runs]
    found = []
    for key in dict.fromkeys(key for of in facts for key in of):
        numbers = [as_number(of[key]) for of in facts if key in of]
        if None not in numbers and len(set(numbers)) > 1:
            found.append(key)
    return found


def which(runs: Sequence[Run], x: str | None) -> str:
    """The swept key that `x` names, whole or by its end. ConfigError if that is none, or not one alone."""
    keys = swept(runs)
    there = f"numbers that vary: {', '.join(keys) or 'none'}"
    if x is None:
        if len(keys) != 1:
            raise ConfigError(f"plot: expected --x, one of the {there}")
        return keys[0]
    named = [key for key in keys if key == x] or [key for key in keys if key.endswith(f".{x}")]
    if len(named) != 1:
        raise ConfigError(f"--x {x}: {'any' if named else 'none'} of the {there}")
    return named[0]


# ---- lines ----


def curves(runs: Sequence[Run], x: str | None, y: str) -> Curves:
    """`y` against the swept number that `x` names. ConfigError for what is none, and where no run knows `y`."""
    check_metric(y, "--y")
    key = which(runs, x)
    found = {
        name: [point for number, of in by_number.items() if (point := _point(number, of, y)) is not None]
        for name, by_number in variants(runs, key).items()
    }
    lines = {name: points for name, points in found.items() if points}
    if not lines:
        raise ConfigError(f"--y {y}: unknown in all of the runs")
    return Curves(key, key, y, lines, _limit(runs, y))


def pareto(runs: Sequence[Run], x: str | None) -> Curves:
    """Output tokens a second of each user (of a mean request: 1 / TPOT) and of each device, along the swept number."""
    key = which(runs, x)
    lines: dict[str, list[Point]] = {}
    for name, by_number in variants(runs, key).items():
        known = [(number, both) for number, of in by_number.items() if (both := _both(of))]
        means = [(number, np.mean(both, axis=0).tolist(), len(both)) for number, both in known]
        lines[name] = [Point(number, user, device, None, None, count, None) for number, (user, device), count in means]
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        raise ConfigError("plot --pareto: no run has a TPOT")
    return Curves(key, PER_USER, PER_DEVICE, lines)


def variants(runs: Sequence[Run], key: str) -> dict[str, dict[float, list[Run]]]:
    """Runs by all that they were asked but `key` and the seed, then by `key` from its least value on."""
    from schedlab.experiments.sweep.replicates import names_of

    groups: dict[tuple[tuple[str, str], ...], dict[float, list[Run]]] = {}
    for run in runs:
        facts = {"policy": run.policy, **asked(run)}
        if (at := as_number(facts.pop(key, None))) is not None:
            groups.setdefault(tuple(facts.items()), {}).setdefault(at, []).append(run)
    names = names_of([dict(facts) for facts in groups])
    return {name: dict(sorted(of.items())) for name, of in zip(names, groups.values(), strict=True)}


def _point(number: float, runs: Sequence[Run], y: str) -> Point | None:
    values = [value for run in runs if (value := run.figures.get(y)) is not None]
    if not values:
        return None
    met = [share for run in runs if (share := run.figures.get("slo/attainment")) is not None]
    bounds = interval(np.array(values, dtype=np.float64)) if len(values) > 1 else None
    low, high = (bounds.low, bounds.high) if bounds else (None, None)
    return Point(number, number, float(np.mean(values)), low, high, len(values), float(np.mean(met)) if met else None)


def _both(runs: Sequence[Run]) -> list[tuple[float, float]]:
    found = []
    for run in runs:
        tpot, rate = run.figures.get("tpot/mean"), run.figures.get("throughput/output_tokens_per_s")
        engine = run.manifest.get("config", {}).get("engine")
        devices = engine.get("tensor_parallel", 1) if isinstance(engine, Mapping) else 1
        if tpot and rate:
            found.append((1 / tpot, rate / devices))
    return found


def _limit(runs: Sequence[Run], y: str) -> float | None:
    """Of the one SLO class that all runs have."""
    limits = {slo.get(f"{y.partition('/')[0]}_s") for run in runs for slo in run.slos}
    return limits.pop() if len(limits) == 1 else None


# ---- picture and table ----


def unit(metric: str) -> tuple[float, str]:
    """By what its values are multiplied, and its name with the unit."""
    group, _, statistic = metric.partition("/")
    if group in ("ttft", "tpot", "itl", "e2e", "queue"):
        return 1e3, f"{group.upper() if group != 'queue' else group} {statistic} (ms)"
    if metric in (PER_USER, PER_DEVICE) or metric.endswith("tokens_per_s"):
        return 1.0, f"{metric.removesuffix('_tokens_per_s').replace('/', ' ')} (tokens/s)"
    if metric.endswith("requests_per_s"):
        return 1.0, f"{group} (requests/s)"
    if metric.endswith("_s"):
        return 1.0, f"{metric.removesuffix('_s')} (s)"
    shares = group in ("slo", "kv", "bound") or metric.endswith(("share", "hit_rate", "/queue"))
    return (100.0, f"{metric} (%)") if shares else (1.0, f"{metric} (1)")


def swept_label(key: str) -> str:
    told = UNITS.get(key.rpartition(".")[2])
    return f"{key} ({told})" if told else key


def picture(found: Curves, size: tuple[float, float] = (8, 5)) -> Figure:
    """The lines with their bands; the limit of the SLO; a ring on the last rate of each line that is within it."""
    figure, (axis,) = panels(1, 1, size)
    scale, label = unit(found.y)
    for style, (name, points) in zip(styles(), found.lines.items(), strict=False):
        x, y = (np.array([getattr(point, side) for point in points]) for side in ("x", "y"))
        axis.plot(x, y * scale, marker="o", markersize=4, label=name, **style)
        band = np.array([(p.low if p.low is not None else p.y, p.high if p.high is not None else p.y) for p in points])
        axis.fill_between(x, *(band.T * scale), color=style["color"], alpha=0.15, linewidth=0)
        _mark_capacity(axis, found, points, scale, style["color"])
    if found.limit is not None:
        axis.axhline(found.limit * scale, color="#777777", linestyle=":", label="limit of the SLO")
    axis.set(xlabel=swept_label(found.x) if found.x == found.swept else unit(found.x)[1], ylabel=label)
    _scale(axis, found)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _mark_capacity(axis: Axes, found: Curves, points: Sequence[Point], scale: float, colour: Any) -> None:
    within = [point for point in points if point.attainment is not None and point.attainment >= ASKED]
    if found.swept.endswith("rate") and within and len(within) < len(points):
        axis.plot(within[-1].x, within[-1].y * scale, "o", markersize=11, markerfacecolor="none", color=colour)


def _scale(axis: Axes, found: Curves) -> None:
    """Logarithmic where numbers span much, with a tick at each number where these are few."""
    x = sorted({point.x for points in found.lines.values() for point in points})
    y = [point.y for points in found.lines.values() for point in points]
    if min(y) > 0 and max(y) > WIDE * min(y):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,g}")
    elif min(y) >= 0:
        axis.set_ylim(bottom=0)
    if min(x) > 0 and max(x) > WIDE * min(x):
        axis.set_xscale("log")
        axis.minorticks_off()
    if found.x == found.swept and len(x) <= MOST_TICKS:
        axis.set_xticks(x, [f"{value:g}" for value in x])


def rows(found: Curves) -> list[list[str]]:
    """The data as a table, its header first; times in seconds."""
    head = ["variant", found.swept, *([found.x] if found.x != found.swept else []), found.y]
    head += ["low", "high", "replicates", "attainment"]
    told = [head]
    for name, points in found.lines.items():
        for point in points:
            values: list[Any] = [point.number, *([point.x] if found.x != found.swept else []), point.y]
            values += [point.low, point.high, point.replicates, point.attainment]
            told.append([name, *("" if value is None else f"{value:.10g}" for value in values)])
    return told


def save(found: Curves, directory: Path) -> list[Path]:
    """PNG, SVG and the data as CSV."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{found.name}.{form}" for form in ("png", "svg", "csv")]
    figure = plain(picture(found))
    for path in paths[:2]:
        figure.savefig(path, dpi=120)
    with paths[2].open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows(found))
    return paths


# ---- the command, and what a sweep leaves ----


def plot(directories: Sequence[Path], x: str | None, y: Sequence[str], per_user: bool, out: Path | None) -> list[Path]:
    """The command. ConfigError where there is nothing to draw."""
    runs = list(Comparison.read(directories, required=True).complete.values())
    found = [curves(runs, x, metric) for metric in (y or (() if per_user else SHOWN))]
    found += [pareto(runs, x)] if per_user else []
    return [path for drawn in found for path in save(drawn, out or directories[0] / "plots")]


def of_sweep(comparison: Comparison) -> list[Curves]:
    """What a sweep that varied a number leaves: the usual metrics against each of its numbers."""
    runs = list(comparison.complete.values())
    known = [y for y in SHOWN if any(run.figures.get(y) is not None for run in runs)]
    return [curves(runs, key, y) for key in swept(runs) for y in known]
