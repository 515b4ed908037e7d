"""A fleet's replicas: what they are made of, and how they are run and written. Imports no Hydra.

A replica's folder, `replicas/NAME` of the run's, is an ordinary run directory: what was routed there is its workload.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.manifest import config_hash, source_of, write_manifest
from schedlab.experiments.run.offered import Counted, Logged
from schedlab.framework.admission import Admission
from schedlab.framework.cluster.disaggregated import Disaggregated, FirstToken
from schedlab.framework.cluster.fleet import AT_ONCE, Timing
from schedlab.framework.cluster.loop import Cluster, PoolSetup
from schedlab.framework.cluster.replica import ReplicaRecorder, ReplicaSetup, ReplicaWriter
from schedlab.framework.cluster.results import FleetNotes
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.transfer import Link
from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.cost.expand import rates_of
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import folder_within
from schedlab.framework.source import Source

REPLICAS = "replicas"


@dataclass(frozen=True)
class Member:
    """The parts of one replica; of policy, predictor and admission each run takes a copy. `config` is what a run of it
    alone would be configured by."""

    name: str
    policy: Policy
    engine: EngineSetup
    hardware: str = ""
    estimator: Estimator | None = None
    predictor: Predictor | None = None
    admission: Admission | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def times(self, count: int, again: Callable[[], EngineSetup]) -> Iterator[Member]:
        """`count` like this one. An engine of modelled durations serves all of them, any other is made anew."""
        for i in range(count):
            shared = not i or isinstance(self.engine.executor, CostExecutor)
            yield replace(
                self,
                name=f"{self.name}{i}",
                engine=self.engine if shared else again(),
            )


@dataclass(frozen=True)
class DecodePool:
    """The second pool of a disaggregated fleet, and how the first one's replicas are linked to it."""

    router: Router
    members: Sequence[Member]
    timing: Timing = AT_ONCE
    link: Link = field(default_factory=Link)
    first_token: FirstToken = "decode"

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError("cluster.decode: expected at least one replica, found none")
        if self.first_token not in ("prefill", "decode"):
            raise ConfigError(f"cluster.first_token: expected prefill or decode, found {self.first_token!r}")


@dataclass(frozen=True)
class FleetPlan:
    """Replicas and the router before them; with `decode`, they serve prompts alone."""

    router: Router
    members: Sequence[Member]
    timing: Timing = AT_ONCE
    decode: DecodePool | None = None

    def __post_init__(self) -> None:
        pool = "replicas" if self.decode is None else "prefill"
        if not self.members:
            raise ConfigError(f"cluster.{pool}: expected at least one replica, found none")
        names = [member.name for member in self.all]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"cluster.{pool}: two replicas are named {twice[0]}; give their entries names")
        for member in self.all:
            if member.engine.python is not None:
                raise ConfigError(f"cluster: engine={member.engine.name} runs in a process of its own, not in a fleet")
            if self.decode is not None and not isinstance(member.engine.executor, CostExecutor):
                raise ConfigError(
                    f"cluster=disaggregated: keys and values travel in modelled time alone; expected engine=virtual, "
                    f"found {member.engine.name}"
                )
        self._check_executors()

    @property
    def all(self) -> Sequence[Member]:
        """Of both pools, the first one's before the second's."""
        return [*self.members, *(() if self.decode is None else self.decode.members)]

    def pool_of(self, member: Member) -> dict[str, str]:
        """A label of each replica, where there are two pools."""
        if self.decode is None:
            return {}
        return {"pool": "decode" if member in self.decode.members else "prefill"}

    def _check_executors(self) -> None:
        """Only modelled durations have no state."""
        owners: dict[int, str] = {}
        for member in self.all:
            executor = member.engine.executor
            if isinstance(executor, CostExecutor):
                continue
            first = owners.setdefault(id(executor), member.name)
            if first != member.name:
                raise ConfigError(
                    f"cluster: replicas {first} and {member.name} share an executor, which serves one engine: make an "
                    "engine for each"
                )

    def clock_name(self, name: str) -> str:
        """What `clock=name` means for all replicas. ConfigError for real time, of which each would need its own."""
        meant = {member.engine.clock_name(name) for member in self.all}
        if len(meant) > 1:
            raise ConfigError(f"cluster: expected one kind of clock for all replicas, found {', '.join(sorted(meant))}")
        if meant == {"wall"}:
            raise ConfigError("cluster: replicas of one process take turns, so real time measures none of them")
        return meant.pop()


@dataclass
class FleetRun:
    """One run of a plan: what it writes, and the sources of the replicas, which count."""

    plan: FleetPlan
    clock: str
    measurement: Measurement
    record: str = "full"
    log_format: str = "jsonl"
    out: Path | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    sources: list[Counted] = field(default_factory=list)

    def cluster(self, source: Counted, recorder: FleetNotes, stack: ExitStack, closed_loop: bool, seed: int) -> Cluster:
        """The replicas before their first event; `stack` closes their files."""
        if self.out is not None and (earlier := self.out / REPLICAS).is_dir() and not earlier.is_symlink():
            shutil.rmtree(earlier)
        cluster = self._cluster(source, recorder, stack, closed_loop, seed)
        senders = 0 if self.plan.decode is None else len(self.plan.members)
        recorder.begin(cluster.replicas, cluster.counts, senders)
        return cluster

    def _cluster(
        self, source: Counted, recorder: FleetNotes, stack: ExitStack, closed_loop: bool, seed: int
    ) -> Cluster:
        plan, decode = self.plan, self.plan.decode
        first = self._pool(plan, source.total, stack)
        if decode is not None:
            return Disaggregated(
                first, self._pool(decode, source.total, stack), source, recorder, link=decode.link,
                first_token=decode.first_token, seed=seed,
            )  # fmt: skip
        return Cluster(
            first.setups, first.router, source, recorder, closed_loop=closed_loop, seed=seed, timing=first.timing
        )

    def _pool(self, pool: FleetPlan | DecodePool, total: int, stack: ExitStack) -> PoolSetup:
        setups = [self._setup(member, total, stack) for member in pool.members]
        return PoolSetup(setups, copy.deepcopy(pool.router), pool.timing)

    def close(self, recorder: FleetNotes, counters: Mapping[str, int]) -> RunTables:
        """The results of the replicas, then those of the fleet."""
        for source in self.sources:
            source.__exit__(None, None, None)
        counted = [{**source.lag_us(), **member.engine.counters()} for source, member in self._pairs()]
        return recorder.close_fleet(counted, dict(counters))

    def _pairs(self) -> Iterator[tuple[Counted, Member]]:
        return zip(self.sources, self.plan.all, strict=True)

    def _setup(self, member: Member, total: int, stack: ExitStack) -> ReplicaSetup:
        def build(queue: Source) -> Engine:
            folder = None if self.out is None else folder_within(folder_within(self.out, REPLICAS), member.name)
            recorder = self._recorder(member, folder, stack)
            source = Counted(queue, total) if folder is None else Logged(queue, total, folder, apart=False)
            self.sources.append(source)
            clock = member.engine.clock(self.clock)
            own = copy.deepcopy((member.policy, member.predictor, member.admission))
            return member.engine.engine(own[0], source, clock, recorder, *own[1:])

        return ReplicaSetup(member.name, build, member.hardware, member.estimator)

    def _recorder(self, member: Member, folder: Path | None, stack: ExitStack) -> ReplicaRecorder | ReplicaWriter:
        config = member.engine.config
        measurement = replace(self.measurement, max_num_seqs=config.max_num_seqs, num_blocks=config.num_blocks)
        if folder is None:
            return ReplicaRecorder(measurement)
        manifest = self._manifest(member)
        writer = ReplicaWriter(
            folder, measurement, record=self.record, log_format=self.log_format, config_hash=manifest["config_hash"]
        )
        write_manifest(folder, manifest)
        return stack.enter_context(writer)

    def _manifest(self, member: Member) -> dict[str, Any]:
        """What the fleet's manifest says, for one replica."""
        config = dict(member.config or self.manifest["config"])
        workload = {key: value for key, value in self.manifest["workload"].items() if key != "patience"}
        return {
            **self.manifest,
            "workload": workload,  # whose clients try elsewhere: to a replica, each attempt is a request
            "labels": {**self.manifest["labels"], "replica": member.name, **self.plan.pool_of(member)},
            "config": config,
            "config_hash": config_hash(config),
            "engine": asdict(member.engine.config),
            "cost": rates_of(member.engine.executor),
            "policy": source_of(member.policy),
        }
