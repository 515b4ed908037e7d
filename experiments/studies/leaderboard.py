"""`schedlab bench`: every installed policy on the same fixed cells of traffic, load and SLO; one normalised table.

A policy's score in a cell, at a seed, is its goodput as a share of the best policy's on the same requests, so that 1.00
means that nobody served more of them within the SLO. Each run is exact, for time is virtual; what another draw of the
traffic would change, the interval over the seeds tells. How a run is made is run/job.py's.
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

from schedlab.experiments.analysis.statistics import Interval, holm_intervals, interval
from schedlab.experiments.sweep import pool, resume
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.writer import write_whole

FIGURES = (
    "goodput/requests_per_s", "slo/attainment", "ttft/p99", "tpot/p99", "throughput/output_tokens_per_s",
    "preemptions/recompute", "requests/finished",
)  # fmt: skip
SCORE = "goodput/requests_per_s"
LEAN = ("record=summary", "wandb.mode=disabled", "progress=false", "plots=false", "resume=true")
NOT_INSTALLED = ("custom", "vllm")
"""Options of the policy group that are no policy: until more is given, or but for one engine."""
NAME = "leaderboard"
CELLS = "leaderboard.yaml"


@dataclass(frozen=True)
class BoardCell:
    traffic: str
    load: str
    slo: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.traffic}, {self.load}, {self.slo}"


@dataclass(frozen=True)
class Entry:
    """A policy in a cell: figures as means over seeds, or why there are none; goodput at each seed, 0 if it failed."""

    policy: str
    cell: BoardCell
    figures: Mapping[str, float | None]
    goodputs: tuple[float, ...]
    error: str | None = None


@dataclass(frozen=True)
class Standing:
    """A policy in the table. `score_CS` [cells, seeds], NaN where no policy met the SLO; `place` may be shared."""

    policy: str
    score_CS: np.ndarray
    place: int
    bounds: Interval

    @property
    def mean(self) -> float:
        return float(over_cells(self.score_CS).mean())


def cells() -> tuple[list[BoardCell], list[int]]:
    """The fixed cells, and the seeds of each."""
    from omegaconf import OmegaConf

    told: Any = OmegaConf.to_container(
        OmegaConf.create((files("schedlab.experiments.studies") / CELLS).read_text(encoding="utf-8"))
    )
    found = [
        BoardCell(traffic, load, slo, (*words, *told["common"], f"slo={slo}"))
        for traffic, loads in told["traffic"].items() for load, words in loads.items() for slo in told["slos"]
    ]  # fmt: skip
    assert len(told["seeds"]) > 1, "one draw of the traffic has no interval"
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
    from schedlab.experiments.run.job import made

    return dict(made(config)[1].summary)


def entries(
    policies: Sequence[str], chosen: Sequence[BoardCell], seeds: Sequence[int], runs: Path, processes: int
) -> list[Entry]:
    """Run all that is not in `runs` yet."""
    import hydra
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    from schedlab.experiments.run.compose import CONFIG_MODULE
    from schedlab.experiments.sweep.jobs import Job, SweepTask

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
    ends: dict[tuple[str, BoardCell], dict[int, pool.Outcome]] = {}
    task = SweepTask(loader, Callbacks(), master, str(runs), measured)
    for done, (number, end) in enumerate(pool.run_all(task, jobs, processes), start=1):
        policy, cell, seed = keys[number]
        ends.setdefault((policy, cell), {})[seed] = end
        if done % 50 == 0 or done == len(jobs):
            print(f"{done} of {len(jobs)} runs", file=sys.stderr)
    return [entry_of(*key, [ends[key][seed] for seed in seeds]) for key in dict.fromkeys(key[:2] for key in keys)]


def entry_of(policy: str, cell: BoardCell, ends: Sequence[pool.Outcome]) -> Entry:
    errors = [str(end.error) for end in ends if end.error is not None]
    if errors:
        return Entry(policy, cell, dict.fromkeys(FIGURES), (0.0,) * len(ends), errors[0])
    values = {key: [end.value[key] for end in ends if end.value[key] is not None] for key in FIGURES}
    means = {key: float(np.mean(known)) if known else None for key, known in values.items()}
    return Entry(policy, cell, means, tuple(end.value[SCORE] or 0.0 for end in ends))


# ---- the table ----


def standings(found: Sequence[Entry]) -> list[Standing]:
    """Policies by their place, those of one place by their mean score."""
    cells = cells_of(found)
    goodput_CS = {policy: np.zeros((len(cells), len(found[0].goodputs))) for policy in policies_of(found)}
    for entry in found:
        goodput_CS[entry.policy][cells.index(entry.cell)] = entry.goodputs
    best_CS = np.max(list(goodput_CS.values()), axis=0)
    scores = {policy: goodput / np.where(best_CS > 0, best_CS, np.nan) for policy, goodput in goodput_CS.items()}
    by_seed = {policy: over_cells(score_CS) for policy, score_CS in scores.items()}
    placed = places(by_seed)
    told = [Standing(policy, scores[policy], placed[policy], interval(by_seed[policy])) for policy in scores]
    return sorted(told, key=lambda standing: (standing.place, -standing.mean, standing.policy))


def places(by_seed: Mapping[str, np.ndarray]) -> dict[str, int]:
    """One more than the number of policies that are better, by the interval of the paired differences over the seeds.

    The intervals of one policy against all others are Holm's, as `schedlab compare` has them. A place says who is
    shown to be better; two of one place are not shown to be equal.
    """
    placed = {}
    for policy, own in by_seed.items():
        against = [other - own for name, other in by_seed.items() if name != policy]
        placed[policy] = 1 + sum(bounds.low > 0 for bounds, _ in holm_intervals(against))
    return placed


def over_cells(score_CS: np.ndarray) -> np.ndarray:
    """Mean over the cells in which any policy met the SLO, at each seed."""
    told: np.ndarray = np.nanmean(score_CS[~np.isnan(score_CS).all(1)], axis=0)
    return told


def over_seeds(score_CS: np.ndarray) -> np.ndarray:
    """Mean over the seeds, in each cell; NaN where no policy ever met the SLO."""
    return np.array([np.nanmean(row) if not np.isnan(row).all() else np.nan for row in score_CS])


def policies_of(found: Sequence[Entry]) -> list[str]:
    return list(dict.fromkeys(entry.policy for entry in found))


def cells_of(found: Sequence[Entry]) -> list[BoardCell]:
    return list(dict.fromkeys(entry.cell for entry in found))


def columns(found: Sequence[Entry]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((cell.traffic, cell.load) for cell in cells_of(found)))


def rows(found: Sequence[Entry]) -> list[list[str]]:
    """Place, policy, mean score and its interval, worst cell, and each traffic and load over its SLOs."""
    cells, groups = cells_of(found), columns(found)
    told = []
    for standing in standings(found):
        in_cell = over_seeds(standing.score_CS)
        by_group = [[i for i, cell in enumerate(cells) if (cell.traffic, cell.load) == group] for group in groups]
        told.append(
            [
                str(standing.place),
                standing.policy,
                f"{standing.mean:.3f}",
                f"{standing.bounds.low:.3f} to {standing.bounds.high:.3f}",
                f"{np.nanmin(in_cell):.2f}",
                *(score_text(in_cell[own]) for own in by_group),
            ]
        )
    return told


def score_text(scores: np.ndarray) -> str:
    """Mean over the SLOs in which any policy scored."""
    known = scores[~np.isnan(scores)]
    return f"{known.mean():.2f}" if len(known) else "–"


def header(found: Sequence[Entry]) -> list[str]:
    named = [f"{traffic}, {load}" for traffic, load in columns(found)]
    return ["place", "policy", "mean", "95% interval", "worst", *named]


def markdown(found: Sequence[Entry], seeds: Sequence[int]) -> str:
    head = header(found)
    lines = [head, ["---:", "---", *["---:"] * (len(head) - 2)], *rows(found)]
    table = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    made = "Regenerated by `schedlab bench --out experiments/bench/results`; a column is the mean over its SLOs."
    return f"# Leaderboard\n\n{made}\n\n{table}\n" + "".join(f"- {note}\n" for note in notes(found, seeds))


def notes(found: Sequence[Entry], seeds: Sequence[int]) -> list[str]:
    scored = ~np.isnan(standings(found)[0].score_CS).all(1)
    left_out = [cell.name for cell, known in zip(cells_of(found), scored, strict=True) if not known]
    failed: dict[tuple[str, str], list[str]] = {}
    for entry in found:
        if entry.error:
            failed.setdefault((entry.policy, entry.error), []).append(entry.cell.name)
    return [
        f"Goodput as a share of the best policy's on the same requests, over {len(scored)} cells of traffic, load and "
        f"SLO, each with seeds {', '.join(map(str, seeds))}; all policies with default knobs, on the virtual clock.",
        *settings(cells_of(found)),
        "The interval is Student's over the seeds. A place is one more than the number of policies that are better: "
        "whose paired differences over the seeds have an interval above 0, as in `schedlab compare`, with Holm's "
        "correction over the comparisons of a policy. A shared place does not say that two are equal.",
        *(f"{' and '.join(names)} scored the same at every seed of every cell." for names in equals(found)),
        *(f"No policy met the SLO: {name}." for name in sorted(left_out)),
        *(f"{policy} failed in {len(names)} cells: {error}" for (policy, error), names in failed.items()),
    ]


def settings(cells: Sequence[BoardCell]) -> list[str]:
    """The predictors and SLO classes of the cells: no score is to be read without them."""
    from schedlab.experiments.analysis.table import predictor_line, slo_line
    from schedlab.experiments.run.compose import preset

    def chosen(group: str) -> list[str]:
        words = (word for cell in cells for word in cell.words if word.startswith(f"{group}="))
        return list(dict.fromkeys(word.partition("=")[2] for word in words))

    predictors = [
        predictor_line({"labels": {"predictor": name}, "config": {"predictor": preset("predictor", name)}})
        for name in chosen("predictor") if name != "none"
    ]  # fmt: skip
    told = f"Policies that ask how long an output will be are told by predictor {' or '.join(predictors)}."
    slos = [slo_line(preset("slo", name)) for name in chosen("slo")]
    return [*([told] if predictors else []), *([f"SLO {'; '.join(slos)}."] if slos else [])]


def equals(found: Sequence[Entry]) -> list[list[str]]:
    """Policies between which nothing here tells a difference, together."""
    alike: dict[tuple[tuple[float, ...], ...], list[str]] = {}
    for policy in policies_of(found):
        alike.setdefault(tuple(entry.goodputs for entry in found if entry.policy == policy), []).append(policy)
    return [sorted(names) for names in alike.values() if len(names) > 1]


def show(found: Sequence[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 220)
    table = Table(box=None, pad_edge=False)
    for heading in header(found):
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap="," not in heading)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)


def as_json(found: Sequence[Entry], seeds: Sequence[int]) -> str:
    """Cells, places, and the figures behind them; a line for each policy in each cell."""
    head = {
        "seeds": list(seeds),
        "cells": {cell.name: list(cell.words) for cell in cells_of(found)},
        "places": {
            told.policy: [told.place, *(round(value, 6) for value in (told.mean, told.bounds.low, told.bounds.high))]
            for told in standings(found)
        },
    }
    rows = [
        json.dumps(
            {
                "policy": entry.policy,
                "cell": entry.cell.name,
                "error": entry.error,
                **entry.figures,
                "goodput_by_seed": list(entry.goodputs),
            }
        )
        for entry in sorted(found, key=lambda entry: (entry.policy, entry.cell.name))
    ]
    parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    return "{\n" + ",\n".join([*parts, '"figures": [\n' + ",\n".join(rows) + "\n]"]) + "\n}\n"


def as_csv(found: Sequence[Entry], seeds: Sequence[int]) -> str:
    """A row for each policy in each cell: its figures, and its goodput at each seed."""
    from schedlab.experiments.analysis.table import csv_of

    return csv_of([
        {
            "policy": entry.policy, "cell": entry.cell.name, "error": entry.error, **entry.figures,
            **{f"goodput_{seed}": goodput for seed, goodput in zip(seeds, entry.goodputs, strict=True)},
        }
        for entry in sorted(found, key=lambda entry: (entry.policy, entry.cell.name))
    ])  # fmt: skip


def bench(
    policies: Sequence[str] | None,
    traffic: Sequence[str] | None,
    out: Path,
    runs: Path,
    processes: int,
    form: str = "terminal",
) -> None:
    """The command: run what is missing, print the table, write leaderboard.md, .json and .csv into `out`."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from schedlab.experiments.run.compose import CONFIG_MODULE

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
    texts = {"markdown": markdown(found, seeds), "json": as_json(found, seeds), "csv": as_csv(found, seeds)}
    out.mkdir(parents=True, exist_ok=True)
    for kind, ending in {"markdown": "md", "json": "json", "csv": "csv"}.items():
        write_whole(out / f"{NAME}.{ending}", texts[kind])
    if form != "terminal":
        print(texts[form], end="")
        return
    show(found)
    print(f"in {out / NAME}.md, .json and .csv")
