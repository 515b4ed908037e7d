"""The pictures of verdicts and explanations, which their commands tell in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedlab.experiments.analysis.compare import heading_text
from schedlab.experiments.analysis.explain import SAID, Explanation
from schedlab.experiments.analysis.plots import COLOURS, panels
from schedlab.experiments.analysis.verdicts import Verdicts
from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def changes(verdicts: Verdicts) -> Figure:
    """Each variant over its baseline with intervals, a panel a question. ConfigError where no change is relative."""
    told = {answer.name: [f for f in answer.findings if f.scale == "ratio"] for answer in verdicts.answers}
    told = {name: findings for name, findings in told.items() if findings}
    if not told:
        raise ConfigError("figure: no question has a relative change to draw")
    most = max(map(len, told.values()))
    figure, axes = panels(len(told), 1, (8, 1 + (0.25 * most + 0.6) * len(told)))
    for axis, (name, findings) in zip(axes, told.items(), strict=True):
        low, at, high = (
            1 + np.array([f.change if f.low is None else getattr(f, side) for f in findings], dtype=np.float64)
            for side in ("low", "change", "high")
        )
        axis.errorbar(at, range(len(findings)), xerr=[at - low, high - at], fmt="o", color=COLOURS[0], capsize=3)
        axis.axvline(1, color="#777777", linewidth=1)
        axis.set_yticks(range(len(findings)), [heading_text(f.metric) for f in findings])
        axis.invert_yaxis()
        axis.set(xlabel="variant over baseline (×)", ylabel="metric", xscale="log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_title(name, fontsize=10, loc="left")
    return figure


def parts(told: Explanation) -> Figure:
    """Of TTFT and TPOT, what each part took of a mean request and of the slowest hundredth, in ms."""
    figure, axes = panels(2, 1, (8, 4.5))
    for axis, name, mean, slowest in zip(
        axes, ("TTFT", "TPOT"), (told.ttft, told.tpot), (told.slowest_ttft, told.slowest_tpot), strict=True
    ):
        stacked(axis, {"mean": mean, "slowest 1 %": slowest})
        axis.set(xlabel=f"{name} (ms)", ylabel="requests")
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    return figure


def stacked(axis: Axes, bars: Mapping[str, Mapping[str, float]]) -> None:
    """A horizontal bar each, of the parts that any has; seconds as ms."""
    left = np.zeros(len(bars))
    names = [name for name in next(iter(bars.values())) if any(bar[name] for bar in bars.values())]
    for i, name in enumerate(names):
        values = np.array([bar[name] * 1e3 for bar in bars.values()])
        axis.barh(list(bars), values, left=left, color=COLOURS[i % len(COLOURS)], label=SAID[name])
        left += values
