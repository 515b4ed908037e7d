"""Tiny fleets on the stub, audited at every boundary, and the plain engines that their replicas must equal."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from schedlab.framework.clock import VirtualClock
from schedlab.framework.cluster.disaggregated import Disaggregated, FirstToken
from schedlab.framework.cluster.fleet import AT_ONCE, Timing
from schedlab.framework.cluster.loop import Cluster, PoolSetup
from schedlab.framework.cluster.replica import END, Replica, ReplicaRecorder, ReplicaSetup
from schedlab.framework.cluster.results import FleetRecorder
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.transfer import Link, Transfer
from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.engine import Engine
from schedlab.framework.executor import Executor
from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import MaxPredictor
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.tables import RunTables
from schedlab.framework.source import ListSource, Source
from schedlab.framework.testing.executors import JumpingExecutor
from schedlab.framework.testing.harness import TINY, Spec

MakePolicy = Callable[[], Policy]


class Chains:
    """A closed loop: the first request of each chain arrives at its time, each other one `think_ns` after the end of
    the one before, whatever that end was."""

    def __init__(self, chains: Sequence[Sequence[Spec]], think_ns: int) -> None:
        self._due: list[tuple[int, int, EngineRequest]] = []
        self._next: dict[str, Spec] = {}
        self._think_ns, self._number = think_ns, 0
        for chain in chains:
            self._next.update({one.name: other for one, other in zip(chain, chain[1:], strict=False)})
        for chain in chains:
            self._push(chain[0])

    def _push(self, spec: Spec) -> None:
        heapq.heappush(self._due, (spec.arrival_ns, self._number, spec.request()))
        self._number += 1

    def peek(self) -> int | None:
        return self._due[0][0] if self._due else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        taken = []
        while self._due and self._due[0][0] <= now_ns:
            taken.append(heapq.heappop(self._due)[2])
        return taken

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        following = self._next.pop(request.request_id, None)
        if following is not None:
            arrival = now_ns + self._think_ns
            abort = following.abort_ns
            shifted = None if abort is None else arrival + max(abort - following.arrival_ns, 1)
            self._push(replace(following, arrival_ns=arrival, abort_ns=shifted))


class RoutedRecorder(FleetRecorder):
    """Keeps who was routed where and when, and who ended."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        self.sent: list[tuple[EngineRequest, str | None, int]] = []
        self.ends: list[EngineRequest] = []
        self.moved: list[Transfer] = []

    def routed(self, request: EngineRequest, replica: Replica | None, now_ns: int) -> None:
        self.sent.append((request, None if replica is None else replica.name, now_ns))
        super().routed(request, replica, now_ns)

    def transferred(self, transfer: Transfer) -> None:
        self.moved.append(transfer)
        super().transferred(transfer)

    def ended(self, request: EngineRequest) -> None:
        self.ends.append(request)
        super().ended(request)


@dataclass
class FleetOutcome:
    """What a fleet's run left. `sent` are (request, replica, ns) in order."""

    cluster: Cluster
    sent: list[tuple[EngineRequest, str | None, int]]
    ends: list[EngineRequest]
    tables: RunTables
    moved: list[Transfer] = field(default_factory=list)

    @property
    def digests(self) -> list[str]:
        return [replica["digest"] for replica in self.tables.result["replicas"]]

    @property
    def shares(self) -> list[int]:
        """Requests that each replica was sent."""
        return [replica["routed"] for replica in self.tables.result["replicas"]]

    def of(self, name: str) -> list[tuple[EngineRequest, int]]:
        return [(request, ns) for request, replica, ns in self.sent if replica == name]


def engine_of(
    make: MakePolicy, source: Source, config: EngineConfig, executor: Executor | None, recorder: Any = None
) -> Engine:
    policy = make()
    recorder = recorder or ReplicaRecorder(Measurement(config.max_num_seqs, config.num_blocks))
    predictor = MaxPredictor() if policy.needs_prediction else None
    return Engine(policy, executor or JumpingExecutor(slope=300), source, config, VirtualClock(), recorder, predictor)


def run_fleet(
    make: MakePolicy | Sequence[MakePolicy],
    router: Router,
    source: Source | Sequence[Spec],
    replicas: int = 3,
    *,
    closed_loop: bool | None = None,
    seed: int = 0,
    timing: Timing = AT_ONCE,
    look_ahead: bool = True,
    executor: Callable[[], Executor] | None = None,
    estimator: Estimator | None = None,
    **keys: Any,
) -> FleetOutcome:
    """Run to the end, audited; every block is back. `keys` change TINY; `make` is one for all or one for each."""
    config = replace(TINY, **keys)
    makes = [make] * replicas if callable(make) else list(make)
    listed = not hasattr(source, "peek")
    recorder = RoutedRecorder(Measurement(config.max_num_seqs, config.num_blocks))
    setups = [setup_of(f"r{i}", one, config, executor, estimator) for i, one in enumerate(makes)]
    cluster = Cluster(
        setups, router, source_of(source), recorder,
        closed_loop=not listed if closed_loop is None else closed_loop, seed=seed, timing=timing, look_ahead=look_ahead,
    )  # fmt: skip
    recorder.begin(cluster.replicas, cluster.counts)
    return _ran(cluster, recorder)


def run_disaggregated(
    prefill: Sequence[MakePolicy],
    decode: Sequence[MakePolicy],
    routers: tuple[Router, Router],
    source: Source | Sequence[Spec],
    *,
    link: Link,
    first_token: FirstToken = "decode",
    timing: Timing = AT_ONCE,
    look_ahead: bool = True,
    decode_keys: Mapping[str, Any] | None = None,
    **keys: Any,
) -> FleetOutcome:
    """Two pools, run to the end, audited. `keys` change TINY for both, `decode_keys` for the second."""
    config = replace(TINY, **keys)
    configs = {"p": config, "d": replace(config, **(decode_keys or {}))}
    recorder = RoutedRecorder(Measurement(config.max_num_seqs, config.num_blocks))
    first, second = [
        PoolSetup([setup_of(f"{name}{i}", one, configs[name]) for i, one in enumerate(makes)], router, timing)
        for name, makes, router in zip("pd", (prefill, decode), routers, strict=True)
    ]
    cluster = Disaggregated(
        first, second, source_of(source), recorder, link=link, first_token=first_token, look_ahead=look_ahead
    )
    recorder.begin(cluster.replicas, cluster.counts, len(prefill))
    return _ran(cluster, recorder)


def source_of(source: Source | Sequence[Spec]) -> Source:
    """A list of requests in order of arrival, as a source."""
    if not isinstance(source, Sequence):
        return source
    return ListSource([spec.request() for spec in sorted(source, key=lambda spec: spec.arrival_ns)])


def setup_of(
    name: str,
    make: MakePolicy,
    config: EngineConfig,
    executor: Callable[[], Executor] | None = None,
    estimator: Estimator | None = None,
) -> ReplicaSetup:
    def build(queue: Source) -> Engine:
        return engine_of(make, queue, config, executor() if executor else None)

    return ReplicaSetup(name, build, "", estimator)


def _ran(cluster: Cluster, recorder: RoutedRecorder) -> FleetOutcome:
    """`cluster` is run to the end: its books are in order, and every block is back."""
    cluster.run()
    for replica in cluster.replicas:
        engine = replica.engine
        engine.audit()
        assert engine.ledger.cache.num_free == engine.config.num_blocks, f"{replica.name} still owns blocks"
        assert not engine.ledger.held, f"{replica.name} still holds what nobody reads"
        assert replica.load.in_flight == len([1 for _, kind, _ in replica.news if kind == END]), "the books are wrong"
    tables = recorder.close_fleet([{} for _ in cluster.replicas], {})
    return FleetOutcome(cluster, recorder.sent, recorder.ends, tables, recorder.moved)


def run_alone(
    make: MakePolicy, source: Source, *, executor: Callable[[], Executor] | None = None, **keys: Any
) -> RunTables:
    """The same on a plain engine."""
    engine = engine_of(make, source, replace(TINY, **keys), executor() if executor else None)
    engine.run()
    return engine.recorder.close(backlog_end=engine.num_unfinished, counters={})


def routed_rows(outcome: FleetOutcome, name: str, specs: Sequence[Spec]) -> ListSource:
    """What replica `name` was sent, as a trace of its own: every request arrives when it was routed there."""
    by_name = {spec.name: spec for spec in specs}
    requests = []
    for request, ns in outcome.of(name):
        abort = request.abort_ns
        requests.append(replace(by_name[request.request_id], arrival_ns=ns, abort_ns=abort).request())
    return ListSource(requests)
