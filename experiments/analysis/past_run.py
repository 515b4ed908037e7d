"""A finished run and the parts to execute it again, from its own folder.

What was offered comes from the workload's log, the parts from the manifest. Modelled runs are modelled again, by the
rates that the manifest keeps. Measured ones are decided again at their logged times: no model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments.analysis.decisions import LoggedEnds
from schedlab.experiments.analysis.rebuild import find, rebuild
from schedlab.experiments.engines import CLOCKS, EngineSetup
from schedlab.experiments.sweep.replicates import plain_knobs
from schedlab.framework.admission import Admission
from schedlab.framework.attempts import TIMED_OUT
from schedlab.framework.batch import Batch
from schedlab.framework.clock import Clock, RecordedClock
from schedlab.framework.cost.expand import boundaries
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import Executor, StepResult
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import NS, EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.tables import RunTables
from schedlab.framework.source import Source
from schedlab.workloads.options import WHOLE
from schedlab.workloads.patience import Clients
from schedlab.workloads.readers import OFFERED, read
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import Offered

MODELLED = ("virtual", "stub")
VLLM = "schedlab.experiments.vllm_engine.vllm"


class NullExecutor:
    """An executor of runs whose times are known: it computes nothing, and no tokens."""

    needs_inputs = False
    chains = True
    vocab_size = 1
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, block_bytes: Callable[[int], int]) -> None:
        self.block_bytes = block_bytes

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        pass

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        raise AssertionError("nothing asks for tokens that nobody computes")

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(0)


@dataclass(kw_only=True)
class Offers(Offered):
    """What a run was offered, as a workload; `clients` are those that sent it."""

    trace: Trace
    name: str = "offered"
    clients: Clients = field(default_factory=Clients)

    def impatient(self) -> Clients:
        return self.clients

    def load(self, seed: int = 0) -> Trace:
        return self.trace


def _last_attempt(row_of: Mapping[str, int], name: str) -> int:
    """The row in which a client's last attempt at request `name` ended."""
    number = 0
    while (later := f"{name}~{number + 1}") in row_of:
        name, number = later, number + 1
    return row_of[name]


@dataclass(frozen=True)
class PastRun:
    """A finished run and the parts to execute it again. ConfigError where its folder does not say what they were, and
    for parts that are not schedlab's or a plug-in's, unless these are trusted.
    """

    directory: Path
    trust: bool = False

    @cached_property
    def tables(self) -> RunTables:
        tables = read_run(self.directory)
        if tables.status != "finished":
            raise ConfigError(f"{self.directory}: the run is {tables.status}; only a finished run is executed again")
        if tables.manifest is None:
            raise ConfigError(f"{self.directory}: no manifest.json, which says what the run was made of")
        if tables.manifest.get("labels", {}).get("pool") == "decode":
            raise ConfigError(
                f"{self.directory}: a decode replica, whose prompts other replicas computed; run the fleet again"
            )
        return tables

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.tables.manifest or {}

    @property
    def limits(self) -> EngineConfig:
        return EngineConfig(**self.manifest["engine"])

    @property
    def modelled(self) -> bool:
        """Whether its durations can be had again, for they were computed."""
        return self.engine_name in MODELLED and self.part("engine") is not None

    @property
    def engine_name(self) -> str:
        target = str((self.part("engine") or {}).get("_target_", ""))
        return target.rpartition(".")[2] or str(self.manifest["labels"].get("engine"))

    @cached_property
    def workload(self) -> Offers:
        path = packed.find(self.directory, OFFERED)
        if not path.exists():
            raise ConfigError(f"{path}: not there; a run is executed again from what it was offered")
        told = self.manifest["workload"]
        clients = Clients.told_by(told.get("patience"))
        trace = self._with_endings(read(path, "offered", WHOLE), tried_again=bool(clients.facts))
        origin = {key: told[key] for key in ("path", "format", "sha256", "counts")}
        provenance = replace(trace.provenance, **origin, assumed=tuple(told["assumed"]))
        return Offers(trace=trace.with_columns(provenance=provenance), name=str(told["name"]), clients=clients)

    @property
    def seed(self) -> int:
        return int(self.manifest["labels"].get("seed", 0))

    def _with_endings(self, trace: Trace, tried_again: bool) -> Trace:
        """Live requests with the lengths that they came to, and withdrawn ones with the time at which they were. Where
        clients leave and may have `tried_again`, it is the last attempt that came to an end."""
        ended = self.tables.requests
        row_of = {name: row for row, name in enumerate(ended["request_id"])}
        assert trace.request_id is not None
        names = [name for name in trace.request_id.tolist() if name is not None]
        first = np.array([row_of[name] for name in names])
        rows = np.array([_last_attempt(row_of, name) for name in names]) if tried_again else first
        output = np.where(trace.output_tokens < 0, ended["output_tokens"][rows], trace.output_tokens)
        aborted = np.array([status == "aborted" for status in ended["status"]])[rows]
        output = np.where((trace.output_tokens < 0) & ((output < 1) | aborted), -1, output)
        if tried_again:
            aborted &= np.array([reason != TIMED_OUT for reason in ended["reason"]])[rows]
        if not aborted.any():
            return trace.with_columns(output_tokens=output)
        known = np.full(len(trace), -1) if trace.abort_ns is None else trace.abort_ns
        since = np.rint((ended["finished_s"][rows] - ended["arrival_s"][first]) * NS)
        unknown = aborted & (known < 0)
        abort = np.where(unknown, np.where(unknown, since, 0).astype(np.int64), known)
        return trace.with_columns(output_tokens=output, abort_ns=abort)

    # -- parts --

    def part(self, group: str) -> dict[str, Any] | None:
        """The configuration of a part of the run, where it names a class."""
        node = self.manifest["config"].get(group)
        return node if isinstance(node, dict) and "_target_" in node else None

    def make_policy(self) -> Policy:
        """As it was before the run."""
        node = self.part("policy")
        try:
            made: Policy = self._made(self._node_of_knobs() if node is None else node, "policy")
        except ConfigError as error:
            raise ConfigError(f"{self.directory}: {error}; from Python, call replay with a policy") from error
        return made

    def _node_of_knobs(self) -> dict[str, Any]:
        """The configuration of a policy that was given as an object: a function is named by its path."""
        told = self.manifest["policy"]
        cls = find(told["class"], "policy", trust=self.trust)
        node: dict[str, Any] = {"_target_": told["class"]}
        for name, value in plain_knobs(self.manifest).items():
            function = isinstance(value, str) and callable(getattr(cls, name, None))
            node[name] = {"_target_": value, "_partial_": True} if function else value
        return node

    def _made(self, node: Mapping[str, Any], place: str) -> Any:
        return rebuild(node, place, trust=self.trust)

    def make_admission(self) -> Admission | None:
        node = self.part("admission")
        return None if node is None else self._made(node, "admission")

    def make_predictor(self) -> Predictor | None:
        node = self.part("predictor")
        return None if node is None else self._made(node, "predictor")

    def make_setup(self) -> EngineSetup:
        """The engine that it ran on, under the same limits and with the same modelled rates."""
        node = self.part("engine")
        if node is None:
            raise ConfigError(f"{self.directory}: was run from Python, its engine is not in the files")
        if node["_target_"] == VLLM and not self.trust:
            raise ConfigError(
                f"{self.directory}: ran inside vLLM, by engine.python={node.get('python')}, which the folder names; "
                "--trust runs it there again"
            )
        rates = self.manifest.get("cost")
        changes = {**self.manifest["engine"], **({"profile": None} if rates else {})}
        setup: EngineSetup = self._made({**node, **changes}, "engine")
        if rates and isinstance(setup.executor, CostExecutor):
            setup.executor.use_rates(rates)
        return setup

    def _stamps(self) -> tuple[list[int], list[int]]:
        """Start and duration of each boundary. A chain of a measured run is one row of the log."""
        steps = self.tables.steps
        if self.manifest.get("cost") is None:
            return steps["now_ns"].tolist(), steps["duration_ns"].tolist()
        row, ends = boundaries(self.tables, np.arange(len(steps["now_ns"])), exact=True)
        begins = np.append(True, row[1:] != row[:-1])[: len(row)]
        starts = np.where(begins, steps["now_ns"][row], np.roll(ends, 1))
        return starts.tolist(), (ends - starts).tolist()

    def _block_bytes(self, block_size: int) -> int:
        """Of the executor that was measured; asked for where there is a host pool."""
        return int(self.make_setup().executor.block_bytes(block_size))

    def again(
        self, policy: Policy | None = None, recorder: Recorder | None = None, *, every_step: bool = False
    ) -> Engine:
        """An engine that will decide the same. `every_step`: the policy is asked at every step, whatever it holds."""
        config = replace(self.limits, fast_forward=False, honour_holds=False) if every_step else self.limits
        source: Source = self.workload.source(config.max_model_len, seed=self.seed)
        executor: Executor
        clock: Clock
        if self.modelled:
            setup = self.make_setup()
            executor, clock = setup.executor, CLOCKS["virtual"]()
            if executor.needs_inputs:
                source = self.workload.source(config.max_model_len, seed=self.seed, vocab_size=executor.vocab_size)
        else:
            clock = RecordedClock(*self._stamps())
            executor = NullExecutor(self._block_bytes if config.swap_space_gib else lambda block_size: block_size)
            source = LoggedEnds(source, self.tables.requests)
        told = recorder or Recorder(Measurement(config.max_num_seqs, config.num_blocks))
        policy, told_of = policy or self.make_policy(), (self.make_predictor(), self.make_admission())
        return Engine(policy, executor, source, config, clock, told, *told_of)
