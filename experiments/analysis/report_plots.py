"""The pictures of a report: each one panel wide, so that they can be read on a phone. Units on every axis.

Colours are those of plots.py, which any colour vision tells apart; lines differ in dash, points in shape as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from schedlab.experiments.analysis import plots, series
from schedlab.experiments.analysis.bounds import draw_alone
from schedlab.experiments.analysis.gaps import longest_gaps
from schedlab.experiments.analysis.plots import COLOURS, POINTS, as_text, legend, panels, plain, styles
from schedlab.experiments.analysis.step_work import StepWork
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.results.tables import RunTables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (5.2, 3.2)
"""Inches: letters of 13 pixels on a wide screen, and of 10 on a phone."""
MARKERS = "osD^vPX"
TITLES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end-to-end latency"}
CAPTIONS = {
    "_by_": "A line a variant; the band is the 95 % interval of its replicates",
    "cdf": "How many requests had at most so much", "itl": "Longest gap that any stream saw, over time",
    "batch": "What the steps computed", "occupancy": "Queue and KV cache", "roofline": "The steps under the roofline",
    "pareto": "Each variant, and small its replicates", "fairness": "By client",
}  # fmt: skip
MOST_STEPS = 1500
"""Steps that a roofline shows, evenly chosen."""


def caption(name: str) -> str:
    """What the picture of this name shows."""
    return next(words for key, words in CAPTIONS.items() if key in name)


def cdf(latency: str, values: Mapping[str, np.ndarray]) -> Figure:
    """Share of requests with at most so much of a latency, in seconds, a line a variant."""
    figure, (axis,) = panels(1, 1, SIZE)
    for style, (name, seconds) in zip(styles(), values.items(), strict=False):
        value, share = series.cumulative(seconds, POINTS)
        axis.step(value * 1e3, share * 100, where="post", label=name, **style)
    axis.set(xlabel=f"{TITLES[latency]} (ms)", ylabel="requests (%)", ylim=(0, 102), xlim=(0, None))
    legend(axis, values)
    return figure


def with_bound(figure: Figure, seconds: np.ndarray) -> None:
    """Add the TTFT of each request alone on the machine to a distribution."""
    (axis,) = figure.axes
    draw_alone(axis, seconds, whole=100.0)
    axis.legend(loc="best", frameon=False)


def itl_over_time(runs: Mapping[str, RunTables]) -> Figure:
    """The longest gap between tokens in each moment, a panel a variant."""
    figure, axes = panels(len(runs), 1, (SIZE[0], 1.2 + 1.6 * len(runs)), shared=True)
    for axis, style, (name, tables) in zip(axes, styles(), runs.items(), strict=False):
        when, gap = longest_gaps(tables, POINTS)
        axis.fill_between(when, gap * 1e3, step="pre", color=style["color"])
        axis.set_title(name, fontsize=10, loc="left")
        axis.set(ylim=(0, None))
    axes[-1].set(xlabel="engine time (s)")
    figure.supylabel("longest gap between tokens (ms)", fontsize=10)
    return figure


def batch(tables: RunTables) -> Figure:
    """Prompt and decode tokens a second over time."""
    curves = series.over_time(tables, POINTS)
    figure, (axis,) = panels(1, 1, SIZE)
    blue, orange, *_ = COLOURS
    rates = [curves["sched/prefill_tokens_per_s"] / 1e3, curves["sched/decode_tokens_per_s"] / 1e3]
    axis.stackplot(curves["engine/time_s"], *rates, colors=(orange, blue), labels=("prefill", "decode"))
    axis.set(xlabel="engine time (s)", ylabel="tokens (thousands a second)", ylim=(0, None))
    axis.legend(loc="upper right", frameon=False)
    return figure


def occupancy(tables: RunTables) -> Figure:
    """The queue above, the KV pool below."""
    figure = plots.occupancy(tables)
    figure.set_size_inches(SIZE[0], 4.8)
    return figure


def pareto(points: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """TTFT against TPOT in seconds, a colour and shape a variant, small marks its replicates; the front as a line.

    The front are the variants to which none is better in both.
    """
    figure, (axis,) = panels(1, 1, SIZE)
    means = {name: tuple(np.mean(of, axis=0) * 1e3) for name, of in points.items()}
    front = sorted(
        mean
        for mean in means.values()
        if not any(other[0] < mean[0] and other[1] < mean[1] for other in means.values())
    )
    axis.plot(*np.array(front).T, color="#777777", linewidth=1, zorder=1, label="front" if len(front) > 1 else None)
    for colour, marker, (name, of) in zip(cycle(COLOURS), cycle(MARKERS), points.items(), strict=False):
        axis.plot(*(np.array(of).T * 1e3), marker, color=colour, markersize=3, alpha=0.4, linestyle="")
        axis.plot(*means[name], marker, color=colour, markersize=9, markeredgecolor="white", label=name, linestyle="")
    axis.set(xlabel="TTFT, 99th percentile (ms)", ylabel="TPOT, 99th percentile (ms)", xscale="log")
    for which in (axis.xaxis.set_major_formatter, axis.xaxis.set_minor_formatter):
        which("{x:,.0f}")
    axis.tick_params(axis="x", which="both", labelrotation=30, labelsize=8)
    axis.legend(loc="best", frameon=False, fontsize=8)
    return figure


def fairness(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """Mean latency by client, a group of bars each; the largest clients first."""
    clients = list(next(iter(runs.values())))
    figure, (axis,) = panels(1, 1, (SIZE[0], 1.4 + 0.22 * len(clients) * len(runs)))
    height = 0.8 / len(runs)
    for place, (style, (name, means)) in enumerate(zip(styles(), runs.items(), strict=False)):
        at = np.arange(len(clients)) + (place - (len(runs) - 1) / 2) * height
        seconds = [means.get(client, 0.0) for client in clients]
        axis.barh(at, seconds, height * 0.9, color=style["color"], label=name)
    axis.set_yticks(range(len(clients)), map(as_text, clients))
    axis.invert_yaxis()
    axis.set(xlabel="mean end-to-end latency per output token (s)", ylabel="client")
    legend(axis, runs)
    return figure


def roofline(work: StepWork, machine: Hardware, dtype: str) -> Figure:
    """Steps of a run under the machine's ceilings: FLOP/s reached over FLOPs a byte."""
    figure, (axis,) = panels(1, 1, (SIZE[0], 4.2))
    shown = np.unique(np.linspace(0, len(work.flops) - 1, min(len(work.flops), MOST_STEPS)).round().astype(int))
    intensity, reached = (work.flops / work.bytes)[shown], (work.flops / work.seconds)[shown] / 1e12
    kinds = {
        "decodes": ~work.prompts & work.streams, "prompts": work.prompts & ~work.streams,
        "both": work.prompts & work.streams,
    }  # fmt: skip
    for colour, marker, (name, rows) in zip(COLOURS, MARKERS, kinds.items(), strict=False):
        if rows[shown].any():
            at = rows[shown]
            axis.plot(
                intensity[at], reached[at], marker, color=colour, markersize=4, alpha=0.5, label=name, linestyle=""
            )
    _ceilings(axis, machine, dtype, intensity)
    axis.set(xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP/byte)", ylabel="reached (TFLOP/s)")
    axis.legend(loc="lower right", frameon=False, fontsize=8)
    return figure


def _ceilings(axis: Axes, machine: Hardware, dtype: str, intensity: np.ndarray) -> None:
    """Datasheet peaks as a line, what is reached of them (linears, memory) as a dashed one."""
    peak, bandwidth = machine.peak_flops((dtype,)), machine.peak_bandwidth("memory")
    reached = machine.flops((dtype,), "linear"), machine.bandwidth("memory")
    low = min(float(intensity.min(initial=1.0)), 1.0)
    x = np.geomspace(low, max(float(intensity.max(initial=1.0)), 4 * peak / bandwidth), 100)
    axis.plot(x, np.minimum(peak, bandwidth * x) / 1e12, color="black", linewidth=1.2, label=f"{machine.name}, {dtype}")
    axis.plot(
        x, np.minimum(reached[0], reached[1] * x) / 1e12, color="black", linewidth=1, linestyle="--",
        label="of this usually reached",
    )  # fmt: skip


def svg(figure: Figure, name: str) -> str:
    """`figure` as an inline <svg> that takes the width it is given; the same bytes for the same picture."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        plain(figure).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    figure.set_layout_engine("none")  # it is laid out now; saving it again need not do so again
    body = text.getvalue()[text.getvalue().index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' (width|height)="[\d.]+pt"', "", body, count=2)
    return body.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
