"""`schedlab report DIR`: what a run or a sweep left, as one HTML file that needs nothing else.

Pictures are drawn in report_plots.py; the layout is templates/report.html.j2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis import report_plots as draw
from schedlab.experiments.analysis import series
from schedlab.experiments.analysis.bounds import Tightness, alone_ttft_s, of_variants
from schedlab.experiments.analysis.curves import of_sweep
from schedlab.experiments.analysis.curves import picture as curve_picture
from schedlab.experiments.analysis.explain import SAID, SPENT, cause_lines, explain
from schedlab.experiments.analysis.report_answers import place_of, sentences, slowest, written_change
from schedlab.experiments.analysis.report_plots import svg
from schedlab.experiments.analysis.statistics import interval
from schedlab.experiments.analysis.step_work import machine_of, step_work
from schedlab.experiments.analysis.table import SIDE_BY_SIDE, UNKNOWN, Comparison, Figure, Run, figures_of
from schedlab.experiments.analysis.verdicts import compare_runs
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.writer import folder_within, not_a_link, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

REPORT = "report.html"
VERDICTS = "verdicts.json"
MOST_CLIENTS = 12
LOGS = "full"


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed alone: replicates of one setting. `first` is drawn where one run must do."""

    name: str
    runs: Sequence[Run]

    @property
    def first(self) -> Run:
        return self.runs[0]

    def values(self, key: str) -> list[float]:
        """A summary key of each run that knows it."""
        found = (run.figures.get(key) for run in self.runs)
        return [float(value) for value in found if value is not None]

    def latency(self, name: str) -> np.ndarray:
        """Seconds of all requests of all runs."""
        return np.concatenate([series.latencies(run.tables.requests)[name] for run in self.runs])


@dataclass
class Section:
    """A heading, pictures by name, and paragraphs."""

    title: str
    pictures: dict[str, Picture] = field(default_factory=dict)
    note: str = ""


class HtmlReport:
    """The runs in and below a directory, by variant. ConfigError if none of them finished any request with its logs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.comparison = Comparison.read([directory], required=True)
        found = [(run, run.tables) for run in self.comparison.complete.values()]
        logged = [run for run, t in found if t.result["record"] == LOGS and t.summary["requests/finished"]]
        if not logged:
            raise ConfigError(f"{directory}: expected a run with logs (record=full) and finished requests, found none")
        self.variants = variants(logged)
        self.drawn = self.variants[:SIDE_BY_SIDE]

    @cached_property
    def sections(self) -> list[Section]:
        """Pictures of all variants over each other."""
        drawn = {variant.name: variant for variant in self.drawn}
        latencies = {
            f"{name}_cdf": draw.cdf(name, {key: variant.latency(name) for key, variant in drawn.items()})
            for name in draw.TITLES
        }
        if (alone := alone_ttft_s(self.variants[0].first.directory, self.variants[0].first.tables)) is not None:
            draw.with_bound(latencies["ttft_cdf"], alone)
        firsts = {name: variant.first.tables for name, variant in drawn.items()}
        found = [Section("Latencies", latencies), Section("Stalls", {"itl_over_time": draw.itl_over_time(firsts)})]
        if len(self.variants) > 1 and (points := self._points()):
            found.append(Section("TTFT against TPOT", {"pareto": draw.pareto(points)}))
        if swept := of_sweep(self.comparison):
            pictures = {curve.name: curve_picture(curve, draw.SIZE) for curve in swept}
            found.append(Section("Against what was swept", pictures))
        return [*found, self._fairness()]

    def _points(self) -> dict[str, list[tuple[float, float]]]:
        both = {v.name: list(zip(v.values("ttft/p99"), v.values("tpot/p99"), strict=False)) for v in self.variants}
        return {name: points for name, points in both.items() if points}

    def _fairness(self) -> Section:
        means = {variant.name: per_client(variant.first) for variant in self.drawn}
        jain = ", ".join(
            f"{v.name} {np.mean(v.values('fairness/jain')):.3f}" for v in self.drawn if v.values("fairness/jain")
        )
        note = (
            f"Jain's index of tokens served per token asked for, over clients, at the last arrival: {jain or UNKNOWN}."
        )
        if len(next(iter(means.values()))) < 2:
            return Section("Fairness", note=f"{note} All requests are of one client.")
        return Section("Fairness", {"fairness": draw.fairness(means)}, note)

    def of_variant(self, variant: Variant) -> Section:
        """Pictures of one run of it."""
        tables, place = variant.first.tables, self.drawn.index(variant)
        pictures = {f"batch_{place}": draw.batch(tables), f"occupancy_{place}": draw.occupancy(tables)}
        if (machine := machine_of(variant.first.manifest)) is not None:
            line, hardware = machine
            dtype = line.weight_dtype if line.weight_dtype == "fp8" else line.activation_dtype
            pictures[f"roofline_{place}"] = draw.roofline(step_work(tables, line), hardware, dtype)
        return Section(variant.name, pictures)

    def summary(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: mean over the replicates, with its 95 % interval where there are two and more."""
        figures = figures_of(key for v in self.variants for run in v.runs for key in run.tables.summary)
        rows = [[f.heading, *(written(f, v.values(f.key)) for v in self.variants)] for f in figures]
        return ["", *(v.name for v in self.variants)], [row for row in rows if set(row[1:]) != {UNKNOWN}]

    def bounds(self) -> dict[str, list[tuple[str, ...]]]:
        """How near each variant comes to what no schedule could beat, where its machine is known."""
        found = of_variants({variant.name: variant.runs for variant in self.drawn})
        return {name: [told_bound(bound) for bound in bounds] for name, bounds in found.items()}

    def verdicts(self) -> dict[str, Any] | None:
        """What `schedlab compare` found, where it left it beside the sweep."""
        path = self.directory / VERDICTS
        if not path.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON, {error}") from None
        return found

    def judged(self) -> dict[str, Any] | None:
        """These, or what it would find; None where there is one variant alone."""
        found = self.verdicts()
        if found is not None or len(self.variants) < 2:
            return found
        try:
            return compare_runs([self.directory]).as_json()
        except ConfigError as error:  # what cannot be paired, as runs that stored no requests, can be shown
            return {"answers": [], "gates": [], "notes": [str(error)]}

    def place(self, variant: str, condition: str) -> int | None:
        """Which of the drawn variants a question is about, from 1 on."""
        return place_of(variant, condition, [found.name for found in self.drawn])


def variants(runs: Sequence[Run]) -> list[Variant]:
    """Runs by all that they were asked but the seed, in order of their first."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        asked = {key: str(value) for key, value in run.labels.items() if key != "seed"}
        groups.setdefault(json.dumps(asked, sort_keys=True), []).append(run)
    names = Comparison([group[0] for group in groups.values()]).names
    return [Variant(name, group) for name, group in zip(names, groups.values(), strict=True)]


def written(figure: Figure, values: Sequence[float]) -> str:
    """The mean and its interval, in the figure's format."""
    if not values:
        return UNKNOWN
    if len(set(values)) == 1:
        return figure.write(int(values[0]) if figure.format.endswith("d") else values[0])
    shown, (low, high) = figure._replace(format=figure.format.replace("d", ".1f")), bounds(np.array(values), figure)
    return f"{shown.write(float(np.mean(values)))} ({shown.write(low)} – {shown.write(high)})"


def bounds(values: np.ndarray, figure: Figure) -> tuple[float, float]:
    """A 95 % interval that stays where such values can be: shares by their odds, other positive values by their logs.

    Where a share is 0 or 1 it has no finite odds, and the plain interval ends there.
    """
    share = figure.format.endswith("%")
    if values.min() <= 0 or (share and values.max() >= 1):
        found = interval(values)
        return max(found.low, 0.0), min(found.high, 1.0) if share else found.high
    found = interval(np.log(values / (1 - values) if share else values))
    odds = np.exp([found.low, found.high])
    low, high = odds / (1 + odds) if share else odds
    return float(low), float(high)


def told_bound(bound: Tightness) -> tuple[str, ...]:
    """Metric, bound in its unit, value over bound, and how many runs are within a tenth of it."""
    unit, scale = ("tokens/s", 1.0) if bound.metric.startswith("throughput") else ("ms", 1e3)
    kind = f"{bound.by}, weak" if bound.weak else bound.by
    tight = f"{bound.tight} of {bound.runs}"
    return bound.metric, f"{bound.bound * scale:,.1f} {unit}", f"{bound.ratio:,.2f}×", tight, kind


def per_client(run: Run) -> dict[str, float]:
    """Mean end-to-end seconds an output token, of the clients with most requests."""
    requests = run.tables.requests
    done = np.array([status == "finished" for status in requests["status"]])
    per_token = (requests["finished_s"] - requests["arrival_s"]) / np.maximum(requests["output_tokens"], 1)
    names, place = np.unique(np.array(requests["client"])[done], return_inverse=True)
    counts = np.bincount(place, minlength=len(names))
    means = np.bincount(place, weights=per_token[done], minlength=len(names)) / np.maximum(counts, 1)
    order = np.argsort(-counts, kind="stable")[:MOST_CLIENTS]
    return {str(names[i]): float(means[i]) for i in order}


# ---- what the template is given ----


def explained(variant: Variant, tried: bool | None, trust: bool) -> dict[str, Any]:
    """Parts of TTFT and TPOT in ms with their shares, and causes in words."""
    found = explain(variant.first.directory, tried, trust)
    return {
        "parts": {"TTFT": _parts(found.ttft, found.slowest_ttft), "TPOT": _parts(found.tpot, found.slowest_tpot)},
        "time": {SPENT[part]: share for part, share in found.time.items()},
        "causes": [" ".join(line.strip() for line in cause_lines(item)) for item in found.named],
        "requests": found.requests,
    }


def _parts(parts: Mapping[str, float], slowest: Mapping[str, float]) -> list[tuple[str, float, float, float]]:
    """Words, mean ms, its share, and ms among the slowest."""
    whole = sum(parts.values()) or 1.0
    kept = [name for name in parts if parts[name] or slowest[name]]
    return [(SAID[name], parts[name] * 1e3, parts[name] / whole, slowest[name] * 1e3) for name in kept]


def facts(run: Run) -> list[tuple[str, str]]:
    """The manifest in short."""
    manifest = run.manifest
    workload, git = manifest.get("workload", {}), manifest.get("git") or {}
    hardware, found = manifest.get("hardware", {}), manifest.get("labels", {})
    rows = {
        **{key: found[key] for key in ("workload", "engine", "model", "hardware", "slo") if key in found},
        "requests": f"{workload.get('requests', 0):,} over {workload.get('span_s', 0):,.1f} s",
        "trace": workload.get("path") or "synthetic", "trace sha256": workload.get("sha256") or UNKNOWN,
        "clock": manifest.get("clock", UNKNOWN), "config hash": manifest.get("config_hash", UNKNOWN),
        "code": f"{git.get('commit', UNKNOWN)}{' (changed)' if git.get('dirty') else ''}",
        "machine": hardware.get("gpu") or hardware.get("cpu") or UNKNOWN,
        "versions": ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items() if v),
        "started": manifest.get("started_at", UNKNOWN), "command": " ".join(manifest.get("command", [])),
    }  # fmt: skip
    return [(key, str(value)) for key, value in rows.items()]


def write_report(
    directory: Path, out: Path | None = None, tried: bool | None = None, trust: bool = False
) -> tuple[Path, list[Path]]:
    """report.html in `directory`, or `out`; and every picture of it as PNG and SVG in `plots/` beside it."""
    from jinja2 import Environment, PackageLoader

    report, path = HtmlReport(directory), out or directory / REPORT
    own = [(variant, report.of_variant(variant)) for variant in report.drawn]
    sections = [*report.sections, *(section for _, section in own)]
    pictures = {name: picture for section in sections for name, picture in section.pictures.items()}
    inline = {name: svg(picture, name) for name, picture in pictures.items()}
    saved = save(pictures, inline, path.parent / "plots")
    header, rows = report.summary()
    verdicts = report.judged()
    environment = Environment(
        loader=PackageLoader("schedlab.experiments.analysis", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    write_whole(path, environment.get_template("report.html.j2").render(
        title=directory.resolve().name, header=header, rows=rows, notes=report.comparison.notes, inline=inline,
        failed=report.comparison.failed, replicates=max(len(variant.runs) for variant in report.variants),
        left_out=len(report.variants) - len(report.drawn), verdicts=verdicts, bounds=report.bounds(),
        answers=sentences(verdicts), place=report.place,
        sections=report.sections,
        own=[(section, explained(variant, tried, trust), slowest(variant.first.tables)) for variant, section in own],
        facts=facts(report.variants[0].first),
        change=written_change, caption=draw.caption, manifest=json.dumps(report.variants[0].first.manifest, indent=1),
    ))  # fmt: skip
    return path, saved


def save(pictures: Mapping[str, Picture], inline: Mapping[str, str], directory: Path) -> list[Path]:
    """Each as PNG and SVG."""
    folder_within(directory.parent, directory.name)
    for name, picture in pictures.items():
        picture.savefig(not_a_link(directory / f"{name}.png"), dpi=120)
        write_whole(directory / f"{name}.svg", inline[name] + "\n")
    return [directory / f"{name}.{form}" for name in pictures for form in ("png", "svg")]
