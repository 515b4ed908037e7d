"""`schedlab capacity cluster=replicas`: the fewest replicas with which a workload meets its SLO, and what they cost.

The workload keeps its own rate. For each policy and replicate the number of alike replicas is doubled until attainment
is as high as asked, and the step halved between. That supposes attainment rises with replicas; where it does not, one
of the crossings is found. The cost is replica-seconds: replicas times the time from the first arrival to the last end.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlab.experiments.run.api import Experiment
from schedlab.experiments.run.fleet import FleetPlan, Member
from schedlab.experiments.studies.capacity_result import UNKNOWN, WIDTH, CapacityOptions
from schedlab.experiments.studies.pool_size import most
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy

if TYPE_CHECKING:
    from omegaconf import DictConfig

MOST = 64
"""Replicas that are tried."""
HEADINGS = ("policy", "replicate", "replicas", "attainment", "with one fewer", "replica-seconds", "hit rate")


@dataclass(frozen=True)
class Size:
    """Of one policy on one replicate; None where `MOST` replicas do not meet the SLO. `fewer`: attainment with one
    replica fewer, None for a single one."""

    policy: str
    seed: int
    replicas: int | None
    attainment: float | None
    fewer: float | None
    replica_seconds: float | None
    hit_rate: float | None


@dataclass
class FleetBench:
    """Runs fleets of alike replicas, each combination once. `plan` has the first of them, and `run` all else."""

    policies: Mapping[str, Callable[[], Policy]]
    plan: FleetPlan
    run: Callable[[FleetPlan, int], Experiment]

    def __post_init__(self) -> None:
        self.known: dict[tuple[str, int, int], Mapping[str, Any]] = {}

    def summary(self, policy: str, seed: int, replicas: int) -> Mapping[str, Any]:
        key = policy, seed, replicas
        if key not in self.known:
            self.known[key] = self.run(self._fleet(policy, replicas), seed).run().summary
        return self.known[key]

    def _fleet(self, policy: str, replicas: int) -> FleetPlan:
        member = replace(self.plan.members[0], name="r", policy=self.policies[policy]())
        members = list(member.times(replicas, lambda: copy.deepcopy(member.engine)))
        return replace(self.plan, router=copy.deepcopy(self.plan.router), members=members)

    def size(self, policy: str, seed: int, attainment: float) -> Size:
        def share(replicas: int) -> float:
            return float(self.summary(policy, seed, replicas)["slo/attainment"] or 0.0)

        too_few = most(lambda replicas: share(replicas) < attainment, MOST)
        if too_few == MOST:
            return Size(policy, seed, None, share(MOST), None, None, None)
        found = too_few + 1
        summary = self.summary(policy, seed, found)
        fewer = share(found - 1) if found > 1 else None
        return Size(policy, seed, found, share(found), fewer, summary["replica_seconds"], summary["prefix/hit_rate"])


def sizes(bench: FleetBench, options: CapacityOptions, seeds: Iterable[int]) -> list[Size]:
    return [bench.size(policy, seed, options.attainment) for policy in bench.policies for seed in seeds]


# ---- shown ----


def row(size: Size) -> list[str]:
    def told(value: float | None, spelled: str) -> str:
        return UNKNOWN if value is None else format(value, spelled)

    return [
        size.policy, str(size.seed), f"> {MOST}" if size.replicas is None else str(size.replicas),
        told(size.attainment, ".1%"), told(size.fewer, ".1%"), told(size.replica_seconds, ",.4g"),
        told(size.hit_rate, ".1%"),
    ]  # fmt: skip


def show(found: list[Size]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for size in found:
        table.add_row(*row(size))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table)


def markdown(found: list[Size]) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *map(row, found)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# ---- the command ----


def fleet_size_job(config: DictConfig, options: CapacityOptions) -> None:
    """Find the sizes that `config` asks for, show them, and write capacity.json and .md into Hydra's directory."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.messages import short

    found = sizes(bench_of(config, options), options, seeds_of(config.seed, options.replicates))
    directory = compose.output_directory()
    show(found)
    told = {"attainment": options.attainment, "most": MOST, "sizes": [asdict(size) for size in found]}
    (directory / "capacity.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (directory / "capacity.md").write_text(markdown(found), encoding="utf-8")
    print(f"in {short(directory)}")


def seeds_of(seed: int, replicates: int) -> range:
    """Those of a capacity study."""
    return range(seed * replicates + 1, (seed + 1) * replicates + 1)


def bench_of(config: DictConfig, options: CapacityOptions) -> FleetBench:
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_whole
    from schedlab.experiments.run.fleet_config import fleet_of
    from schedlab.experiments.studies.fidelity import policies_of

    check_whole(config.measure, "capacity")
    resolved = compose.resolve(config)
    slo = compose.build_optional(config.slo, "slo")
    if slo is None or not slo.limited:
        raise ConfigError("capacity: expected an SLO class with a limit, found slo=none; choose one of conf/slo")
    plan = fleet_of(resolved)
    if plan is None or not isinstance(resolved["cluster"].get("replicas"), int):
        raise ConfigError("capacity: expected cluster=replicas with a number of alike replicas, all of which are tried")
    first: Member = plan.members[0]
    observed_at = compose.build_optional(config.observed_at, "observed_at")

    def run(fleet: FleetPlan, seed: int) -> Experiment:
        return Experiment(
            policy=fleet.members[0].policy, workload=compose.build(config.workload, "workload"), engine=first.engine,
            seed=seed, slo=slo, fleet=fleet, clock=config.clock, observed_at=observed_at,
        )  # fmt: skip

    return FleetBench(policies_of(config, options.policies, "capacity.policies"), plan, run)
