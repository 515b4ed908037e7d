"""Pictures of a run, and of several runs over each other, from their tables. PNG, units on every axis.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color), told apart with any colour vision; lines differ in dash as well.
matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.analysis import series
from schedlab.experiments.analysis.bounds import alone_ttft_s, draw_alone
from schedlab.experiments.analysis.gaps import longest_gaps
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import folder_within, not_a_link

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
UNSHOWN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Signs that XML has not, or that turn the text around them."""
POINTS = 400
"""Bins of a curve over time: about two pixels each."""


def save_all(tables: RunTables, directory: Path) -> list[Path]:
    """Every picture of one run."""
    figures = {
        "latency_cdf": latency_cdf({"": tables}, alone_ttft_s(directory.parent, tables)),
        "itl_over_time": itl_over_time({"": tables}),
        "batch_composition": batch_composition(tables),
        "occupancy": occupancy(tables),
    }
    return save(figures, directory)


def save_comparison(runs: Mapping[str, RunTables], directory: Path) -> list[Path]:
    """The pictures in which runs lie over each other."""
    return save({"latency_cdf": latency_cdf(runs), "itl_over_time": itl_over_time(runs)}, directory)


def save(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    folder_within(directory.parent, directory.name)
    paths = [directory / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        plain(figure).savefig(not_a_link(path), dpi=120)
    return paths


def plain(figure: Figure) -> Figure:
    """`figure` with every text `as_text`, once; but for names at ticks, which are made when it is drawn."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(as_text(text.get_text()))
    return figure


def as_text(name: str) -> str:
    """A name of whatever signs for matplotlib: its dollars begin no formula, and what cannot be shown is spelt."""
    return UNSHOWN.sub(lambda sign: sign[0].encode("unicode_escape").decode(), name).replace("$", r"\$")


def latency_cdf(runs: Mapping[str, RunTables], alone_s: np.ndarray | None = None) -> Figure:
    """Share of requests with at most this TTFT, and this TPOT; `alone_s`: the least that each one's TTFT could be."""
    figure, axes = panels(1, 2, (10, 4))
    for style, (name, tables) in zip(styles(), runs.items(), strict=False):
        latencies = series.latencies(tables.requests)
        for axis, latency in zip(axes, ("ttft", "tpot"), strict=True):
            value, share = series.cumulative(latencies[latency], POINTS)
            axis.step(value * 1e3, share, where="post", label=name, **style)
    for axis, title in zip(axes, ("time to first token", "time per output token"), strict=True):
        axis.set(xlabel=f"{title} (ms)", ylabel="share of requests", ylim=(0, 1.02), xlim=(0, None))
    if alone_s is not None:
        draw_alone(axes[0], alone_s)
        axes[0].legend(loc="lower right", frameon=False)
    legend(axes[1], runs)
    return figure


def itl_over_time(runs: Mapping[str, RunTables]) -> Figure:
    """The longest time between two tokens of any stream, in each moment, run by run."""
    figure, axes = panels(len(runs), 1, (10, 1.5 + 2.5 * len(runs)), shared=True)
    for axis, style, (name, tables) in zip(axes, styles(), runs.items(), strict=False):
        when, gap = longest_gaps(tables, POINTS)
        axis.fill_between(when, gap * 1e3, step="pre", color=style["color"])
        axis.set(title=name, ylabel="longest gap (ms)", ylim=(0, None))
    axes[-1].set(xlabel="engine time (s)")
    return figure


def batch_composition(tables: RunTables) -> Figure:
    """Prompt and decode tokens a second, and requests in a step, over time."""
    curves = series.over_time(tables, POINTS)
    figure, (tokens, requests) = panels(2, 1, (10, 6))
    time, (blue, orange, green, *_) = curves["engine/time_s"], COLOURS
    rates = [curves["sched/prefill_tokens_per_s"], curves["sched/decode_tokens_per_s"]]
    tokens.stackplot(time, *rates, colors=(orange, blue), labels=("prefill", "decode"))
    tokens.set(ylabel="tokens per second", ylim=(0, None))
    tokens.legend(loc="upper right", frameon=False)
    requests.plot(time, curves["sched/batch_requests"], color=green)
    requests.set(xlabel="engine time (s)", ylabel="requests in the batch", ylim=(0, None))
    return figure


def occupancy(tables: RunTables) -> Figure:
    """The queue, and the KV pool: blocks that requests own and blocks that only the prefix cache keeps."""
    curves = series.over_time(tables, POINTS)
    figure, (queue, pool) = panels(2, 1, (10, 6))
    time, (blue, orange, green, *_) = curves["engine/time_s"], COLOURS
    queue.plot(time, curves["queue/waiting"], color=orange, linestyle="--", label="waiting")
    queue.plot(time, curves["queue/running"], color=blue, label="running")
    queue.set(ylabel="requests", ylim=(0, None))
    queue.legend(loc="upper right", frameon=False)
    shares = [curves["kv/utilization"] * 100, curves["kv/cached_share"] * 100]
    pool.stackplot(time, *shares, colors=(blue, green), labels=("owned", "cached, unowned"))
    pool.set(xlabel="engine time (s)", ylabel="KV blocks (% of the pool)", ylim=(0, 100))
    pool.legend(loc="upper right")
    return figure


# ---- parts ----


def panels(rows: int, columns: int, size: tuple[float, float], shared: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot, which keeps figures alive and may want a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=shared, sharey=shared).ravel().tolist()
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def styles() -> Iterator[dict[str, Any]]:
    """Colour and dash of each run in turn, without end."""
    return cycle({"color": colour, "linestyle": dash} for colour, dash in zip(COLOURS, DASHES, strict=True))


def legend(axis: Axes, runs: Mapping[str, Any]) -> None:
    if len(runs) > 1:
        axis.legend(loc="best", frameon=False)
