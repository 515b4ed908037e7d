"""`schedlab compare`: the table of runs and the verdicts on them, on the terminal, in files and in Weights & Biases.

Every figure comes from table.py and verdicts.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.bounds import TIGHT, Tightness, as_json, of_variants
from schedlab.experiments.analysis.statistics import t_interval
from schedlab.experiments.analysis.table import (
    SIDE_BY_SIDE,
    UNKNOWN,
    Comparison,
    Figure,
    Run,
    figure_of,
    figures_of,
    print_table,
)
from schedlab.experiments.analysis.verdicts import Answer, Finding, Verdicts, better_when
from schedlab.experiments.run.manifest import made_here
from schedlab.experiments.sweep.replicates import names_of
from schedlab.framework.results.writer import write_json, write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from schedlab.experiments.run.tracking import WandbConfig

Bounds = Mapping[str, Sequence[Tightness]]
"""How far the runs of each variant are from what no schedule could beat."""
VERDICTS = "verdicts"
HEADINGS = ("metric", "baseline", "variant", "change", "interval", "p", "p Holm", "verdict")
LATENCIES = ("ttft/", "tpot/", "itl/", "e2e/", "queue/")
WIDTH = 200


# ---- words ----


def change_text(found: Finding, value: float) -> str:
    """A relative change in percent, a difference in the metric's unit."""
    if found.scale == "ratio":
        return f"{value:+,.1%}" if abs(value) < 10 else f"{value + 1:,.1f}×"
    figure = figure_of(found.metric)
    if figure is not None and figure.format.endswith("%"):
        return f"{value * 100:+,.1f} points"
    return f"{value * (figure.scale if figure else 1):+,.4g}"


def interval_text(found: Finding) -> str:
    if found.low is None or found.high is None:
        return UNKNOWN
    return f"{change_text(found, found.low)} … {change_text(found, found.high)}"


def verdict_text(found: Finding) -> str:
    if found.verdict == "small":
        return f"below {change_text(found, found.matters).lstrip('+')}"
    if found.verdict != "inconclusive":
        return found.verdict
    needed = "more than 10,000" if found.needed is None else f"about {found.needed:,}"
    return f"inconclusive ({needed} replicates needed)"


def value_text(metric: str, value: float) -> str:
    figure = figure_of(metric)
    if figure is not None and not figure.format.endswith("d"):
        return figure.write(value)
    return f"{value * 1e3:,.1f}" if metric.startswith(LATENCIES) else f"{value:,.4g}"


def heading_text(metric: str) -> str:
    """As in the table of runs, else the key and its unit."""
    figure = figure_of(metric)
    group, _, statistic = metric.partition("/")
    return figure.heading if figure else (f"{group.upper()} {statistic} ms" if metric.startswith(LATENCIES) else metric)


def row(found: Finding) -> list[str]:
    p = [UNKNOWN if value is None else f"{value:.2g}" for value in (found.p, found.p_holm)]
    star = " *" if found.primary else ""
    return [
        heading_text(found.metric) + star, value_text(found.metric, found.baseline),
        value_text(found.metric, found.variant), change_text(found, found.change), interval_text(found), *p,
        verdict_text(found),
    ]  # fmt: skip


def legend(told: Answer, level: float) -> str:
    """How the intervals of an answer are to be read, in a line."""
    if told.refused:
        return f"no interval: {told.refused}"
    methods = sorted({found.method for found in told.findings if found.method not in (None, "equal")})
    return (
        f"{told.pairs} pairs; * the primary metric, {level:.0%} interval; the others as a family, {level:.0%} by Holm"
        f"{'; ' + ', '.join(map(str, methods)) if methods else ''}, and p by the same; changes below "
        f"{told.effect * 100:.3g} % do not matter"
    )


def telling(told: Answer) -> list[Finding]:
    """Without metrics other than the primary one that are equal in every pair."""
    return [found for found in told.findings if found.primary or found.verdict != "equal"]


def notes_of(told: Answer, level: float) -> list[str]:
    """What stands below the table of an answer."""
    equal = [heading_text(found.metric) for found in told.findings if found not in telling(told)]
    return [legend(told, level), *([f"equal in every pair: {', '.join(equal)}"] if equal else []), *told.notes]


def gate_lines(verdicts: Verdicts) -> list[str]:
    """A line for each gate and question."""
    lines = []
    for gate in verdicts.gates:
        bounds = "" if gate.low is None or gate.high is None else f" ({gate.low:+.1%} … {gate.high:+.1%})"
        lines.append(f"gate {gate.gate}: {gate.question}: {gate.reason}{bounds}")
    return lines


# ---- terminal and Markdown ----


def bound_rows(told: Bounds) -> list[list[str]]:
    """A row a metric: the mean of its bounds, and how many times that each variant is."""
    metrics = list(dict.fromkeys(found.metric for of in told.values() for found in of))
    rows = []
    for metric in metrics:
        of = {name: next((found for found in founds if found.metric == metric), None) for name, founds in told.items()}
        some = next(found for found in of.values() if found is not None)
        sign = "above" if metric.startswith("throughput") else "below"
        heading = f"{heading_text(metric)} {sign}{' (weak)' if some.weak else ''}"
        rows.append([heading, value_text(metric, some.bound), *map(bound_text, of.values())])
    return rows


def bound_text(found: Tightness | None) -> str:
    """How many times the bound, and in how many runs it is as good as met."""
    if found is None:
        return UNKNOWN
    return f"{found.ratio:.2f}×" + (f" ({found.tight}/{found.runs} within {TIGHT:.0%})" if found.tight else "")


def show(verdicts: Verdicts, told_bounds: Bounds | None = None) -> None:
    """Print the table of runs, how far they are from their bounds, then each question, then the gates."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if verdicts.comparison is not None:
        show_runs(verdicts.comparison, console)
    if told_bounds:
        bounded = Table("no schedule gives", box=None, pad_edge=False)
        for name in ("bound", *told_bounds):
            bounded.add_column(name, justify="right")
        for line in bound_rows(told_bounds):
            bounded.add_row(*line)
        console.print()
        console.print(bounded)
    for told in verdicts.answers:
        console.print(f"\n[bold]{told.name}[/bold]" if console.is_terminal else f"\n{told.name}")
        table = Table(box=None, pad_edge=False)
        for i, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if i in (0, len(HEADINGS) - 1) else "right")
        for found in telling(told):
            table.add_row(*row(found))
        console.print(table)
        for note in notes_of(told, verdicts.level):
            console.print(note, markup=False, soft_wrap=True)
    for note in ("", *gate_lines(verdicts), *verdicts.notes):
        console.print(note, markup=False, soft_wrap=True)


def show_runs(comparison: Comparison, console: Console | None = None) -> None:
    """The table of runs as they are, or where these are many with replicates, of their means."""
    from rich.console import Console

    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    groups = replicates_of(comparison)
    if len(comparison.runs) <= SIDE_BY_SIDE or len(groups) == len(comparison.complete):
        comparison.show()
        return
    header = names = list(groups)
    figures = figures_of(key for run in comparison.runs for key in run.figures)
    rows = [[figure.heading, *(mean_text(groups[name], figure) for name in names)] for figure in figures]
    rows = [["replicates", *(str(len(groups[name])) for name in names)], *rows]
    rows = [row for row in rows if set(row[1:]) != {UNKNOWN}]
    if len(names) > SIDE_BY_SIDE:
        headings, *values = zip(*rows, strict=True)
        header, rows = list(headings), [[name, *of] for name, of in zip(names, values, strict=True)]
    print_table(console, ["mean of replicates, 95 % interval", *header], rows, comparison.notes, names)


def replicates_of(comparison: Comparison) -> dict[str, list[Run]]:
    """Complete runs that differ in their seed alone, by a name."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in comparison.complete.values():
        facts = {"policy": run.policy, **run.labels}
        groups.setdefault(tuple((k, str(v)) for k, v in facts.items() if k != "seed"), []).append(run)
    return dict(zip(names_of([dict(facts) for facts in groups]), groups.values(), strict=True))


def mean_text(runs: Sequence[Run], figure: Figure) -> str:
    """The mean of the replicates and half the width of its 95 % interval by Student's t."""
    values = np.array([value for run in runs if (value := run.figures.get(figure.key)) is not None], dtype=np.float64)
    if not len(values):
        return UNKNOWN
    if len(values) == 1 or not np.ptp(values):
        return figure.write(round(values[0]) if figure.format.endswith("d") else float(values[0]))
    shown = figure._replace(format=figure.format.replace("d", ".1f"))
    low, high = t_interval(values)
    return f"{shown.write(float(values.mean()))} ±{shown.write(float(high - low) / 2)}"


def markdown(verdicts: Verdicts, told_bounds: Bounds | None = None) -> str:
    """The same without the table of runs, which comparison.md has."""
    parts = []
    if told_bounds:
        names = ["no schedule gives", "bound", *told_bounds]
        lines = [names, ["---", *["---:"] * (len(names) - 1)], *bound_rows(told_bounds)]
        parts.append("## Bounds\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines))
    for told in verdicts.answers:
        lines = [list(HEADINGS), ["---", *["---:"] * 6, "---"], *map(row, telling(told))]
        table = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        notes = "".join(f"- {line}\n" for line in notes_of(told, verdicts.level))
        parts.append(f"## {told.name}\n\n{table}\n{notes}")
    settings = verdicts.comparison.settings if verdicts.comparison else []
    notes = "".join(f"- {line}\n" for line in (*gate_lines(verdicts), *verdicts.notes, *settings))
    return "\n".join(["# Verdicts\n", *parts, *([notes] if notes else [])])


# ---- files and Weights & Biases ----


def write(verdicts: Verdicts, directory: Path, told_bounds: Bounds | None = None) -> list[Path]:
    """verdicts.json and verdicts.md."""
    paths = [directory / f"{VERDICTS}.json", directory / f"{VERDICTS}.md"]
    content = {**verdicts.as_json(), "bounds": as_json(told_bounds or {})}
    write_json(paths[0], content)
    write_whole(paths[1], markdown(verdicts, told_bounds))
    return paths


def place_of(directories: Sequence[Path]) -> Path | None:
    """Where the verdicts on one sweep belong: in its directory. None for a run, and for several directories."""
    if len(directories) != 1 or (directories[0] / "result.json").exists():
        return None
    return directories[0]


def wandb_settings(comparison: Comparison, directory: Path, mode: str | None) -> WandbConfig | None:
    """Those of the runs, for a run of job type `compare` in their group; None where they report nowhere."""
    from schedlab.experiments.run.tracking import WandbConfig

    told = next((found for run in comparison.runs if (found := run.manifest.get("config", {}).get("wandb"))), None)
    if told is None and mode is None:
        return None
    known = {f.name for f in fields(WandbConfig)}
    keys = {key: value for key, value in (told or {}).items() if key in known}
    whole = directory.resolve()
    keys["group"] = keys.get("group") or f"{whole.parent.name}/{whole.name}"
    keys["mode"] = mode or ("disabled" if keys.get("mode") == "disabled" else _as_told(comparison, keys.get("mode")))
    settings = WandbConfig(**keys | {"job_type": "compare", "name": f"compare-{whole.name}"})
    return None if settings.mode == "disabled" else settings


def _as_told(comparison: Comparison, mode: Any) -> str:
    """The runs' own mode; nothing is uploaded because files from elsewhere say so."""
    here = all(made_here(run.manifest) for run in comparison.runs)
    return str(mode or "offline") if here else "offline"


def report_to_wandb(verdicts: Verdicts, settings: WandbConfig, directory: Path) -> None:
    """One run with every finding in its summary and in a table, and the files as an artifact; never fails."""
    from schedlab.experiments.run import tracking

    with tracking.never_failing("no Weights & Biases run of the comparison"):
        run = tracking.open_run(settings, {"primary": verdicts.primary, "level": verdicts.level}, directory)
        with tracking.environment({"WANDB_DATA_DIR": str(directory / "wandb" / "data")}):
            run.summary.update(summary_of(verdicts))
            log_table(run, verdicts, directory)
        run.finish(exit_code=int(verdicts.regressed))
        if settings.mode == "online":
            tracking.upload(Path(run.settings.sync_dir), directory, settings.finish_timeout_s)


def summary_of(verdicts: Verdicts) -> dict[str, Any]:
    """Changes, bounds and verdicts by question and metric, without slashes where W&B would nest them."""
    values: dict[str, Any] = {"runs": verdicts.runs, "regressed": verdicts.regressed}
    for told in verdicts.answers:
        for found in told.findings:
            facts = {"change": found.change, "low": found.low, "high": found.high, "verdict": found.verdict}
            values |= {f"{told.name}/{found.metric}/{key}": value for key, value in facts.items() if value is not None}
    return values


def log_table(run: Any, verdicts: Verdicts, directory: Path) -> None:
    import wandb

    from schedlab.experiments.run.tracking import log_artifact

    columns = [f.name for f in fields(Finding)]
    data = [
        [told.name, *(getattr(found, name) for name in columns), better_when(found.metric)]
        for told in verdicts.answers for found in told.findings
    ]  # fmt: skip
    artifact = wandb.Artifact(f"verdicts-{run.id}", type="verdicts")
    table = wandb.Table(columns=["question", *columns, "better_when"], data=data)
    artifact.add(table, VERDICTS)
    for name in (f"{VERDICTS}.json", f"{VERDICTS}.md", "comparison.json", "comparison.md"):
        if (directory / name).exists():
            artifact.add_file(str(directory / name), name=name, policy="immutable")
    log_artifact(run, artifact, directory)
    bind: Any = table.bind_to_run  # to the artifact above, else W&B makes another one, which cannot be moved
    bind(run, VERDICTS, 0)
    run.log({VERDICTS: table})


def compare(
    directories: Sequence[Path],
    *,
    form: str,
    out: Path | None,
    wandb_mode: str | None,
    bounds: bool,
    options: Mapping[str, Any],
) -> bool:
    """The command. Returns whether a gate found a regression."""
    from schedlab.experiments.analysis.verdicts import compare_runs

    verdicts = compare_runs(directories, **options)
    assert verdicts.comparison is not None
    told = of_variants(replicates_of(verdicts.comparison)) if bounds else {}
    if form == "csv":
        print(verdicts.comparison.csv(), end="")
    elif form == "json":
        print(json.dumps({**verdicts.as_json(), "bounds": as_json(told)}, indent=1, allow_nan=False))
    elif form == "markdown":
        print(markdown(verdicts, told), end="")
    else:
        show(verdicts, told)
    place = out or place_of(directories)
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        write(verdicts, place, told)
        if settings := wandb_settings(verdicts.comparison, place, wandb_mode):
            report_to_wandb(verdicts, settings, place)
    return verdicts.regressed
