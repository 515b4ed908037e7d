"""`schedlab bench`: every installed policy on the same fixed cells of traffic, load and SLO; one normalised table.

A cell's score is its goodput as a share of the best policy's there, so that 1.00 means that nobody served more requests
within the SLO. The table is exact: time is virtual, and all policies get the same requests. Knows cells and figures;
how a run is made is run.py's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments import pool, resume
from schedlab.framework.errors import ConfigError
from schedlab.framework.writer import write_whole

FIGURES = (
    "goodput/requests_per_s", "slo/attainment", "ttft/p99", "tpot/p99", "throughput/output_tokens_per_s",
    "preemptions/recompute", "requests/finished",
)  # fmt: skip
SCORE = "goodput/requests_per_s"
LEAN = ("record=summary", "wandb.mode=disabled", "progress=false", "plots=false", "resume=true")
NOT_INSTALLED = ("custom",)
"""Options of the policy group that are no policy until more is given."""
NAME = "leaderboard"
CELLS = "leaderboard.yaml"


@dataclass(frozen=True)
class Cell:
    traffic: str
    load: str
    slo: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.traffic}, {self.load}, {self.slo}"


@dataclass(frozen=True)
class Entry:
    """A policy in a cell: figures as means over seeds, or why there are none."""

    policy: str
    cell: Cell
    figures: Mapping[str, float | None]
    error: str | None = None


def cells() -> tuple[list[Cell], list[int]]:
    """The fixed cells, and the seeds of each."""
    from omegaconf import OmegaConf

    told: Any = OmegaConf.to_container(OmegaConf.create((files("schedlab.experiments") / "bench" / CELLS).read_text()))
    found = [
        Cell(traffic, load, slo, (*words, *told["common"], f"slo={slo}"))
        for traffic, loads in told["traffic"].items() for load, words in loads.items() for slo in told["slos"]
    ]  # fmt: skip
    return found, list(told["seeds"])


def installed_policies(loader: Any) -> list[str]:
    """Options of the policy group, those of other distributions in folders of their own too."""
    from hydra.core.object_type import ObjectType

    def below(group: str) -> Iterator[str]:
        for option in loader.get_group_options(group, ObjectType.CONFIG, "config", []):
            yield f"{group}/{option}".removeprefix("policy/")
        for folder in loader.get_group_options(group, ObjectType.GROUP, "config", []):
            if folder != "shared":
                yield from below(f"{group}/{folder}")

    return sorted(set(below("policy")) - {*NOT_INSTALLED})


def measured(config: Any) -> dict[str, Any]:
    """The task of a run: its summary."""
    from schedlab.experiments.run import made
    from schedlab.framework.reader import read_run

    return dict(read_run(made(config)[0]).summary)


def entries(
    policies: Sequence[str], chosen: Sequence[Cell], seeds: Sequence[int], runs: Path, processes: int
) -> list[Entry]:
    """Run all that is not in `runs` yet."""
    import hydra
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from schedlab.experiments.compose import CONFIG_MODULE
    from schedlab.experiments.jobs import Job, SweepTask

    keys = [(policy, cell, seed) for cell in chosen for policy in policies for seed in seeds]
    jobs = [
        Job(number, (f"policy={policy}", *cell.words, f"seed={seed}", *LEAN))
        for number, (policy, cell, seed) in enumerate(keys)
    ]
    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        words = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={runs}"]
        master = loader.load_configuration("config", words, RunMode.MULTIRUN)
    resume.list_owners(runs)
    ends: dict[tuple[str, Cell], list[pool.Outcome]] = {}
    task = SweepTask(loader, Callbacks(), master, str(runs), measured)
    for done, (number, end) in enumerate(pool.run_all(task, jobs, processes), start=1):
        ends.setdefault(keys[number][:2], []).append(end)
        if done % 50 == 0 or done == len(jobs):
            print(f"{done} of {len(jobs)} runs", file=sys.stderr)
    return [entry_of(policy, cell, found) for (policy, cell), found in ends.items()]


def entry_of(policy: str, cell: Cell, ends: Sequence[pool.Outcome]) -> Entry:
    errors = [str(end.error) for end in ends if end.error is not None]
    if errors:
        return Entry(policy, cell, dict.fromkeys(FIGURES), errors[0])
    values = {key: [end.value[key] for end in ends if end.value[key] is not None] for key in FIGURES}
    return Entry(policy, cell, {key: float(np.mean(known)) if known else None for key, known in values.items()})


# ---- the table ----


def scores(found: Sequence[Entry]) -> dict[str, dict[Cell, float]]:
    """Goodput as a share of the cell's best, by policy; without cells in which nobody met the SLO."""
    best: dict[Cell, float] = {}
    for entry in found:
        best[entry.cell] = max(best.get(entry.cell, 0.0), entry.figures[SCORE] or 0.0)
    table: dict[str, dict[Cell, float]] = {}
    for entry in found:
        if best[entry.cell]:
            table.setdefault(entry.policy, {})[entry.cell] = (entry.figures[SCORE] or 0.0) / best[entry.cell]
    return table


def columns(chosen: Sequence[Cell]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.traffic, cell.load) for cell in chosen))


def rows(found: Sequence[Entry]) -> list[list[str]]:
    """Policies from the best mean score down: mean, worst cell, and each traffic and load over its SLOs."""
    table, groups = scores(found), columns([entry.cell for entry in found])
    ordered = sorted(table, key=lambda policy: (-mean(table[policy].values()), policy))
    return [
        [
            policy,
            f"{mean(table[policy].values()):.3f}",
            f"{min(table[policy].values()):.2f}",
            *(score_text(table[policy], *group) for group in groups),
        ]
        for policy in ordered
    ]


def score_text(of_cell: Mapping[Cell, float], traffic: str, load: str) -> str:
    """Mean over the SLOs in which any policy scored."""
    found = [score for cell, score in of_cell.items() if (cell.traffic, cell.load) == (traffic, load)]
    return f"{mean(found):.2f}" if found else "–"


def mean(values: Any) -> float:
    return float(np.mean(list(values)))


def header(found: Sequence[Entry]) -> list[str]:
    return ["policy", "mean", "worst", *(f"{traffic}, {load}" for traffic, load in columns([e.cell for e in found]))]


def markdown(found: Sequence[Entry], seeds: Sequence[int]) -> str:
    head = header(found)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows(found)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    told = {cell.name for by_cell in scores(found).values() for cell in by_cell}
    left_out = sorted({entry.cell.name for entry in found} - told)
    failed: dict[tuple[str, str], list[str]] = {}
    for entry in found:
        if entry.error:
            failed.setdefault((entry.policy, entry.error), []).append(entry.cell.name)
    notes = [
        f"Goodput as a share of the best policy in each cell, over {len({e.cell for e in found})} cells of traffic, "
        f"load and SLO, each with seed {' and '.join(map(str, seeds))}; all policies with their default knobs, on the "
        "virtual clock.",
        *(f"No policy met the SLO: {name}." for name in left_out),
        *(f"{policy} failed in {len(names)} cells: {error}" for (policy, error), names in failed.items()),
    ]
    listed = "".join(f"- {note}\n" for note in notes)
    made = "Regenerated by `schedlab bench --out experiments/bench/results`; a column is the mean over its SLOs."
    return f"# Leaderboard\n\n{made}\n\n{table}\n{listed}"


def show(found: Sequence[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 220)
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(header(found)):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows(found):
        table.add_row(*row)
    console.print(table)


def as_json(found: Sequence[Entry], seeds: Sequence[int]) -> str:
    """Cells, scores and the figures behind them; a line for each policy in each cell."""
    table = scores(found)
    head = {
        "seeds": list(seeds),
        "cells": {cell.name: list(cell.words) for cell in dict.fromkeys(entry.cell for entry in found)},
        "scores": {name: {cell.name: round(score, 6) for cell, score in told.items()} for name, told in table.items()},
    }
    rows = [
        json.dumps({"policy": entry.policy, "cell": entry.cell.name, "error": entry.error, **entry.figures})
        for entry in sorted(found, key=lambda entry: (entry.policy, entry.cell.name))
    ]
    parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    return "{\n" + ",\n".join([*parts, '"figures": [\n' + ",\n".join(rows) + "\n]"]) + "\n}\n"


def bench(policies: Sequence[str] | None, traffic: Sequence[str] | None, out: Path, runs: Path, processes: int) -> None:
    """The command: run what is missing, print the table, write leaderboard.md and leaderboard.json into `out`."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from schedlab.experiments.compose import CONFIG_MODULE

    with hydra.initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        there = installed_policies(GlobalHydra.instance().config_loader())
    every, seeds = cells()
    chosen = [cell for cell in every if not traffic or cell.traffic in traffic]
    for name, known, asked in (
        ("--policy", there, policies or []), ("--traffic", {cell.traffic for cell in every}, traffic or []),
    ):  # fmt: skip
        if unknown := [word for word in asked if word not in known]:
            raise ConfigError(f"bench: {name} {unknown[0]}: there are {', '.join(sorted(known))}")
    found = entries(list(policies or there), chosen, seeds, runs, processes)
    show(found)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{NAME}.md", markdown(found, seeds))
    write_whole(out / f"{NAME}.json", as_json(found, seeds))
    print(f"in {out / NAME}.md and .json")
