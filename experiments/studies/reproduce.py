"""`schedlab reproduce`: results that the literature knows, run again on the virtual clock.

Each is an overlay `conf/experiment/NAME.yaml`, whose `reproduction` says where the result was published and which runs
show it: `variants` by label, each under every value of `sweep`. What they say is reproduce_result.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from schedlab.experiments.studies.reproduce_result import Reproduction

NAMES = (
    "sarathi_capacity", "chunk_size", "prefix_order", "sjf_queueing", "recompute_swap", "victim_choice", "max_num_seqs",
    "disaggregation",
)  # fmt: skip
OUT = Path("reproductions")


def reproduce_one(name: str) -> Reproduction:
    """Run everything that the overlay `name` lists."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.studies.reproduce_result import ReproducedRun, Reproduction

    facts = compose.resolve(compose.compose([f"experiment={name}"]))["reproduction"]
    runs = (ReproducedRun(label, point, words, run_words(name, words)) for label, point, words in planned(facts))
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
    from schedlab.experiments.studies.reproduce_result import finding, write
    from schedlab.framework.errors import ConfigError

    if unknown := [name for name in names or [] if name not in NAMES]:
        raise ConfigError(f"{unknown[0]}: no such reproduction; there are {', '.join(NAMES)}")
    done = []
    for name in names or NAMES:
        done.append(reproduce_one(name))
        print(f"{name}: published: {done[-1].facts['published']}\n{' ' * len(name)}  ours: {finding(done[-1])}")
    for path in write(done, out):
        print(path)
