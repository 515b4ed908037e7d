"""`schedlab fidelity`: how far the virtual clock is from the real engine, and how far that is from itself.

One trace, below and above saturation, under each policy: real runs on this machine, and the same on the virtual clock
with a profile that is measured meanwhile. A busy clock leaves out what happens between steps, so that cells of the
calibration run there, and the machine, whatever else it has to do, is the same for both. How steps are measured is in
measuring.py, how decisions are taken again in decisions.py, how the result is shown in fidelity_result.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.decisions import DecidedAgain, decide_again
from schedlab.experiments.engines import EngineSetup, settled_heap
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.studies import calibrate, fidelity_result
from schedlab.experiments.studies.fidelity_result import FidelityStudy, PolicyOutcome
from schedlab.experiments.studies.measuring import MIN_PASSES, Bench, Between, MeasuredStep, Say, make_bench
from schedlab.framework.admission import Admission
from schedlab.framework.cost.fit import Profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.engine import EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import SLO
from schedlab.framework.results.tables import RunTables
from schedlab.framework.source import Source
from schedlab.framework.stages import ClientView
from schedlab.workloads.select import scale_time
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered

if TYPE_CHECKING:
    from omegaconf import DictConfig


SHARE = 0.5
"""CPU time of the cells between the steps of a run, of the run's own."""
AT_ONCE = 1e-9
"""A time scale at which everything arrives at the start: what the makespan says of capacity."""


# ---- what is run ----


@dataclass
class Scaled:
    """A workload with all its times multiplied."""

    workload: Offered
    time_scale: float

    def __post_init__(self) -> None:
        self.name = self.workload.name

    def load(self, seed: int = 0) -> Trace:
        return scale_time(self.workload.load(seed), self.time_scale)

    def source(self, max_model_len: int, slo: SLO | None = None, seed: int = 0, **terms: Any) -> Source:
        return self.workload.source(max_model_len, slo, seed, **{"trace": self.load(seed), **terms})

    def describe(self, seed: int = 0, trace: Trace | None = None) -> str:
        return self.workload.describe(seed, self.load(seed) if trace is None else trace)


@dataclass(frozen=True)
class Setting:
    """The parts of every run, most as makers of fresh ones: neither a policy nor an executor serves two runs."""

    policies: Mapping[str, Callable[[], Policy]]
    workload: Offered
    make_engine: Callable[[], EngineSetup]
    roofline: Roofline
    hardware: Hardware
    make_predictor: Callable[[], Predictor | None] = lambda: None
    make_admission: Callable[[], Admission | None] = lambda: None
    seed: int = 0
    slo: SLO | None = None
    clock: str = "auto"
    observed_at: ClientView | None = None

    def run(
        self, policy: str, time_scale: float, engine: EngineSetup, clock: str, between: Between | None = None
    ) -> RunTables:
        return Experiment(
            policy=self.policies[policy](), workload=Scaled(self.workload, time_scale), engine=engine, seed=self.seed,
            slo=self.slo, predictor=self.make_predictor(), admission=self.make_admission(), clock=clock,
            observed_at=self.observed_at,
        ).run(between=between)  # fmt: skip

    def virtual(self, policy: str, time_scale: float, limits: EngineConfig, profile: Profile) -> dict[str, Any]:
        engine = EngineSetup("virtual", self.modelled(profile), limits, ("virtual",))
        return self.run(policy, time_scale, engine, "virtual").summary

    def decide_again(self, run: RunTables, policy: str, time_scale: float, limits: EngineConfig) -> DecidedAgain:
        source = Scaled(self.workload, time_scale).source(limits.max_model_len, self.slo, self.seed)
        if self.observed_at is not None:
            source = self.observed_at.around(source, self.seed)
        told_of = self.make_predictor(), self.make_admission()
        return decide_again(run, self.policies[policy](), source, limits, self.modelled(), *told_of)

    def modelled(self, profile: Profile | None = None) -> CostExecutor:
        model, weights, cache = self.roofline.model, self.roofline.weight_dtype, self.roofline.kv_cache_dtype
        return CostExecutor(model, self.hardware, weight_dtype=weights, kv_cache_dtype=cache, profile=profile)


Case = tuple[float, str]
"""A load and a policy."""


class Profiler:
    """The profile of this machine as it is over the whole study: more is measured during the real runs.

    With a profile that was measured before, nothing is.
    """

    def __init__(
        self, setting: Setting, options: calibrate.CalibrationOptions, given: Profile | None, say: Say
    ) -> None:
        self._setting, self._given = setting, given
        self._measured: list[MeasuredStep] = []
        self._during: dict[Case, list[MeasuredStep]] = {}
        self._extent, self._say = options.extent, say
        self._bench: Bench | None = None
        if given is None:
            self.measure()

    def measure(self) -> None:
        """Some passes over the grid. A bench stays where it measures between the steps of runs; elsewhere it goes, for
        a device has room for one engine at a time."""
        if self._given is not None:
            return
        bench = self._bench or self._make_bench()
        with settled_heap():  # as the real runs have it
            for _ in range(MIN_PASSES):
                self._measured += bench.run()
        if self._bench is None:
            bench.close()

    def _make_bench(self) -> Bench:
        engine, clock = self._setting.make_engine(), self._setting.clock
        bench = make_bench(engine, self._extent, clock, self._say)
        if engine.clock_name(clock) == "busy":
            self._bench = bench
        return bench

    def after(self, load: float) -> None:
        """The real runs at a load are done."""
        if self._bench is None:
            self.measure()

    def between(self, case: Case) -> Between | None:
        """What measures between the steps of a run, if its clock allows that."""
        if self._bench is None:
            return None
        return Between(self._bench, SHARE, self._during.setdefault(case, []))

    def profile(self) -> Profile:
        """From all that was measured so far."""
        if self._given is not None:
            return self._given
        measured = [*self._measured, *(step for steps in self._during.values() for step in steps)]
        setting = self._setting
        errors = calibrate.held_out_errors(measured, setting.roofline.routing)
        return calibrate.make_profile(measured, errors, setting.roofline, setting.hardware, {})

    def level(self, profile: Profile, case: Case) -> float:
        """How long steps took during the runs of `case`, of what `profile` says."""
        during = self._during.get(case)
        return calibrate.level(profile.coefficients, [step.point for step in during]) if during else 1.0


def study(
    setting: Setting, loads: tuple[float, ...], repeats: int, calibration: calibrate.CalibrationOptions,
    profile: Profile | None = None, say: Say = print,
) -> FidelityStudy:  # fmt: skip
    """Run everything. A load is the share of the policies' median capacity that the trace asks for."""
    check_lengths(trace := setting.workload.load(setting.seed))
    profiler = Profiler(setting, calibration, profile, say)
    limits = setting.make_engine().config
    capacity_s = capacities(setting, limits, profiler.profile())
    scales = {load: median(capacity_s.values()) / (load * trace.span_s) for load in loads}
    say("; ".join(f"load {load:g}: time_scale {scale:.4g}" for load, scale in scales.items()))
    real: dict[Case, list[tuple[dict[str, Any], DecidedAgain]]] = {}
    for _ in range(repeats):
        for load in loads:
            for policy in setting.policies:
                run = measured_run(setting, policy, load, scales[load], profiler.between((load, policy)), say)
                real.setdefault((load, policy), []).append(run)
            profiler.after(load)
    final = profiler.profile()
    outcomes = [
        outcome(setting, case, scales[case[0]], limits, final, profiler.level(final, case), runs)
        for case, runs in real.items()
    ]
    return FidelityStudy(final, capacity_s, trace.span_s, tuple(outcomes))


def measured_run(
    setting: Setting, policy: str, load: float, scale: float, between: Between | None, say: Say
) -> tuple[dict[str, Any], DecidedAgain]:
    """A real run, and the same decided again."""
    engine = setting.make_engine()
    run = setting.run(policy, scale, engine, setting.clock, between)
    agreement = setting.decide_again(run, policy, scale, engine.config)
    told = "equal decisions" if agreement.equal else f"decisions part at step {agreement.first}"
    say(f"{policy} at load {load:g}: {run.summary['makespan_s']:.1f} s, {run.summary['steps']:,} steps, {told}")
    return run.summary, agreement


def outcome(
    setting: Setting, case: Case, scale: float, limits: EngineConfig, profile: Profile, level: float,
    runs: list[tuple[dict[str, Any], DecidedAgain]],
) -> PolicyOutcome:  # fmt: skip
    """What the real runs of a case gave, beside the virtual one on the machine as it was during them."""
    load, policy = case
    then = replace(profile, coefficients=calibrate.at_level(profile.coefficients, level))
    summaries, agreements = zip(*runs, strict=True)
    return PolicyOutcome(
        policy, load, scale, level, summaries, setting.virtual(policy, scale, limits, then), agreements
    )  # fmt: skip


def capacities(setting: Setting, limits: EngineConfig, profile: Profile) -> dict[str, float]:
    """Seconds that each policy takes for the whole trace, all of it there at the start, on the virtual clock.

    Nobody is refused: most of a trace that is there at once would be.
    """
    of_policy = partial(
        replace(setting, make_admission=lambda: None).virtual, time_scale=AT_ONCE, limits=limits, profile=profile
    )
    return {policy: of_policy(policy)["makespan_s"] for policy in setting.policies}


def check_lengths(trace: Trace) -> None:
    """ConfigError for what cannot be compared: outputs that a model ends, and arrivals without a span."""
    if (trace.output_tokens < 0).any():
        row = trace.source_row[np.argmin(trace.output_tokens)]
        raise ConfigError(
            f"fidelity: {trace.name}: row {row} has no recorded output length; the virtual clock needs one"
        )
    if not trace.span_s:
        raise ConfigError(f"fidelity: {trace.name} arrives all at once; no time_scale gives it a load")


# ---- the command ----


@dataclass(frozen=True)
class FidelityOptions:
    """The keys of `fidelity`."""

    policies: list[str] | None
    loads: list[float]
    repeats: int

    def __post_init__(self) -> None:
        if not self.loads or min(self.loads) <= 0:
            raise ConfigError(f"fidelity.loads: expected shares of the capacity above 0, found {self.loads}")
        if self.repeats < 1:
            raise ConfigError(f"fidelity.repeats: expected at least 1, found {self.repeats}")


def fidelity_job(config: DictConfig) -> None:
    """Run the study that `config` describes, show it, and write it into Hydra's output directory."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_arguments
    from schedlab.experiments.run.messages import short

    keys, calibration = compose.resolve(config.fidelity), compose.resolve(config.calibrate)
    check_arguments("fidelity", keys, FidelityOptions)
    check_arguments("calibrate", calibration, calibrate.CalibrationOptions)
    options = FidelityOptions(**keys)
    setting = setting_of(config, options)
    given = None if config.profile is None else Profile.load(config.profile)
    found = study(setting, tuple(options.loads), options.repeats, calibrate.CalibrationOptions(**calibration), given)
    directory = compose.output_directory()
    fidelity_result.show(found)
    fidelity_result.write(found, directory, plots=config.plots)
    print(f"in {short(directory)}")


def setting_of(config: DictConfig, options: FidelityOptions) -> Setting:
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_single, check_whole

    check_single(config, "fidelity")
    check_whole(config.measure, "fidelity")
    setup = compose.build(config.engine, "engine")
    roofline, hardware = calibrate.modelled(config, setup, "fidelity")
    if setup.python is not None and (config.profile is None or config.engine.num_blocks is None):
        raise ConfigError(
            f"fidelity engine={setup.name}: expected engine.num_blocks and profile, as `schedlab calibrate "
            f"engine={setup.name}` writes it; found {config.engine.num_blocks} and {config.profile}"
        )
    return Setting(
        policies=policies_of(config, options.policies, "fidelity.policies"),
        workload=compose.build(config.workload, "workload"),
        make_engine=lambda: compose.build(config.engine, "engine"),
        roofline=roofline,
        hardware=hardware,
        make_predictor=lambda: compose.build_optional(config.predictor, "predictor"),
        make_admission=lambda: compose.build_optional(config.admission, "admission"),
        seed=config.seed,
        slo=compose.build_optional(config.slo, "slo"),
        clock=config.clock,
        observed_at=compose.build_optional(config.observed_at, "observed_at"),
    )


def policies_of(config: DictConfig, names: list[str] | None, key: str) -> dict[str, Callable[[], Policy]]:
    """Makers of the policies that `key` names, with their default knobs; of the configured one if it names none."""
    from schedlab.experiments.run import compose

    def maker(whole: DictConfig) -> Callable[[], Policy]:
        compose.build(whole.policy, "policy")  # a mistake in it is told before anything runs
        return lambda: compose.build(whole.policy, "policy")

    if names is None:
        return {compose.choices(["policy"]).get("policy", "policy"): maker(config)}
    with compose.blaming(key):
        return {name: maker(compose.with_option(config, "policy", name)) for name in names}
