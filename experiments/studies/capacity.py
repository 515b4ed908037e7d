"""`schedlab capacity`: the highest rate at which each of several policies meets its SLO, and goodput against rate.

One workload is offered at many rates, its arrivals scaled in time; every policy sees the same replicates at the same
rates. statistics.py has the intervals, capacity_result.py shows the result.

A replicate's capacity is the highest rate of a grid at which attainment is as high as asked, found by bisection. That
supposes attainment falls with the rate; where it does not, one of the crossings is found. Goodput is counted over the
time in which requests arrive. A finite trace lets a policy end its backlog after the last arrival, and so a short one
flatters it: no rate is tried at which endless arrivals would bring more work than there is time for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from schedlab.experiments.analysis.bounds import shared_tokens
from schedlab.experiments.analysis.statistics import Interval, interval, pairs_needed
from schedlab.experiments.analysis.verdicts import EFFECT, verdict_of
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.studies import capacity_result
from schedlab.experiments.studies.capacity_result import Capacity, CapacityOptions, CapacityStudy, Curve
from schedlab.framework.admission import Admission
from schedlab.framework.cost.bounds import Demand, Prices, total_work_ns
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import SLO
from schedlab.framework.stages import ClientView
from schedlab.workloads.colocation import OnlineOffline
from schedlab.workloads.select import scale_time
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered, Workload

if TYPE_CHECKING:
    from omegaconf import DictConfig

Say = Callable[[str], None]
ATTAINMENT = "slo/attainment"
WIDEST = 10
"""Doublings of the first rate within which a capacity is sought, both ways."""
LEVEL = 0.95


# ---- what is run ----


@dataclass(kw_only=True)
class AtRate(Offered):
    """A trace whose requests arrive at `rate` a second on average."""

    trace: Trace
    rate: float

    def load(self, seed: int = 0) -> Trace:
        return scale_time(self.trace, self.trace.mean_rate / self.rate)


@dataclass
class CapacityBench:
    """Runs a policy on a replicate at a rate, each combination once; makers give fresh parts for every run.

    `predictor` is what its maker makes, in words. Replicates of different `seed` are different ones.
    """

    policies: Mapping[str, Callable[[], Policy]]
    workload: Offered
    make_engine: Callable[[], EngineSetup]
    slo: SLO
    make_predictor: Callable[[], Predictor | None] = lambda: None
    make_admission: Callable[[], Admission | None] = lambda: None
    clock: str = "auto"
    observed_at: ClientView | None = None
    predictor: str = "none"
    seed: int = 0
    traces: dict[int, Trace] = field(default_factory=dict)
    known: dict[tuple[str, int, float], dict[str, Any]] = field(default_factory=dict)

    def seeds(self, replicates: int) -> range:
        return range(self.seed * replicates + 1, (self.seed + 1) * replicates + 1)

    def trace(self, seed: int) -> Trace:
        if seed not in self.traces:
            trace = self.workload.load(seed)
            if not trace.span_s:
                raise ConfigError(f"capacity: {trace.name} arrives all at once; no scale of time gives it a rate")
            self.traces[seed] = trace
        return self.traces[seed]

    def summary(self, policy: str, seed: int, rate: float) -> dict[str, Any]:
        key = policy, seed, rate
        if key not in self.known:
            workload = AtRate(name=self.workload.name, trace=self.trace(seed), rate=rate, **self._stages())
            run = Experiment(
                policy=self.policies[policy](), workload=cast(Workload, workload), engine=self.make_engine(), seed=seed,
                slo=self.slo, predictor=self.make_predictor(), admission=self.make_admission(), clock=self.clock,
                observed_at=self.observed_at,
            ).run()  # fmt: skip
            self.known[key] = run.summary
        return self.known[key]

    def _stages(self) -> dict[str, Any]:
        names = ("max_tokens", "slo_classes")
        return {name: getattr(self.workload, name) for name in names}

    def first_rate(self, seed: int) -> float:
        """About what the engine can take: requests by the time that it needs if all are there at once."""
        policy = next(iter(self.policies))
        summary = self.summary(policy, seed, len(self.trace(seed)) * 1e9)
        if not summary["requests/finished"]:
            raise ConfigError(f"capacity: {policy} finishes no request of {self.workload.name}")
        return float(summary["throughput/requests_per_s"])


# ---- the search ----


@dataclass(frozen=True)
class Grid:
    """Rates in equal relative steps, by number."""

    first: float
    resolution: float

    def rate(self, step: int) -> float:
        return float(self.first * (1 + self.resolution) ** step)

    @property
    def furthest(self) -> int:
        """How many steps from the first a capacity is sought."""
        return math.ceil(WIDEST * math.log(2) / math.log1p(self.resolution))


def highest(meets: Callable[[int], bool], start: int, furthest: int) -> int | None:
    """The last step that `meets`: a bracket in growing strides from `start`, then halved.

    None if no step down to -`furthest` does. ConfigError if every one up to `furthest` does.
    """
    stride, low, high = 2, start, start
    if meets(start):
        while meets(high := low + stride):
            low, stride = high, 2 * stride
            if low > furthest:
                raise ConfigError(
                    "capacity: attainment does not fall, whatever the rate: the trace is too short for this SLO"
                )
    else:
        while not meets(low := high - stride):
            high, stride = low, 2 * stride
            if high < -furthest:
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def study(bench: CapacityBench, options: CapacityOptions, say: Say = print) -> CapacityStudy:
    """Find every capacity, then the curves around them."""
    seeds = bench.seeds(options.replicates)
    grid = Grid(bench.first_rate(seeds[0]), options.resolution)
    limits = [work_limit(bench, seed, options.attainment) for seed in seeds]
    found: dict[str, list[float | None]] = {}
    for policy in bench.policies:
        found[policy] = capacities_of(bench, grid, policy, dict(zip(seeds, limits, strict=True)), options.attainment)
        known = [rate for rate in found[policy] if rate is not None]
        say(f"{policy}: {np.exp(np.mean(np.log(known))):.3g} requests/s" if known else f"{policy}: at no rate")
    first = next(iter(found.values()))
    capacities = tuple(judge(policy, rates, first) for policy, rates in found.items())
    every = [rate for rates in found.values() for rate in rates if rate is not None] or [grid.first]
    limit = float(np.exp(np.mean(np.log(limits)))) if math.isfinite(limits[0]) else None
    top = min(1.5 * max(every), min(limits))
    rates = tuple(float(rate) for rate in np.linspace(0.25 * min(every), top, options.points))
    curves = tuple(curve_of(bench, policy, rates, seeds) for policy in bench.policies) if rates else ()
    requests = sum(len(bench.trace(seed)) for seed in seeds)
    at_limit = {policy: short_of(own, limits, options.resolution) for policy, own in found.items()}
    return CapacityStudy(
        options, bench.slo, bench.predictor, bench.workload.name, requests, capacities, curves, limit,
        {policy: count for policy, count in at_limit.items() if count}, len(bench.known),
    )  # fmt: skip


def short_of(rates: Sequence[float | None], limits: Sequence[float], resolution: float) -> int:
    """Replicates whose capacity is the last rate below the limit."""
    pairs = zip(rates, limits, strict=True)
    return sum(rate is not None and rate * (1 + resolution) > limit for rate, limit in pairs)


def capacities_of(
    bench: CapacityBench, grid: Grid, policy: str, limits: Mapping[int, float], attainment: float
) -> list[float | None]:
    """Requests/s of each replicate, by seed up to its limit; the search for one begins where the one before ended."""
    found: list[float | None] = []
    start = 0
    for seed, limit in limits.items():

        def meets(step: int, seed: int = seed, limit: float = limit) -> bool:
            rate = grid.rate(step)
            if rate > limit:
                return False
            share = bench.summary(policy, seed, rate)[ATTAINMENT]
            return share is not None and share >= attainment

        step = highest(meets, start, grid.furthest)
        found.append(None if step is None else grid.rate(step))
        start = start if step is None else step
    return found


def judge(policy: str, rates: Sequence[float | None], first: Sequence[float | None]) -> Capacity:
    """Interval of the mean, and the paired comparison with the first policy's; none where a replicate has no rate."""
    whole = all(rate is not None for rate in rates)
    logs = np.log(np.array([rate for rate in rates if rate is not None], dtype=np.float64))
    mean = float(np.exp(logs.mean())) if whole else None
    spread = exponential(interval(logs, LEVEL)) if whole and len(logs) > 1 else None
    if not whole or any(rate is None for rate in first) or len(logs) < 2:
        return Capacity(policy, tuple(rates), mean, spread, None, None, None, "not judged", None)
    differences = logs - np.log(np.array(first, dtype=np.float64))
    judged = interval(differences, LEVEL)
    change, bounds = float(np.expm1(differences.mean())), (math.expm1(judged.low), math.expm1(judged.high))
    verdict = verdict_of(bounds, change, EFFECT, good=1)
    needed = None
    if verdict == "inconclusive":
        deviation = float(differences.std(ddof=1))
        needed = pairs_needed(float(differences.mean()), deviation, LEVEL, at_least=len(differences) + 1)
    relative = replace(judged, low=bounds[0], high=bounds[1])
    return Capacity(policy, tuple(rates), mean, spread, change, relative, judged.p, verdict, needed)


def exponential(logs: Interval) -> Interval:
    return replace(logs, low=math.exp(logs.low), high=math.exp(logs.high))


def curve_of(bench: CapacityBench, policy: str, rates: Sequence[float], seeds: Sequence[int]) -> Curve:
    goodput, low, high, attainment = [], [], [], []
    for rate in rates:
        shares = np.array([bench.summary(policy, seed, rate)[ATTAINMENT] or 0.0 for seed in seeds])
        bounds = interval(shares * rate, LEVEL) if len(shares) > 1 else None
        goodput.append(float(shares.mean()) * rate)
        low.append(bounds.low if bounds else None)
        high.append(bounds.high if bounds else None)
        attainment.append(float(shares.mean()))
    return Curve(policy, tuple(rates), tuple(goodput), tuple(low), tuple(high), tuple(attainment))


def work_limit(bench: CapacityBench, seed: int, attainment: float) -> float:
    """Requests/s of endless arrivals like a replicate's at which the least time that the work takes of the `attainment`
    of the requests that need least is all there is; infinite where the cost is not modelled."""
    setup = bench.make_engine()
    if not isinstance(setup.executor, CostExecutor):
        return math.inf
    limits, trace = setup.config, bench.trace(seed)
    prices = Prices(setup.executor.coefficients, limits.max_num_batched_tokens, limits.max_num_seqs)
    nothing = np.zeros(len(trace))
    hits = shared_tokens(trace) if limits.enable_prefix_caching else nothing
    output = np.maximum(trace.output_tokens, 1)
    demand = Demand(nothing, nothing, nothing, trace.prompt_tokens, output, hits, setup.executor.window)
    work_N = np.sort(total_work_ns(demand, prices))[: math.ceil(attainment * len(trace))]
    return len(trace) * 1e9 / float(work_N.sum()) if work_N.any() else math.inf


# ---- the command ----


def capacity_job(config: DictConfig) -> None:
    """Run the study that `config` describes, show it, and write it into Hydra's output directory."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_arguments
    from schedlab.experiments.run.messages import short
    from schedlab.experiments.studies.fleet_size import fleet_size_job
    from schedlab.experiments.studies.pool_size import pool_size_job

    keys = compose.resolve(config.capacity)
    check_arguments("capacity", keys, CapacityOptions)
    options = CapacityOptions(**keys)
    workload = compose.build(config.workload, "workload")
    check_patient(workload)
    if config.cluster or config.router:
        fleet_size_job(config, options)
        return
    if isinstance(workload, OnlineOffline):
        pool_size_job(config, workload, options)
        return
    found = study(bench_of(config, options), options)
    directory = compose.output_directory()
    capacity_result.show(found)
    capacity_result.write(found, directory, plots=config.plots)
    print(f"in {short(directory)}")


def check_patient(workload: Workload) -> None:
    """ConfigError where clients leave or try again: attainment is a share of requests, and theirs are attempts."""
    if isinstance(workload, Offered) and workload.impatient().facts:
        raise ConfigError("workload.patience: capacity offers each request once; leave it null, of each client too")


def bench_of(config: DictConfig, options: CapacityOptions, chosen: Mapping[str, str] | None = None) -> CapacityBench:
    """`chosen`: the options of groups, where Hydra does not hold them."""
    from schedlab.experiments.analysis.table import predictor_line
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_single, check_whole
    from schedlab.experiments.studies.fidelity import policies_of

    check_single(config, "capacity")
    check_whole(config.measure, "capacity")
    slo = compose.build_optional(config.slo, "slo")
    if slo is None or not slo.limited:
        raise ConfigError("capacity: expected an SLO class with a limit, found slo=none; choose one of conf/slo")
    workload = compose.build(config.workload, "workload")
    check_patient(workload)
    if isinstance(workload, OnlineOffline):
        raise ConfigError("capacity: rates are of one kind of traffic; `schedlab capacity` sizes a pool of batch work")
    return CapacityBench(
        policies=policies_of(config, options.policies, "capacity.policies"),
        workload=workload,
        make_engine=lambda: compose.build(config.engine, "engine"),
        slo=slo,
        make_predictor=lambda: compose.build_optional(config.predictor, "predictor"),
        make_admission=lambda: compose.build_optional(config.admission, "admission"),
        clock=config.clock,
        seed=config.seed,
        observed_at=compose.build_optional(config.observed_at, "observed_at"),
        predictor=predictor_line(
            {"labels": chosen or compose.choices(("predictor",)), "config": compose.resolve(config)}
        ),
    )
