"""`schedlab capacity workload=online_offline`: the most batch work that a policy takes beside people who wait.

The online requests keep their rate. For each policy and replicate the pool is doubled until fewer online requests than
asked meet their limits, and the step halved between. That supposes attainment falls with the pool; where it does not,
one of the crossings is found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from schedlab.experiments.run.api import Experiment
from schedlab.experiments.studies.capacity_result import UNKNOWN, WIDTH, CapacityOptions
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.workloads.colocation import OFFLINE, ONLINE, OnlineOffline

if TYPE_CHECKING:
    from omegaconf import DictConfig

MOST = 4096
"""Batch requests at a time that are tried; no more than half of those that the workload has, so that each is followed
by another."""
HEADINGS = ("policy", "replicate", "pool", "online: SLO met", "with one more", "offline tok/s", "online TTFT p99 ms")


@dataclass(frozen=True)
class Pool:
    """Of one policy on one replicate. `size` 0: not even one batch request at a time is borne; `more`: the online
    attainment with one more, None where no more were tried."""

    policy: str
    seed: int
    size: int
    attainment: float | None
    more: float | None
    offline_tokens_per_s: float | None
    online_ttft_p99_s: float | None


def most(bears: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that is borne, if all below one that is are too; 0 if 1 is not."""
    low, high = 0, 1
    while bears(high):
        if high == limit:
            return limit
        low, high = high, min(2 * high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bears(middle) else (low, middle)
    return low


@dataclass
class PoolBench:
    """Runs a policy on a replicate beside a pool, each combination once. `run` makes the run of a workload."""

    policies: Mapping[str, Callable[[], Policy]]
    workload: OnlineOffline
    run: Callable[[Policy, OnlineOffline, int], Experiment]
    known: dict[tuple[str, int, int], Mapping[str, Any]] = field(default_factory=dict)

    def summary(self, policy: str, seed: int, size: int) -> Mapping[str, Any]:
        key = policy, seed, size
        if key not in self.known:
            workload = replace(self.workload, pool=size)
            summary = self.run(self.policies[policy](), workload, seed).run().summary
            if summary[f"class/{OFFLINE}/offered"] == workload.pool_requests:
                raise ConfigError(
                    f"workload.pool_requests: expected more than are served in {workload.duration_s:g} s, "
                    f"found {workload.pool_requests:,}, and {policy} was sent all of them"
                )
            self.known[key] = summary
        return self.known[key]

    def pool(self, policy: str, seed: int, attainment: float) -> Pool:
        def share(size: int) -> float:
            return float(self.summary(policy, seed, size)[f"class/{ONLINE}/slo_attainment"] or 0.0)

        limit = min(MOST, max(self.workload.pool_requests // 2, 1))
        size = most(lambda tried: share(tried) >= attainment, limit)
        more = share(size + 1) if size < limit else None
        if not size:
            return Pool(policy, seed, 0, None, more, None, None)
        summary = self.summary(policy, seed, size)
        tokens, ttft = summary[f"class/{OFFLINE}/output_tokens_per_s"], summary[f"class/{ONLINE}/ttft_p99"]
        return Pool(policy, seed, size, share(size), more, tokens, ttft)


def pools(bench: PoolBench, attainment: float, seeds: Iterable[int]) -> list[Pool]:
    return [bench.pool(policy, seed, attainment) for policy in bench.policies for seed in seeds]


# ---- shown ----


def row(found: Pool) -> list[str]:
    def told(value: float | None, spelled: str, scale: float = 1) -> str:
        return UNKNOWN if value is None else format(value * scale, spelled)

    size = f"{found.size:,}" if found.more is not None else f"≥ {found.size:,}"
    return [
        found.policy, str(found.seed), size, told(found.attainment, ".1%"), told(found.more, ".1%"),
        told(found.offline_tokens_per_s, ",.1f"), told(found.online_ttft_p99_s, ",.1f", 1e3),
    ]  # fmt: skip


def show(found: list[Pool]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in found:
        table.add_row(*row(one))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table)


def markdown(found: list[Pool]) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *map(row, found)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# ---- the command ----


def pool_size_job(config: DictConfig, workload: OnlineOffline, options: CapacityOptions) -> None:
    """Find the pools that `config` asks for, show them, and write capacity.json and .md into Hydra's directory."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.messages import short

    seeds = range(config.seed * options.replicates + 1, (config.seed + 1) * options.replicates + 1)
    found = pools(bench_of(config, workload, options), options.attainment, seeds)
    directory = compose.output_directory()
    show(found)
    told = {"attainment": options.attainment, "pools": [asdict(one) for one in found]}
    (directory / "capacity.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (directory / "capacity.md").write_text(markdown(found), encoding="utf-8")
    print(f"in {short(directory)}")


def bench_of(config: DictConfig, workload: OnlineOffline, options: CapacityOptions) -> PoolBench:
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_single, check_whole
    from schedlab.experiments.studies.fidelity import policies_of

    check_single(config, "capacity workload=online_offline")
    check_whole(config.measure, "capacity")
    if not workload.slo_classes[ONLINE].limited:
        raise ConfigError(f"workload.slo_classes.{ONLINE}: expected a limit that capacity can ask for, found none")

    def run(policy: Policy, beside: OnlineOffline, seed: int) -> Experiment:
        return Experiment(
            policy=policy, workload=beside, engine=compose.build(config.engine, "engine"), seed=seed,
            predictor=compose.build_optional(config.predictor, "predictor"),
            admission=compose.build_optional(config.admission, "admission"), clock=config.clock,
            observed_at=compose.build_optional(config.observed_at, "observed_at"),
        )  # fmt: skip

    return PoolBench(policies_of(config, options.policies, "capacity.policies"), workload, run)
