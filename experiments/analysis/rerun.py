"""A run again from its own folder: the manifest's configuration, the requests that were offered, and named changes.

Nothing is kept on disk. What ran on a real engine is repeated on the virtual clock.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.experiments import engines
from schedlab.experiments.analysis.past_run import VLLM, PastRun
from schedlab.experiments.analysis.rebuild import put, rebuild
from schedlab.experiments.run.api import Experiment
from schedlab.framework.engine import EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.tables import RunTables
from schedlab.workloads.replicate import leaders
from schedlab.workloads.trace import Trace

VIRTUAL = "schedlab.experiments.engines.virtual"
ON_CPU = "schedlab.experiments.engines.cpu"
TAKEN = {*signature(engines.virtual).parameters, *(f.name for f in fields(EngineConfig))} - {"limits"}
"""Keys of an engine that the virtual one takes."""


@dataclass(frozen=True)
class Changes:
    """`keys`: dotted keys of the configuration with their new values; `replicas`: engines that share the requests.

    Of several replicas one is run, with every so many-th session or request.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1


def repeatable(config: Mapping[str, Any]) -> bool:
    """Whether a manifest's configuration names what to build: a run from Python keeps no more than names of it."""
    return isinstance(config.get("policy"), Mapping)


def rerun(
    directory: Path, manifest: Mapping[str, Any] | None, changes: Changes | None = None, *, trust: bool = False
) -> RunTables:
    """What the run in `directory` leaves with `changes`, its manifest too.

    ConfigError if the folder does not say how to repeat it.
    """
    experiment = experiment_again(directory, manifest, changes or Changes(), trust=trust)
    tables = experiment.run()
    tables.manifest = experiment.manifest()
    return tables


def experiment_again(
    directory: Path, manifest: Mapping[str, Any] | None, changes: Changes, *, trust: bool = False
) -> Experiment:
    """What would run again."""
    told = (manifest or {}).get("config", {})
    if not repeatable(told):
        raise ConfigError(f"{directory}: its manifest, of a run from Python, does not say how to build it")
    assert manifest is not None
    config = copy.deepcopy({**told, "engine": virtual_engine(manifest, manifest["engine"])})
    for key, value in changes.keys.items():
        put(config, key, value)
    past = PastRun(directory)
    offered = past.workload

    def part(place: str) -> Any:
        node = config.get(place)
        return rebuild(node, place, trust=trust) if isinstance(node, Mapping) and "_target_" in node else None

    return Experiment(
        policy=part("policy"),
        workload=replace(offered, trace=share_of(offered.trace, changes.replicas)),
        engine=part("engine"),
        seed=past.seed,
        slo=part("slo"),
        predictor=part("predictor"),
        admission=part("admission"),
        start_s=config["measure"].get("start_s"),
        stop_s=config["measure"].get("stop_s"),
        config=config,
    )


def share_of(trace: Trace, replicas: int) -> Trace:
    """What one of `replicas` engines gets: every so many-th session or request outside of sessions."""
    leader = np.unique(leaders(trace), return_inverse=True)[1]
    return trace.where(leader % replicas == 0, "of_other_replicas")


def virtual_engine(manifest: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's node for the virtual clock, with the limits that the run had and the keys that it takes.

    `dtype=auto`, the checkpoint's own, is what the virtual clock takes without one.
    """
    config = manifest["config"]
    engine = dict(config["engine"])
    if engine["_target_"] == VIRTUAL:
        return engine
    kept = {key: value for key, value in engine.items() if key in TAKEN}
    held = {"weight_dtype": engines.cost_dtype(engine["dtype"])} if engine.get("dtype", "auto") != "auto" else {}
    hardware = machine_node(manifest)
    return {**kept, **held, **limits, "_target_": VIRTUAL, "model": config["model"], "hardware": hardware}


def machine_node(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The machine of a run: `cpu` for engine=cpu, and for vLLM, which is taken to run on one unless one was named."""
    from schedlab.experiments.run.compose import preset

    config, engine = manifest["config"], manifest["config"]["engine"]["_target_"]
    named = any(key.partition(".")[0] == "hardware" for key in manifest.get("overrides", {}))
    node: Mapping[str, Any] = config["hardware"]
    return preset("hardware", "cpu") if engine == ON_CPU or (engine == VLLM and not named) else node
