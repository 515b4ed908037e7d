"""Finished runs side by side, from their files: headline figures, what differs between the runs, which tokens agree.

It is laid out for the terminal (in ms), Markdown and JSON; no figure is computed here.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from schedlab.experiments.analysis.agreement import describe_agreement
from schedlab.experiments.analysis.derived import derived
from schedlab.experiments.analysis.pressure import pressure
from schedlab.experiments.run.offered import offered_hash
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.groups import TURNED_AWAY
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import write_json, write_whole

if TYPE_CHECKING:
    from rich.console import Console

LIMITS = ("max_num_batched_tokens", "max_num_seqs", "num_blocks", "block_size", "max_model_len", "swap_space_gib")
"""What runs must share for their latencies to be a matter of policy."""
SIDE_BY_SIDE = 6
"""Up to so many runs are columns of the table; more are its rows."""
UNKNOWN = "–"


class Figure(NamedTuple):
    """A summary key, its heading, and the format of its value after multiplication by `scale`."""

    key: str
    heading: str
    format: str
    scale: float = 1

    def write(self, value: float | None) -> str:
        return UNKNOWN if value is None else format(value * self.scale if self.scale != 1 else value, self.format)


FIGURES = (
    Figure("ttft/mean", "TTFT mean ms", ",.1f", 1e3),
    Figure("ttft/p99", "TTFT p99 ms", ",.1f", 1e3),
    Figure("tpot/mean", "TPOT mean ms", ",.1f", 1e3),
    Figure("itl/p99", "ITL p99 ms", ",.1f", 1e3),
    Figure("e2e/p99", "E2E p99 ms", ",.1f", 1e3),
    Figure("throughput/output_tokens_per_s", "output tok/s", ",.1f"),
    Figure("goodput/requests_per_s", "goodput req/s", ",.2f"),
    Figure("slo/attainment", "SLO met", ".1%"),
    Figure("slo/attainment_limited", "SLO met, with limits", ".1%"),
    Figure("prefix/hit_rate", "prefix hits", ".1%"),
    Figure("kv/utilization_mean", "KV used", ".1%"),
    Figure("preemptions/recompute", "preempted", ",d"),
    Figure("preemptions/swap", "swapped", ",d"),
    Figure("pressure/queue", "steps with a queue", ".1%"),
    Figure("pressure/split_prompts", "prompts split", ",d"),
    Figure("requests/finished", "finished", ",d"),
    Figure("requests/rejected", "rejected", ",d"),
    Figure("scheduler/us_per_step", "scheduler µs/step", ",.1f"),
)
CLASS_FIGURES = {
    "slo_attainment": ("SLO met", ".1%", 1.0),
    "ttft_p99": ("TTFT p99 ms", ",.1f", 1e3),
    "tpot_p99": ("TPOT p99 ms", ",.1f", 1e3),
    "finished": ("finished", ",d", 1.0),
    "rejected": ("rejected", ",d", 1.0),
    "service_share": ("share of service", ".1%", 1.0),
}
"""What is shown of each SLO class where a run has several."""
HEADLINE = ("ttft/p99", "itl/p99", "throughput/output_tokens_per_s", "slo/attainment", "requests/finished")


def figures_of(keys: Iterable[str]) -> list[Figure]:
    """FIGURES, and what `keys` have beyond them: why requests were turned away, what clients that leave or try again
    had, and the figures of programs and SLO classes."""
    further = [Figure(f"requests/{reason}", reason.replace("_", " "), ",d") for reason in TURNED_AWAY]
    further += [
        Figure("requests/timed_out", "timed out", ",d"),
        Figure("requests/abandoned", "abandoned", ",d"),
        Figure("offered/logical", "asked for", ",d"),
        Figure("offered/attempts", "attempts", ",d"),
        Figure("offered/given_up", "given up", ",d"),
        Figure("goodput/share", "SLO met, of what was asked for", ".1%"),
        Figure("offered/ttft/p99", "TTFT p99 from the first attempt ms", ",.1f", 1e3),
        Figure("offered/e2e/p99", "E2E p99 from the first attempt ms", ",.1f", 1e3),
    ]
    further += [Figure(f"program/duration/{s}", f"program {s} s", ",.2f") for s in ("mean", "p50", "p99")]
    names = dict.fromkeys(key.split("/")[1] for key in keys if key.startswith("class/"))
    for name in names:
        for key, (heading, form, scale) in CLASS_FIGURES.items():
            further.append(Figure(f"class/{name}/{key}", f"{name}: {heading}", form, scale))
    return [*FIGURES, *further]


def figure_of(key: str) -> Figure | None:
    """How a figure of a summary is shown in tables, if it is."""
    return next((figure for figure in figures_of([key]) if figure.key == key), None)


def headlines(known: Sequence[str]) -> list[Figure]:
    """HEADLINE, and beside the pooled share of the requests those that are `known` of each class and of what was first
    asked for."""
    shown = [figure for key in HEADLINE for figure in FIGURES if figure.key == key]
    shares = [key for key in known if key.startswith("class/") and key.endswith("/slo_attainment")]
    shares += [key for key in known if key == "goodput/share"]
    return shown + [figure for key in shares if (figure := figure_of(key)) is not None]


@dataclass(frozen=True)
class Run:
    """One run directory as it was read."""

    directory: Path
    tables: RunTables

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.tables.manifest or {}

    @property
    def labels(self) -> dict[str, Any]:
        """What the run was asked to be: the options chosen for each group, and every key that was given."""
        return {**self.manifest.get("labels", {}), **self.manifest.get("overrides", {})}

    @property
    def policy(self) -> str:
        return str(self.labels.get("policy", self.directory.name))

    @property
    def complete(self) -> bool:
        return self.tables.status == "finished"

    @property
    def error(self) -> str | None:
        return self.tables.result["error"]  # type: ignore[no-any-return]

    @property
    def slos(self) -> list[dict[str, Any]]:
        return list(self.tables.result["measurement"]["slo"])

    def limit(self, name: str) -> Any:
        return self.manifest.get("engine", {}).get(name)

    @property
    def workload(self) -> str:
        """What the manifest says of the requests. Runs of two files may have been offered the same all the same."""
        workload = self.manifest.get("workload", {}), self.manifest.get("config", {}).get("workload")
        return json.dumps([*workload, str(self.labels.get("seed"))], sort_keys=True)

    @cached_property
    def offered(self) -> str:
        """Equal for runs that were offered the same requests; ConfigError where they were not stored."""
        return str(derived(self.directory, "offered", lambda: offered_hash(self.directory)))

    @property
    def task(self) -> str:
        """Equal for runs of one seed on the same model and kind of engine."""
        model = self.manifest.get("config", {}).get("model")
        return json.dumps([self.labels.get("seed"), self.labels.get("engine"), model], sort_keys=True)

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The summary and, where there are logs, how short capacity was."""
        if not self.complete:
            return {}
        told = "pressure" in self.tables.result
        short = pressure(self.tables) if told else derived(self.directory, "pressure", lambda: pressure(self.tables))
        return {**self.tables.summary, **short}


class Comparison:
    """Runs in the order of their directories; `names` tell them apart."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.names = distinguishing_names(runs)
        self.complete = {name: run for name, run in zip(self.names, runs, strict=True) if run.complete}
        self.failed = {name: run for name, run in zip(self.names, runs, strict=True) if not run.complete}

    @classmethod
    def read(cls, paths: Iterable[Path], required: bool = False) -> Comparison:
        """All runs in and below `paths`, a fleet as one. ConfigError for a path without any, if `required`."""
        runs: list[Run] = []
        for path in paths:
            found = [result.parent for result in sorted(path.rglob("result.json"), key=_numbers_in_order)]
            if required and not found:
                raise ConfigError(f"{path}: no run in here, there is no result.json")
            whole = set(found)
            runs += [Run(run, read_run(run)) for run in found if whole.isdisjoint(run.parents)]
        return cls(runs)

    @property
    def settings(self) -> list[str]:
        """What figures of this kind are not to be read without: SLO classes and predictors."""
        runs = list(self.complete.values())
        return [*slo_notes(runs), *predictor_notes(runs)] if runs else []

    @cached_property
    def notes(self) -> list[str]:
        """What a reader must know besides the figures, the runs without figures included."""
        runs, notes = list(self.complete.values()), self.settings
        if runs:
            notes += [*limit_notes(runs), *chain_notes(runs), *arrival_notes(runs), *token_notes(self.complete)]
        return notes + [f"{run.tables.status}: {name}: {run.error}" for name, run in self.failed.items()]

    def rows(self) -> list[list[str]]:
        """Heading and values of each figure that any run knows."""
        figures = figures_of(key for run in self.runs for key in run.figures)
        written = [[f.heading, *(f.write(run.figures.get(f.key)) for run in self.runs)] for f in figures]
        return [row for row in written if set(row[1:]) != {UNKNOWN}]

    def laid_out(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: few runs side by side, many below each other."""
        rows = self.rows()
        if len(self.runs) <= SIDE_BY_SIDE:
            return ["", *self.names], rows
        headings, *values = zip(*rows, strict=True) if rows else [(), *[()] * len(self.runs)]
        return ["", *headings], [[name, *of_run] for name, of_run in zip(self.names, values, strict=True)]

    def show(self) -> None:
        """Print the table and its notes."""
        from rich.console import Console

        console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
        print_table(console, *self.laid_out(), self.notes, self.names)

    def markdown(self) -> str:
        header, rows = self.laid_out()
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        table = "".join("| " + " | ".join(value.replace("|", "\\|") for value in line) + " |\n" for line in lines)
        return table + "\n" + "".join(f"- {note}\n" for note in self.notes)

    def as_json(self) -> dict[str, Any]:
        runs = [run_json(run, name) for run, name in zip(self.runs, self.names, strict=True)]
        return {"runs": runs, "notes": self.notes}

    def wide(self) -> tuple[list[str], list[list[Any]]]:
        """Header and a row a run: name, folder, status, what it was asked, and every figure as it is in the summary."""
        labels = list(dict.fromkeys(key for run in self.runs for key in run.labels))
        figures = list(dict.fromkeys(key for run in self.runs for key in run.figures))
        rows = [
            [name, str(run.directory), run.tables.status, *map(run.labels.get, labels), *map(run.figures.get, figures)]
            for name, run in zip(self.names, self.runs, strict=True)
        ]
        return ["name", "directory", "status", *labels, *figures], rows

    def csv(self) -> str:
        header, rows = self.wide()
        return written(header, rows)

    def write(self, directory: Path) -> None:
        """comparison.md, comparison.json and comparison.csv."""
        write_whole(directory / "comparison.csv", self.csv())
        write_whole(directory / "comparison.md", self.markdown())
        write_json(directory / "comparison.json", self.as_json())


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str], names: Sequence[str]
) -> None:
    """Names on the left, figures on the right, `notes` below; `names` that would be broken are numbers told below."""
    from rich.table import Table

    if len(names) > 1 and unbroken_width(header, rows) > console.width:
        numbers = {name: f"#{number}" for number, name in enumerate(names, 1)}
        header = [numbers.get(name, name) for name in header]
        rows = [[numbers.get(row[0], row[0]), *row[1:]] for row in rows]
        notes = [*(f"{number}  {name}" for name, number in numbers.items()), *notes]
    table = Table(box=None, pad_edge=False)
    table.add_column(header[0], overflow="fold")  # a name that is too long is broken, and nothing of it left out
    for heading in header[1:]:
        table.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)


def csv_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of rows by the names of their columns; one that a row lacks is empty in it."""
    header = list(dict.fromkeys(key for row in rows for key in row))
    return written(header, [[row.get(key) for key in header] for row in rows])


def written(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def unbroken_width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Columns of a terminal that the table takes if lines are broken between words alone."""
    widest = [
        max(len(word) for cell in column for word in [*cell.split(), ""]) for column in zip(header, *rows, strict=True)
    ]
    return sum(widest) + 2 * (len(widest) - 1)


def headline(tables: RunTables) -> str:
    """A run in one line."""
    shown = headlines([key for key, value in tables.summary.items() if value is not None])
    return ", ".join(f"{figure.heading} {figure.write(tables.summary[figure.key])}" for figure in shown)


def distinguishing_names(runs: Sequence[Run]) -> list[str]:
    """Each run by its policy and whatever else differs; by its directory where that does not tell them apart."""
    keys = list(dict.fromkeys(key for run in runs for key in run.labels if key != "policy"))
    differing = [key for key in keys if len({str(run.labels[key]) for run in runs if key in run.labels}) > 1]
    names = [
        " ".join([run.policy, *(f"{key}={run.labels[key]}" for key in differing if key in run.labels)]) for run in runs
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({run.directory})" for name, run in zip(names, runs, strict=True)
    ]


def run_json(run: Run, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "directory": str(run.directory),
        "status": run.tables.status,
        "error": run.error,
        "labels": run.labels,
        "config_hash": run.tables.result.get("config_hash"),
        "digest": run.tables.digest,
        "summary": run.figures or run.tables.summary,
    }


# ---- what may be compared with what ----


def slo_notes(runs: Sequence[Run]) -> list[str]:
    lines = list(dict.fromkeys(f"SLO {slo_line(slo)}" for run in runs for slo in run.slos))
    if len({json.dumps(run.slos, sort_keys=True) for run in runs}) > 1:
        lines.append("SLO classes differ between the runs: attainment and goodput cannot be compared")
    return lines or ["SLO none: every finished request meets it"]


def slo_line(slo: Mapping[str, Any]) -> str:
    """`default: TTFT ≤ 1000 ms, TPOT ≤ 50 ms`"""
    limits = {
        key.removesuffix("_s").upper(): value for key, value in slo.items() if key.endswith("_s") and value is not None
    }
    return f"{slo['name']}: {', '.join(f'{key} ≤ {value * 1e3:g} ms' for key, value in limits.items()) or 'no limits'}"


def predictor_notes(runs: Sequence[Run]) -> list[str]:
    """What told policies how long an output will be: it decides as much as a policy that asks."""
    lines = list(dict.fromkeys(predictor_line(run.manifest) for run in runs))
    return [f"{'predictors differ' if len(lines) > 1 else 'predictor'}: {' or '.join(lines)}"]


def predictor_line(manifest: Mapping[str, Any]) -> str:
    """`noisy (sigma=0.5, seed=0)`; `none` where no output length was predicted."""
    node, told = manifest.get("config", {}).get("predictor"), manifest.get("predictor") or {}
    keys = dict(node) if isinstance(node, Mapping) else {"_target_": told.get("class"), **told.get("knobs", {})}
    if not (target := keys.pop("_target_", None)):
        return "none"
    name = manifest.get("labels", {}).get("predictor") or str(target).rpartition(".")[2]
    knobs = ", ".join(f"{key}={value}" for key, value in keys.items())
    return f"{name} ({knobs})" if knobs else str(name)


def limit_notes(runs: Sequence[Run]) -> list[str]:
    """Budgets, slots and blocks: what they are if equal, and which are not."""
    found = {name: list(dict.fromkeys(run.limit(name) for run in runs)) for name in LIMITS}
    differing = [f"limits differ: {name} is {' or '.join(map(str, f))}" for name, f in found.items() if len(f) > 1]
    same = ", ".join(f"{name} {values[0]}" for name, values in found.items())
    return differing or [f"{'equal limits' if len(runs) > 1 else 'limits'}: {same}"]


def chain_notes(runs: Sequence[Run]) -> list[str]:
    """What chained steps do to the gaps between tokens, which nobody would guess from their figures."""
    chained = list(dict.fromkeys(steps for run in runs if (steps := run.limit("max_chained_steps") or 1) > 1))
    if not chained:
        return []
    words = " or ".join(map(str, chained))
    return [f"tokens come in bunches of up to {words} (max_chained_steps): most gaps are 0, the others a chain long"]


def arrivals(runs: Sequence[Run]) -> list[str]:
    """A key for each run, equal for those that were offered the same requests, as far as can be told."""
    told = [run.workload for run in runs]
    if len(set(told)) < 2:
        return told
    try:
        return [run.offered for run in runs]
    except ConfigError:  # some run has stored no requests
        return told


def arrival_notes(runs: Sequence[Run]) -> list[str]:
    kinds = len(set(arrivals(runs)))
    return [f"arrivals differ: the runs were offered {kinds} different sets of requests"] if kinds > 1 else []


def token_notes(runs: Mapping[str, Run]) -> list[str]:
    groups: dict[tuple[str, str], dict[str, Path]] = {}
    for (name, run), offer in zip(runs.items(), arrivals(list(runs.values())), strict=True):
        groups.setdefault((offer, run.task), {})[name] = run.directory
    return [note for group in groups.values() if len(group) > 1 and (note := describe_agreement(group))]


def _numbers_in_order(path: Path) -> list[tuple[int, int, str]]:
    """Job 10 after job 9, names by alphabet."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.parts]
