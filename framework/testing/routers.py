"""What every router keeps: it reads what it declares, decides the same twice, loses nothing and starves nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from schedlab.framework.cluster.fleet import Timing
from schedlab.framework.cluster.router import Router
from schedlab.framework.cost.estimator import LinearEstimator
from schedlab.framework.errors import SchedlabError
from schedlab.framework.policy import Policy
from schedlab.framework.testing.fleets import Chains, FleetOutcome, run_fleet
from schedlab.framework.testing.harness import Spec

MS = 1_000_000
ESTIMATOR = LinearEstimator(step=0.001, token=0.00001)
REPLICAS = 3
CROWD = 120
"""Requests of the load under which every replica has to get some."""
LEAST_SHARE = 0.05
"""Of the crowd, that a replica gets at least: alike prompts that no replica can serve alone."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A property that a router breaks, and how."""

    property: str
    told: str


def check_router_contract(make: Callable[[], Router], policy: Callable[[], Policy], traces: int = 6) -> list[Fault]:
    """Try fresh routers on random traces, open and closed, and on a crowd; `policy` schedules on the replicas."""
    faults = dict[str, Fault]()
    for seed in range(traces):
        for fault in _on_trace(make, policy, seed, closed=seed % 2 == 1):
            faults.setdefault(fault.property, fault)
    for fault in _on_crowd(make, policy):
        faults.setdefault(fault.property, fault)
    return list(faults.values())


def _on_trace(make: Callable[[], Router], policy: Callable[[], Policy], seed: int, closed: bool) -> Iterator[Fault]:
    trace = random_trace(seed)
    try:
        first, again = [_run(make(), policy, trace, closed) for _ in range(2)]
    except SchedlabError as error:
        yield Fault("contract", str(error))
        return
    if first.tables.digest != again.tables.digest:
        yield Fault("determinism", f"the same trace went other ways twice (trace {seed})")
    names = sorted(request.request_id for request in first.ends)
    if names != sorted(spec.name for spec in trace):
        yield Fault("nothing is lost", f"{len(trace)} requests came, {len(names)} ended (trace {seed})")


def _on_crowd(make: Callable[[], Router], policy: Callable[[], Policy]) -> Iterator[Fault]:
    """Requests with one beginning for all, so that what follows caches alone is led astray; without an objective that
    one replica could meet for all of them."""
    crowd = [Spec(f"r{i}", i * MS, 30, 12, ids=(1, 2, 3, 100 + i), session=f"s{i}") for i in range(CROWD)]
    try:
        shares = _run(make(), policy, crowd, False).shares
    except SchedlabError as error:
        yield Fault("contract", str(error))
        return
    if min(shares) < LEAST_SHARE * CROWD:
        told = f"of {CROWD} alike requests the replicas were sent {', '.join(map(str, shares))}"
        yield Fault("sends all to one" if max(shares) == CROWD else "starves a replica", told)


def _run(router: Router, policy: Callable[[], Policy], trace: Sequence[Spec], closed: bool) -> FleetOutcome:
    source = Chains([trace[i : i + 3] for i in range(0, len(trace), 3)], 3 * MS) if closed else trace
    timing = Timing(response_delay_s=0.001, kv_delay_s=0.001, scrape_s=0.004)
    return run_fleet(policy, router, source, REPLICAS, timing=timing, estimator=ESTIMATOR, num_blocks=60)


def random_trace(seed: int, count: int = 18) -> list[Spec]:
    """Shared beginnings, unique prompts, withdrawn requests, bursts and gaps."""
    rng, now, trace = Random(seed), 0, list[Spec]()
    for i in range(count):
        now += rng.choice([0, 0, 1, 5, 30]) * MS
        prompt = rng.randint(1, 60)
        spec = Spec(f"r{i}", now, prompt, rng.randint(1, 20), client=rng.choice("ab"), session=f"s{i % 5}")
        if rng.random() < 0.6:
            branch = rng.randint(1, 2)
            spec = replace(spec, ids=tuple(k if k < 4 else 100 * branch + k for k in range(-(-prompt // 8))))
        trace.append(replace(spec, abort_ns=now + rng.randint(1, 80) * MS) if rng.random() < 0.2 else spec)
    return trace
