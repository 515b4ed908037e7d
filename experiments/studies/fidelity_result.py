"""What a fidelity study finds, and how that is shown: a table for each load, fidelity.json and .md, and a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.decisions import DecidedAgain
from schedlab.experiments.studies.calibrate import MOST_DISTURBED, num_disturbed, tolerated
from schedlab.framework.cost.fit import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

UNKNOWN = "–"
WIDTH = 140
"""Characters of a line where no terminal says how many it has."""

STATISTICS = {"mean": 0.05, "p50": 0.05, "p90": 0.10, "p99": 0.10}
"""What is compared of each latency, and the relative error that is tolerated where repeats differ by less."""
METRICS = {
    **{f"{name}/{statistic}": limit for name in ("ttft", "tpot", "e2e") for statistic, limit in STATISTICS.items()},
    "throughput/output_tokens_per_s": 0.05,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one policy at one load, of the real runs and on the virtual clock."""

    real: tuple[float, ...]
    virtual: float
    limit: float

    @property
    def error(self) -> float:
        """Relative to the mean of the real runs."""
        return self.virtual / float(np.mean(self.real)) - 1

    @property
    def repeat_difference(self) -> float:
        """How much the real runs differ at most, relative to their mean."""
        return (max(self.real) - min(self.real)) / float(np.mean(self.real))

    @property
    def within(self) -> bool:
        return abs(self.error) <= max(self.limit, self.repeat_difference)


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """One policy at one load: summaries of the real runs and of the virtual one, and whether decisions agree.

    `level`: how long a step of the grid took during the real runs, of what it took over the whole study.
    """

    policy: str
    load: float
    time_scale: float
    level: float
    real: tuple[dict[str, Any], ...]
    virtual: dict[str, Any]
    agreements: tuple[DecidedAgain, ...]

    @property
    def compared(self) -> dict[str, Compared]:
        """By metric; without those that some run does not know."""
        return {
            key: Compared(tuple(summary[key] for summary in self.real), self.virtual[key], limit)
            for key, limit in METRICS.items()
            if self.virtual[key] is not None and all(summary[key] for summary in self.real)
        }


@dataclass(frozen=True)
class FidelityStudy:
    """All that one command found out. `capacity_s`: the time that each policy needs for the trace if nothing waits."""

    profile: Profile
    capacity_s: Mapping[str, float]
    span_s: float
    outcomes: tuple[PolicyOutcome, ...]


def by_load(study: FidelityStudy) -> dict[float, list[PolicyOutcome]]:
    loads: dict[float, list[PolicyOutcome]] = {}
    for outcome in study.outcomes:
        loads.setdefault(outcome.load, []).append(outcome)
    return loads


def show(study: FidelityStudy, console: Console | None = None) -> None:
    """Print a table for each load, and what holds of all of them."""
    from rich.console import Console

    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for outcomes in by_load(study).values():
        console.print(load_table(study, outcomes))
    for line in verdicts(study):
        console.print(line, soft_wrap=True)


def load_table(study: FidelityStudy, outcomes: Sequence[PolicyOutcome]) -> Table:
    from rich.table import Table

    load, scale = outcomes[0].load, outcomes[0].time_scale
    table = Table("error (A/A)", title=f"load {load:g}, time_scale {scale:.4g}", title_justify="left", box=None)
    for outcome in outcomes:
        table.add_column(heading(study, outcome), justify="right")
    for key in METRICS:
        table.add_row(key, *(cell(outcome.compared.get(key)) for outcome in outcomes))
    return table


def heading(study: FidelityStudy, outcome: PolicyOutcome) -> str:
    """A policy, its own load, and how long the same steps took during its runs."""
    own = study.capacity_s[outcome.policy] / (outcome.time_scale * study.span_s)
    return f"{outcome.policy} ({own:.2f}, {outcome.level:.2f})"


def cell(compared: Compared | None) -> str:
    """The virtual clock's error, how much the real runs differ, and a mark where it is beyond what is tolerated."""
    if compared is None:
        return UNKNOWN
    return f"{compared.error:+.1%} ({compared.repeat_difference:.1%}){' ' if compared.within else '!'}"


def verdicts(study: FidelityStudy) -> list[str]:
    """What the tables amount to, in lines."""
    every = [compared for outcome in study.outcomes for compared in outcome.compared.values()]
    agreements = [agreement for outcome in study.outcomes for agreement in outcome.agreements]
    equal = sum(agreement.equal for agreement in agreements)
    beyond, profile = sum(not compared.within for compared in every), study.profile
    error = profile.error
    lines = [
        "error of the virtual clock against the mean of the real runs; A/A: how much the real runs differ; behind a "
        "policy's name its own load, and how long the same steps took during its runs, of the whole study's average, "
        "by which its virtual run is made; !: beyond max(5 %, A/A) for means, medians and throughput, max(10 %, A/A) "
        "for p90 and p99",
        f"{len(every) - beyond} of {len(every)} figures within",
        f"profile: held-out steps {error.held_out_mean:.1%} on average, at most {tolerated(error):.1%} expected; "
        f"{num_disturbed(profile.coefficients, profile.points)} of {len(profile.points)} took more than "
        f"{MOST_DISTURBED:g} times as long as modelled and count as that",
        f"decisions taken again at the logged times: equal digests in {equal} of {len(agreements)} real runs",
    ]
    for outcome in study.outcomes:
        lines += [
            f"{outcome.policy} at load {outcome.load:g}: decisions part at step {agreement.first}"
            for agreement in outcome.agreements
            if not agreement.equal
        ]
    return lines


def as_json(study: FidelityStudy) -> dict[str, Any]:
    return {
        "profile": {"identity": study.profile.identity, "error": asdict(study.profile.error)},
        "capacity_s": dict(study.capacity_s),
        "span_s": study.span_s,
        "outcomes": [outcome_json(outcome) for outcome in study.outcomes],
        "notes": verdicts(study),
    }


def outcome_json(outcome: PolicyOutcome) -> dict[str, Any]:
    compared = {
        key: {"error": c.error, "repeat_difference": c.repeat_difference, "limit": c.limit, "within": c.within}
        for key, c in outcome.compared.items()
    }
    return {**asdict(outcome), "compared": compared}


def as_markdown(study: FidelityStudy) -> str:
    """The tables and what they amount to."""
    parts = ["# The virtual clock against the real engine"]
    for load, outcomes in by_load(study).items():
        head = ["error (A/A)", *(heading(study, outcome) for outcome in outcomes)]
        rows = [[key, *(cell(outcome.compared.get(key)) for outcome in outcomes)] for key in METRICS]
        lines = [head, ["---"] + ["---:"] * len(outcomes), *rows]
        parts.append(f"## Load {load:g}, time_scale {outcomes[0].time_scale:.4g}")
        parts.append("\n".join(f"| {' | '.join(words)} |" for words in lines))
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in verdicts(study))]) + "\n"


def write(study: FidelityStudy, directory: Path, *, plots: bool) -> None:
    """fidelity.json, fidelity.md, the profile, and plots/fidelity.png."""
    (directory / "fidelity.json").write_text(json.dumps(as_json(study), indent=1) + "\n", encoding="utf-8")
    (directory / "fidelity.md").write_text(as_markdown(study), encoding="utf-8")
    study.profile.save(directory / "profile.json")
    if plots:
        from schedlab.experiments.analysis.plots import save

        save({"fidelity": picture(study)}, directory / "plots")


def picture(study: FidelityStudy) -> Figure:
    """A bar for each figure's error, with the difference of the real runs as a line around 0."""
    from schedlab.experiments.analysis.plots import COLOURS, panels

    loads = by_load(study)
    figure, axes = panels(len(loads), 1, (12, 1 + 3.5 * len(loads)), shared=True)
    for axis, (load, outcomes) in zip(axes, loads.items(), strict=True):
        width = 0.8 / len(outcomes)
        for i, (outcome, colour) in enumerate(zip(outcomes, COLOURS, strict=False)):
            places = [k + (i - (len(outcomes) - 1) / 2) * width for k, key in enumerate(METRICS)]
            figures = [outcome.compared.get(key) for key in METRICS]
            errors = [100 * c.error if c else 0.0 for c in figures]
            spread = [100 * c.repeat_difference if c else 0.0 for c in figures]
            axis.bar(places, errors, width, color=colour, label=outcome.policy)
            axis.errorbar(places, [0.0] * len(places), yerr=spread, fmt="none", ecolor="#555555", capsize=2, lw=1)
        axis.set(title=f"load {load:g}", ylabel="error (%), lines: A/A")
    axes[0].legend(frameon=False, ncols=len(COLOURS))
    axes[-1].set_xticks(
        range(len(METRICS)), [key.replace("/", "\n").replace("_per_s", "/s") for key in METRICS], fontsize=7
    )
    return figure
