"""How a capacity study is shown: a table, capacity.json and capacity.md, and the curves with their knees."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.table import slo_line
from schedlab.experiments.analysis.verdicts import EFFECT
from schedlab.experiments.studies.capacity import Capacity, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "–"
WIDTH = 140
HEADINGS = ("policy", "capacity req/s", "95 % interval", "against first", "interval", "p", "verdict", "best goodput")


def rows(study: Study) -> list[list[str]]:
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


def notes(study: Study) -> list[str]:
    """What a reader must know besides the table."""
    options, slo = study.options, slo_line(asdict(study.slo))
    lines = [
        f"capacity: the highest rate at which {options.attainment:.0%} of the requests meet SLO {slo}",
        f"{study.workload}: {options.replicates} replicates of {study.requests / options.replicates:,.0f} requests, "
        f"rates in steps of {options.resolution:.1%}, {study.runs:,} runs",
    ]
    if study.limit is not None:
        lines.append(f"no schedule serves more than {study.limit:.3g} requests/s (by work)")
    for found in study.capacities:
        missing = sum(rate is None for rate in found.rates)
        if missing:
            lines.append(f"{found.policy}: {missing} replicates meet it at no rate")
    return lines


def show(study: Study) -> None:
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


def as_json(study: Study) -> dict[str, Any]:
    return {**asdict(study), "notes": notes(study)}


def markdown(study: Study) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *rows(study)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    return f"{table}\n" + "".join(f"- {note}\n" for note in notes(study))


def write(study: Study, directory: Path, *, plots: bool) -> None:
    """capacity.json, capacity.md, and plots/capacity.png."""
    (directory / "capacity.json").write_text(json.dumps(as_json(study), indent=1) + "\n")
    (directory / "capacity.md").write_text(markdown(study))
    if plots and study.curves:
        from schedlab.experiments.analysis.plots import save

        save({"capacity": picture(study)}, directory / "plots")


def picture(study: Study) -> Figure:
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
        draw_limit(axis, study.limit, "no schedule serves more")
    axis.set(xlabel="offered requests per second", xlim=(0, None))
    axis.set(ylabel="goodput (requests per second)", ylim=(0, None))
    axis.legend(frameon=False)
    return figure
