"""What reproductions say: one finding each, a page with a table, and a picture."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.analysis.plots import COLOURS, panels, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = {
    "sarathi_capacity": ("itl/p99", "itl/max", "queue/p50", "ttft/p50"),
    "chunk_size": ("ttft/mean", "ttft/p99", "tpot/mean", "itl/p99", "itl/max"),
    "prefix_order": (
        "ttft/mean",
        "ttft/p50",
        "ttft/p90",
        "ttft/p99",
        "prefix/hit_rate",
        "throughput/total_tokens_per_s",
    ),
    "sjf_queueing": ("ttft/mean", "e2e/mean", "e2e/p99", "makespan_s"),
    "recompute_swap": ("makespan_s", "preemptions/recompute", "preemptions/swap", "recomputed_tokens"),
    "victim_choice": ("preemptions/recompute", "recomputed_tokens", "throughput/output_tokens_per_s", "ttft/p99"),
    "max_num_seqs": ("throughput/output_tokens_per_s", "tpot/mean", "e2e/mean", "makespan_s"),
    "disaggregation": ("ttft/mean", "itl/p50", "itl/p99", "e2e/mean"),
}
"""Keys of the summary in each table, in seconds, tokens and shares."""


@dataclass(frozen=True)
class ReproducedRun:
    """One run of a reproduction: the variant's label, the value of what is swept, and the words that give it."""

    label: str
    point: float | None
    words: tuple[str, ...]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Reproduction:
    """A published result and our runs of it. `facts` is the overlay's `reproduction`."""

    name: str
    facts: Mapping[str, Any]
    runs: tuple[ReproducedRun, ...]

    @property
    def labels(self) -> list[str]:
        return list(self.facts["variants"])

    @property
    def points(self) -> list[float | None]:
        return [value for values in self.facts.get("sweep", {}).values() for value in values] or [None]

    def get(self, label: str, key: str, point: float | None = None) -> float:
        """One value of one run's summary."""
        (run,) = (run for run in self.runs if (run.label, run.point) == (label, point))
        return float(run.summary[key])

    def along(self, label: str, key: str) -> list[float]:
        """A variant's value at every point."""
        return [self.get(label, key, point) for point in self.points]


# ---- findings ----


def finding(it: Reproduction) -> str:
    """What our runs say of the published result, in one sentence."""
    return FINDINGS[it.name](it)


def capacity(it: Reproduction, label: str, limit_s: float) -> float:
    """The highest rate of the sweep up to which every rate keeps the limit and the queue's; 0 if none does."""
    held = 0.0
    for rate in it.points:
        assert rate is not None
        if it.get(label, "itl/p99", rate) > limit_s or it.get(label, "queue/p50", rate) > it.facts["limits"]["queue"]:
            break
        held = rate
    return held


def of_sarathi_capacity(it: Reproduction) -> str:
    parts = []
    for name in ("strict", "relaxed"):
        limit = it.facts["limits"][name]
        first, *others = ((label, capacity(it, label, limit)) for label in it.labels)
        ratios = [f"{label} {rate:g}{f' ({rate / first[1]:.1f} x)' if first[1] else ''}" for label, rate in others]
        parts.append(f"capacity within {limit:g} s: {first[0]} {first[1]:g} requests/s, {', '.join(ratios)}")
    stalls = [f"{label} {it.get(label, 'itl/max', 1.0):.2f} s" for label in it.labels]
    return f"{'; '.join(parts)}; longest stall at 1 request/s: {', '.join(stalls)}"


def of_chunk_size(it: Reproduction) -> str:
    small, large = it.points[0], it.points[-1]
    (label,) = it.labels
    said = [
        f"{what} {it.get(label, key, small) * 1e3:,.0f} ms with {small:g} "
        f"and {it.get(label, key, large) * 1e3:,.0f} with {large:g}"
        for what, key in (("time to first token, mean", "ttft/mean"), ("time between tokens, p99", "itl/p99"))
    ]
    best = min(it.points, key=lambda point: it.get(label, "ttft/mean", point))
    return f"{'; '.join(said)}; the mean time to first token is least with {best:g}"


def of_prefix_order(it: Reproduction) -> str:
    return "; ".join(
        f"{label}: mean {it.get(label, 'ttft/mean'):.2f} s, p99 {it.get(label, 'ttft/p99'):.1f} s"
        for label in it.labels
    )


def of_sjf_queueing(it: Reproduction) -> str:
    first, shortest, noisy = it.labels

    def change(label: str, key: str, point: float | None) -> str:
        return f"{it.get(label, key, point) / it.get(first, key, point) - 1:+.1%}"

    return "mean end-to-end time against first come: " + "; ".join(
        f"{point:g} requests/s {change(shortest, 'e2e/mean', point)} (noisy {change(noisy, 'e2e/mean', point)}, "
        f"makespan {change(shortest, 'makespan_s', point)})"
        for point in it.points
    )


CONTEXTS = (512, 2048, 8192)


def against(it: Reproduction, length: int, mode: str, other: str, link: float | None) -> float:
    """Makespan of `mode` over that of `other` at contexts of `length`."""
    return it.get(f"{length} {mode}", "makespan_s", link) / it.get(f"{length} {other}", "makespan_s", link)


def of_recompute_swap(it: Reproduction) -> str:
    said = []
    for link in it.points:
        lengths = [f"{length} {against(it, length, 'recompute', 'swap', link):.2f}" for length in CONTEXTS]
        said.append(f"over {link:g} GB/s at contexts of {', '.join(lengths)}")
    return f"makespan with recompute over that with swap: {'; '.join(said)}"


def tax(it: Reproduction, label: str, point: float | None) -> float:
    """Share of the computed tokens that had been computed before."""
    again = it.get(label, "recomputed_tokens", point)
    useful = it.get(label, "throughput/total_tokens_per_s", point) * it.get(label, "makespan_s", point)
    return again / (again + useful)


def of_victim_choice(it: Reproduction) -> str:
    newest, least, most, _ = it.labels
    taxes = [f"{tax(it, newest, blocks):.0%} on {blocks:g} blocks" for blocks in it.points]

    def change(label: str, point: float | None) -> str:
        return f"{it.get(label, AGAIN, point) / it.get(newest, AGAIN, point) - 1:+.0%}"

    waste = [f"{point:g}: {change(least, point)} and {change(most, point)}" for point in it.points]
    return (
        f"tax with newest first {', '.join(taxes)}; tokens wasted by least and by most computed first against it, "
        f"{'; '.join(waste)}"
    )


def of_max_num_seqs(it: Reproduction) -> str:
    (label,) = it.labels
    return "output tokens/s and time per token: " + "; ".join(
        f"{point:g}: {it.get(label, RATE, point):,.0f}, {it.get(label, 'tpot/mean', point) * 1e3:.1f} ms"
        for point in it.points
    )


AGAIN = "recomputed_tokens"
RATE = "throughput/output_tokens_per_s"


def of_disaggregation(it: Reproduction) -> str:
    said = [
        f"{label} {it.get(label, 'itl/p99') * 1e3:,.1f} ms, {it.get(label, 'ttft/mean') * 1e3:,.0f} ms and "
        f"{it.get(label, 'e2e/mean'):.3g} s"
        for label in it.labels
    ]
    return f"time between tokens p99, time to first token and end-to-end time, means: {'; '.join(said)}"


FINDINGS: dict[str, Callable[[Reproduction], str]] = {
    "sarathi_capacity": of_sarathi_capacity,
    "chunk_size": of_chunk_size,
    "prefix_order": of_prefix_order,
    "sjf_queueing": of_sjf_queueing,
    "recompute_swap": of_recompute_swap,
    "victim_choice": of_victim_choice,
    "max_num_seqs": of_max_num_seqs,
    "disaggregation": of_disaggregation,
}

# ---- the page ----


def write(done: Sequence[Reproduction], out: Path) -> list[Path]:
    """Page and picture."""
    out.mkdir(parents=True, exist_ok=True)
    page, picture = out / "reproductions.md", out / "reproductions.png"
    page.write_text(markdown(done, picture.name), encoding="utf-8")
    draw(done, picture)
    return [page, picture]


def markdown(done: Sequence[Reproduction], picture: str) -> str:
    head = [
        "# Results of the literature, run again",
        "",
        "Written by `schedlab reproduce --out experiments/bench/results` on the virtual clock: durations from a "
        "roofline of the model on the hardware, "
        "synthetic requests of the published shape. Parameters, sources and what was published are in "
        "`conf/experiment/`. What is compared is the direction and the size of an effect; the hardware, the models and "
        "the traffic of the sources are not at hand.",
        "",
        f"![{len(done)} results]({picture})",
        "",
        "| result | source | published | ours | command |",
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {it.facts['title']} | {it.facts['source']} | {it.facts['published']} | {finding(it)} "
        f"| `schedlab reproduce {it.name}` |"
        for it in done
    ]
    return "\n".join([*head, *rows, "", *(line for it in done for line in section(it))])


def section(it: Reproduction) -> list[str]:
    """The runs of one reproduction, each with the command that repeats it."""
    keys = SHOWN[it.name]
    return [
        f"## {it.facts['title']}",
        "",
        *([str(it.facts["reading"]).strip(), ""] if "reading" in it.facts else []),
        f"Every row is `schedlab run experiment={it.name}` with the words of its last column.",
        "",
        f"| variant | {' | '.join(keys)} | words |",
        "|---" * (len(keys) + 2) + "|",
        *(row(run, keys) for run in it.runs),
        "",
    ]


def row(run: ReproducedRun, keys: Sequence[str]) -> str:
    return f"| {run.label} | {' | '.join(shown(run, key) for key in keys)} | `{spelled(run)}` |"


def shown(run: ReproducedRun, key: str) -> str:
    value = run.summary[key]
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spelled(run: ReproducedRun) -> str:
    return " ".join(map(shlex.quote, run.words)) or "(none)"


# ---- the picture ----


def draw(done: Sequence[Reproduction], path: Path) -> None:
    figure, axes = panels(-(-len(done) // 2), 2, (12, 3.2 * -(-len(done) // 2)))
    for axis, it in zip(axes, done, strict=False):
        PICTURES[it.name](axis, it)
        axis.set_title(it.facts["title"], loc="left", fontsize=9)
    for axis in axes[len(done) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110)


def lines(axis: Axes, it: Reproduction, key: str, x: str, y: str, scale: float = 1.0) -> None:
    """One line a variant over the sweep."""
    for style, label in zip(styles(), it.labels, strict=False):
        axis.plot(it.points, [value * scale for value in it.along(label, key)], marker="o", label=label, **style)  # type: ignore[arg-type]
    axis.set(xlabel=x, ylabel=y)
    axis.legend(frameon=False, fontsize=8)


def trade(axis: Axes, it: Reproduction, across: tuple[str, str, float], up: tuple[str, str, float], what: str) -> None:
    """Two keys against each other, each point with what was swept."""
    (label,) = it.labels
    x, y = ([value * scale for value in it.along(label, key)] for key, _, scale in (across, up))
    axis.plot(x, y, marker="o", color=COLOURS[0])
    for at, point in enumerate(it.points):
        axis.annotate(f"{what}{point:g}", (x[at], y[at]), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axis.set(xlabel=across[1], ylabel=up[1])


def bars(axis: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]], y: str) -> None:
    """A group of bars each; one colour a series."""
    width = 0.8 / len(series)
    for i, (colour, (name, values)) in enumerate(zip(COLOURS, series.items(), strict=False)):
        axis.bar([at + (i + 0.5) * width - 0.4 for at in range(len(groups))], values, width, color=colour, label=name)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel(y)
    axis.legend(frameon=False, fontsize=8)


def picture_of_capacity(axis: Axes, it: Reproduction) -> None:
    lines(axis, it, "itl/p99", "requests/s", "time between tokens, p99 (s)")
    axis.set_yscale("log")
    for limit in (it.facts["limits"]["strict"], it.facts["limits"]["relaxed"]):
        axis.axhline(limit, color="black", linestyle=":", linewidth=1)


def picture_of_order(axis: Axes, it: Reproduction) -> None:
    series = {
        name: [it.get(label, key) for label in it.labels] for name, key in (("mean", "ttft/mean"), ("p99", "ttft/p99"))
    }
    bars(axis, it.labels, series, "time to first token (s)")
    axis.set_yscale("log")


def picture_of_swap(axis: Axes, it: Reproduction) -> None:
    cases = [(length, link) for link in it.points for length in CONTEXTS]
    series = {
        mode: [against(it, length, mode, "recompute", link) for length, link in cases]
        for mode in ("recompute", "swap", "auto")
    }
    groups = [f"{length} tokens\n{link:g} GB/s" for length, link in cases]
    bars(axis, groups, series, "makespan against recompute")


def picture_of_victims(axis: Axes, it: Reproduction) -> None:
    lines(axis, it, AGAIN, "KV blocks", "tokens computed again")
    axis.set_xscale("log")


def bars_of_gaps(axis: Axes, it: Reproduction) -> None:
    gaps_ms = [it.get(label, "itl/p99") * 1e3 for label in it.labels]
    bars(axis, it.labels, {"p99": gaps_ms}, "time between tokens, ms")
    axis.tick_params(axis="x", labelsize=7)


PICTURES: dict[str, Callable[[Axes, Reproduction], None]] = {
    "sarathi_capacity": picture_of_capacity,
    "chunk_size": lambda axis, it: trade(
        axis, it, ("itl/p99", "time between tokens, p99 (ms)", 1e3), ("ttft/mean", "time to first token (ms)", 1e3), ""
    ),
    "prefix_order": picture_of_order,
    "sjf_queueing": lambda axis, it: lines(axis, it, "e2e/mean", "requests/s", "end to end, mean (s)"),
    "recompute_swap": picture_of_swap,
    "victim_choice": picture_of_victims,
    "max_num_seqs": lambda axis, it: trade(
        axis,
        it,
        ("tpot/mean", "time per token (ms)", 1e3),
        ("throughput/output_tokens_per_s", "output tokens/s", 1),
        "",
    ),
    "disaggregation": bars_of_gaps,
}
