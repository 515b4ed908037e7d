"""What every step of a run computed, from its logs: FLOPs and bytes beside the time it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from schedlab.experiments.analysis.history import Histories, histories
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.windows import Window, seen_at_most
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables


@dataclass(frozen=True)
class StepWork:
    """float64 [R] of the rows of the steps table that computed, one step of each: FLOPs, bytes and seconds.

    `prompts`, `streams`: bool [R], which of them prefill and which decode.
    """

    flops: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray
    prompts: np.ndarray
    streams: np.ndarray


def works(run: RunTables, past: Histories, window: Window = None) -> list[Work]:
    """Of the first step of each row. Under a sliding `window` the decodes' keys are those of a window each."""
    steps = run.steps
    grants: list[list[Work]] = [[] for _ in steps["index"]]
    context = steps["context_tokens"].copy()
    for history in past.requests:
        for phase in history.phases:
            for row, start, tokens, emits in phase.grants:
                grants[row].append(Work.prefill(start, tokens, emits, window))
                context[row] -= start + tokens
    decodes = steps["decode_requests"].tolist()
    context = seen_at_most(context, steps["decode_requests"], window)
    return [
        Work.total(granted) + Work(n, n, n, decode_keys=keys)
        for granted, n, keys in zip(grants, decodes, context.tolist(), strict=True)
    ]


def step_work(run: RunTables, roofline: Roofline) -> StepWork:
    """FLOPs and bytes by `roofline`, seconds by the log."""
    steps = run.steps
    totals = []
    for work in works(run, histories(run), roofline.window):
        parts = [part for part in roofline.parts(work) if part.route == "memory"]
        totals.append((sum(part.flops for part in parts), sum(part.bytes for part in parts)))
    flops, moved = np.array(totals, dtype=np.float64).reshape(-1, 2).T
    seconds = steps["duration_ns"] / steps["repeat"] / NS
    ran = (moved > 0) & (seconds > 0)
    prompts, streams = steps["prefill_tokens"] > 0, steps["decode_tokens"] > 0
    return StepWork(flops[ran], moved[ran], seconds[ran], prompts[ran], streams[ran])


def time_shares(run: RunTables, past: Histories, window: Window = None) -> dict[str, float]:
    """Shares of the time of the measured steps that were spent on computing, on memory, and on neither (`overhead`).

    By the rates of the run's manifest; copies of blocks are part of the overhead. Empty for a run without rates.
    """
    rates, steps = (run.manifest or {}).get("cost"), run.steps
    bounds = run.result["measurement"]["window"]
    now_s, stop = steps["now_ns"] / NS, bounds["stop_s"]
    inside = (now_s >= (bounds["start_s"] or 0.0)) & (now_s < (np.inf if stop is None else stop))
    total = float(steps["duration_ns"][inside].sum())
    if rates is None or not total:
        return {}
    explained = Coefficients(**rates["explained"])
    spent = {"compute": 0.0, "memory": 0.0}
    for work, repeat, counts in zip(works(run, past, window), steps["repeat"].tolist(), inside, strict=True):
        if counts:
            compute, memory, _ = explained.shares_ns(*(getattr(work, f.name) for f in fields(work)))
            spent["compute"] += compute * repeat
            spent["memory"] += memory * repeat
    if window is None:  # the contexts of a row grow from step to step
        keys = (steps["repeat"] * (steps["repeat"] - 1) // 2 * steps["decode_requests"])[inside].sum()
        spent["compute" if explained.decode_computes else "memory"] += explained.decode_key_ns * float(keys)
    return {name: ns / total for name, ns in spent.items()} | {"overhead": 1 - sum(spent.values()) / total}


def machine_of(manifest: Mapping[str, Any]) -> tuple[Roofline, Hardware] | None:
    """The model and the machine that a manifest names; None for an engine that computes no model."""
    from schedlab.experiments.analysis.rebuild import rebuild
    from schedlab.experiments.analysis.rerun import repeatable, virtual_engine
    from schedlab.experiments.engines import DTYPES, MODEL_EXTRAS
    from schedlab.framework.model.config import ModelConfig

    config = manifest.get("config", {})
    if not repeatable(config) or config["engine"]["_target_"].rpartition(".")[2] not in ("virtual", "cpu", "cuda"):
        return None
    engine = virtual_engine(manifest, {})
    shape = ModelConfig.from_mapping({k: v for k, v in engine["model"].items() if k not in MODEL_EXTRAS})
    machine: Hardware = rebuild({**engine["hardware"]}, "hardware")
    held = DTYPES.get(str(config["engine"].get("dtype")), "bf16")  # by a real engine: its keys and values, and weights
    weights = engine["model"].get("weight_dtype") or engine.get("weight_dtype") or held
    parallel = (engine.get(name, 1) for name in ("tensor_parallel", "expert_parallel"))
    return Roofline(shape, weights, engine.get("kv_cache_dtype", held), *parallel), machine
