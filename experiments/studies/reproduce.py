"""`schedlab reproduce`: results that the literature knows, run again on the virtual clock.

Each is an overlay `conf/experiment/NAME.yaml`, whose `reproduction` says where the result was published and which runs
show it: `variants` by label, each under every value of `sweep`. Knows how to run them; what they say is
reproduce_report.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

NAMES = (
    "sarathi_capacity", "chunk_size", "prefix_order", "sjf_queueing", "recompute_swap", "victim_choice", "max_num_seqs",
)  # fmt: skip
OUT = Path("reproductions")


@dataclass(frozen=True)
class Run:
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
    runs: tuple[Run, ...]

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


def reproduce_one(name: str) -> Reproduction:
    """Run everything that the overlay `name` lists."""
    from schedlab.experiments.run import compose

    facts = compose.resolve(compose.compose([f"experiment={name}"]))["reproduction"]
    runs = (Run(label, point, words, run_words(name, words)) for label, point, words in planned(facts))
    return Reproduction(name, facts, tuple(runs))


def planned(facts: Mapping[str, Any]) -> Iterator[tuple[str, float | None, tuple[str, ...]]]:
    """Label, point and words of each run."""
    for label, words in facts["variants"].items():
        swept = [(key, value) for key, values in facts.get("sweep", {}).items() for value in values]
        if not swept:
            yield label, None, tuple(words)
        for key, value in swept:
            yield label, value, (*words, f"{key}={value}")


def run_words(name: str, words: Sequence[str]) -> Mapping[str, Any]:
    """The summary of one run, without files."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.job import experiment_of, settings_of

    resolved = compose.resolve(compose.compose([f"experiment={name}", *words]))
    summary: Mapping[str, Any] = experiment_of(resolved, settings_of(resolved)).run().summary
    return summary


def add_to(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(NAMES)}; all of them if none")] = None,
    out: Annotated[Path, typer.Option(help="folder for reproductions.md and .png")] = OUT,
) -> None:
    """Run results of the literature again and set them beside what was published."""
    from schedlab.experiments.studies.reproduce_report import finding, write
    from schedlab.framework.errors import ConfigError

    if unknown := [name for name in names or [] if name not in NAMES]:
        raise ConfigError(f"{unknown[0]}: no such reproduction; there are {', '.join(NAMES)}")
    done = []
    for name in names or NAMES:
        done.append(reproduce_one(name))
        print(f"{name}: published: {done[-1].facts['published']}\n{' ' * len(name)}  ours: {finding(done[-1])}")
    for path in write(done, out):
        print(path)
