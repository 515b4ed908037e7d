"""One run: a policy, a workload and an engine's setup put together, without Hydra and, if wished, without files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.engines import EngineSetup, settled_heap
from schedlab.experiments.run.elsewhere import run_elsewhere
from schedlab.experiments.run.fleet import FleetPlan, FleetRun
from schedlab.experiments.run.manifest import describe_run, source_of, workload_facts, write_manifest
from schedlab.experiments.run.offered import Counted, Logged, offered
from schedlab.experiments.run.progress import Quiet
from schedlab.experiments.run.text import StopStrings, answer_text
from schedlab.framework.admission import Admission
from schedlab.framework.cluster.loop import Cluster
from schedlab.framework.cluster.results import FleetNotes, FleetRecorder, FleetWriter
from schedlab.framework.cost.expand import rates_of
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.framework.policy import Policy, check_policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import NS, SLO
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter
from schedlab.framework.stages import ClientView
from schedlab.workloads.source import decode_sampling
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered, Workload


@dataclass
class Experiment:
    """Everything that decides what a run computes.

    `start_s` and `stop_s` bound the measured window; `observed_at` are a client's stages, None for the engine's view;
    `record` and `log_format` are those of RunWriter; `store_text` keeps generated texts beside their token ids.
    `fleet`: replicas that share the requests, of which `policy` and `engine` are the first's; None: that engine alone.
    `config`, `labels` (what tables name the run by) and `overrides` (what was asked for) go into the manifest as they
    are.
    """

    policy: Policy
    workload: Workload
    engine: EngineSetup
    seed: int = 0
    slo: SLO | None = None
    predictor: Predictor | None = None
    admission: Admission | None = None
    fleet: FleetPlan | None = None
    clock: str = "auto"
    start_s: float | None = None
    stop_s: float | None = None
    observed_at: ClientView | None = None
    record: str = "full"
    log_format: str = "jsonl"
    store_text: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_policy(self.policy)
        own = {"policy": type(self.policy).__name__, "workload": self.workload.name, "engine": self.engine.name}
        self.labels = {**own, "seed": self.seed, **self.labels}
        self.config = self.config or {**own, "seed": self.seed, "limits": asdict(self.engine.config)}

    @property
    def name(self) -> str:
        return "-".join(str(self.labels[key]) for key in ("policy", "workload", "seed"))

    def run(
        self, out: Path | None = None, progress: Quiet | None = None, between: Callable[[Engine], None] | None = None
    ) -> RunTables:
        """Run to the end. With `out`, a run directory is written as the run goes, and what a run that is stopped leaves
        can be read. `between` is called after every step, unless the engine needs a process of its own."""
        if self.fleet is not None:
            return self._run_fleet(self.fleet, out, progress or Quiet())
        if self.engine.python is not None:
            return run_elsewhere(self, out, progress)
        clock, trace = self.engine.clock(self.clock), self.trace
        check_window(self.measurement, trace)  # a mistake in it should cost no run
        with ExitStack() as stack:
            recorder = stack.enter_context(self._writer(out)) if out else Recorder(self.measurement)
            with self._source(out) as source, progress or Quiet() as shown:  # closed before the result says finished
                engine = stack.enter_context(
                    closing(self.engine.engine(self.policy, source, clock, recorder, self.predictor, self.admission))
                )
                shown.begin(offered(trace))
                with settled_heap() if clock.measures else nullcontext():
                    engine.run(self._after_steps(source, shown, between))
            counters = {**trace.provenance.counts, **source.lag_us(), **source.abandoned(), **self.engine.counters()}
            return recorder.close(backlog_end=engine.num_unfinished, counters=counters)

    def _run_fleet(self, plan: FleetPlan, out: Path | None, shown: Quiet) -> RunTables:
        """The same with several engines. Texts end no request there."""
        clock, trace = plan.clock_name(self.clock), self.trace
        check_window(self.measurement, trace)
        if self._stop_strings() is not None:
            raise ConfigError("cluster: requests that end at a text (sampling.stop) need a single engine")
        if plan.decode is not None and (trace.output_tokens < 0).any():
            raise ConfigError(f"cluster=disaggregated: expected the length of every answer, {trace.name} lacks some")
        tied = trace.after is not None and bool((trace.after >= 0).any())
        closed = tied or bool(impatience(self.workload))
        manifest = self.manifest() if out else {}
        run = FleetRun(plan, clock, self.measurement, self.record, self.log_format, out, manifest)
        with ExitStack() as stack:
            recorder = stack.enter_context(self._writer(out)) if out else FleetRecorder(self.measurement)
            assert isinstance(recorder, FleetNotes)
            with self._source(out) as source, shown:
                cluster = run.cluster(source, recorder, stack, closed, self.seed)
                shown.begin(offered(trace))
                with settled_heap() if clock != "virtual" else nullcontext():
                    cluster.run(partial(_show, shown, source, cluster) if shown.shows else None)
            return run.close(recorder, {**trace.provenance.counts, **source.abandoned()})

    @cached_property
    def trace(self) -> Trace:
        return self.workload.load(self.seed)

    @property
    def measurement(self) -> Measurement:
        config = self.engine.config
        at_client = self.observed_at is not None
        return Measurement(config.max_num_seqs, config.num_blocks, self.slo, self.start_s, self.stop_s, at_client)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's. ConfigError if it has none."""
        if self.engine.path is None:
            raise ConfigError("text: expected a model with a tokenizer (model.path=… or model=smollm2), found none")
        return Tokenizer(self.engine.path, self.engine.executor.vocab_size)

    def _after_steps(
        self, source: Counted, shown: Quiet, between: Callable[[Engine], None] | None
    ) -> Callable[[Engine], None] | None:
        """What happens between steps: texts may end requests, and progress is shown; `between` alone if neither."""
        stop_strings = self._stop_strings()
        if stop_strings is None and not shown.shows:
            return between

        def after(engine: Engine) -> None:
            if stop_strings is not None:
                stop_strings(engine)
            shown.update(source, engine.now_ns, len(engine.ledger.waiting), len(engine.ledger.running))
            if between is not None:
                between(engine)

        return after

    def _stop_strings(self) -> StopStrings | None:
        """What ends live requests by their text, where any asks for it and tokens are made."""
        sampling = self.trace.sampling
        if sampling is None or not self.engine.executor.needs_inputs or (self.trace.output_tokens >= 0).all():
            return None
        return StopStrings(self.tokenizer) if any(decode_sampling(text).stop for text in sampling.names) else None

    def _source(self, out: Path | None) -> Counted:
        executor, trace = self.engine.executor, self.trace
        if getattr(self.workload, "measures", False) and self.engine.clock_name(self.clock) == "virtual":
            raise ConfigError(
                f"workload {self.workload.name}: expected a clock that measures, as the tokenizer's time is measured; "
                "found clock=virtual (with workload.measure_tokenizer=false, observed_at.preparation applies)"
            )
        source = self.workload.source(
            self.engine.config.max_model_len,
            self.slo,
            self.seed,
            vocab_size=executor.vocab_size if executor.needs_inputs else None,
            trace=trace,
        )
        if self.observed_at is not None:
            source = self.observed_at.around(source, self.seed)
        if out is None:
            return Counted(source, len(trace))
        text = partial(answer_text, self.tokenizer) if self.store_text else None
        return Logged(source, len(trace), out, text)

    def _writer(self, out: Path) -> RunWriter:
        manifest = self.manifest()
        writer = (RunWriter if self.fleet is None else FleetWriter)(
            out,
            self.measurement,
            record=self.record,
            log_format=self.log_format,
            config_hash=manifest["config_hash"],
        )
        write_manifest(out, manifest)
        return writer

    def manifest(self) -> dict[str, Any]:
        routed = {} if self.fleet is None else {"router": source_of(self.fleet.router)}
        return routed | describe_run(
            config=self.config,
            labels=self.labels,
            overrides=self.overrides,
            seeds={"seed": self.seed},
            policy=self.policy,
            predictor=self.predictor,
            workload=workload_facts(self.trace) | impatience(self.workload),
            engine=asdict(self.engine.config),
            clock=self.engine.clock_name(self.clock),
            cost=rates_of(self.engine.executor),
            kernels=getattr(self.engine.executor, "kernels", None),
        )


def impatience(workload: Workload) -> dict[str, Any]:
    """What a manifest says of clients that leave or try again; empty where there are none."""
    facts = workload.impatient().facts if isinstance(workload, Offered) else {}
    return {"patience": facts} if facts else {}


def _show(shown: Quiet, source: Counted, cluster: Cluster, now_ns: int) -> None:
    ledgers = [replica.engine.ledger for replica in cluster.replicas]
    shown.update(source, now_ns, sum(len(one.waiting) for one in ledgers), sum(len(one.running) for one in ledgers))


def check_window(measurement: Measurement, trace: Trace) -> None:
    """ConfigError if it is clear before a run that none of its requests will arrive in the measured window."""
    if not measurement.windowed or (trace.after is not None and (trace.after >= 0).any()):
        return  # when a turn that waits for another arrives is the run's to say
    if len(trace) and not np.any(measurement.inside(trace.arrival_ns)):
        first, last = trace.arrival_ns[0] / NS, trace.arrival_ns[-1] / NS
        raise ConfigError(
            f"measure: no request arrives {measurement.window}; those of {trace.name} do from {first:g} to {last:g} s"
        )
