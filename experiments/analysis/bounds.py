"""How far runs are from what no schedule could beat: the bounds of cost/bounds.py for runs on disk.

A run's demand and rates are read from its files. A measured run is bounded by the datasheet of the machine that its
configuration names: peaks, and no overheads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.derived import derived
from schedlab.experiments.engines import DTYPES, roofline_of
from schedlab.framework.cost.bounds import Bound, Demand, Prices, alone_first_ns, bounds, longest_shared, tight
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.windows import Window, layers_window
from schedlab.framework.request import NS
from schedlab.framework.results.packed import find
from schedlab.framework.results.tables import Columns, RunTables
from schedlab.workloads.options import WHOLE
from schedlab.workloads.readers import OFFERED, read
from schedlab.workloads.statistics import prefix_keys
from schedlab.workloads.trace import BlockIds, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from schedlab.experiments.analysis.table import Run

SHOWN = ("ttft/mean", "ttft/p99", "e2e/mean", "e2e/p99", "throughput/output_tokens_per_s")
TIGHT = 0.1


# ---- from files ----


def bounds_of(directory: str | Path, tables: RunTables) -> dict[str, Bound]:
    """Bounds of the finished run in `directory` by summary key; empty where its machine is not known.

    ConfigError for a run without logs or without what it was offered.
    """
    prices = prices_of(tables.manifest or {})
    if prices is None or tables.status != "finished":
        return {}
    requests = tables.requests
    demand = demand_of(requests, read(find(Path(directory), OFFERED), "offered", WHOLE), tables.manifest or {})
    inside = window_of(requests, tables.result["measurement"].get("window", {}))
    status = np.array(requests["status"])
    served = np.isin(status, ["finished", "length_capped"]) & inside
    first = (np.isin(status, ["finished", "length_capped", "aborted"])) & ~np.isnan(requests["first_token_s"]) & inside
    if not served.any():
        return {}
    emitted = requests["output_tokens"][inside]
    prompts = requests["prompt_tokens"][inside][emitted > 0]
    return bounds(
        demand.where(first), demand.where(served), prices, first_arrival_ns=float(demand.arrival_N[inside].min()),
        output_tokens=int(emitted.sum()), total_tokens=int(emitted.sum() + prompts.sum()),
    )  # fmt: skip


def alone_ttft_s(directory: str | Path, tables: RunTables) -> np.ndarray | None:
    """What the TTFT of each request would be at least, alone on the machine; None where that is not known."""
    manifest = tables.manifest or {}
    prices, path = prices_of(manifest), find(Path(directory), OFFERED)
    if prices is None or tables.result["record"] != "full" or not path.exists():
        return None
    demand = demand_of(tables.requests, read(path, "offered", WHOLE), manifest)
    around_N = demand.visible_N - demand.arrival_N + demand.delivery_N
    served_N = ~np.isnan(tables.requests["first_token_s"])
    return np.asarray((alone_first_ns(demand, prices) + around_N)[served_N]) / NS


def prices_of(manifest: Mapping[str, Any]) -> Prices | None:
    """Of the rates that the run was charged by, else of the datasheet; None for a run with neither."""
    limits = manifest.get("engine", {})
    rates = manifest.get("cost")
    found = Coefficients(**rates["coefficients"]) if rates else datasheet(manifest.get("config", {}))
    if found is None or not limits:
        return None
    return Prices(found, limits["max_num_batched_tokens"], limits["max_num_seqs"])


def datasheet(config: Mapping[str, Any]) -> Coefficients | None:
    """Peaks and bandwidths of the configured hardware without any loss, for a real engine that runs on it."""
    engine, hardware, model = (config.get(group) for group in ("engine", "hardware", "model"))
    if not (isinstance(engine, dict) and isinstance(hardware, dict) and isinstance(model, dict)):
        return None
    name = str(engine.get("_target_", "")).rpartition(".")[2]
    fits = name == "cuda" or (name == "cpu" and hardware.get("name") == "cpu")
    if not fits or engine.get("dtype") not in DTYPES or model.get("path"):
        return None
    return Coefficients.from_roofline(roofline_of(model, engine["dtype"]), lossless(hardware))


def lossless(keys: Mapping[str, Any]) -> Hardware:
    """The machine with every efficiency 1 and every overhead 0."""
    names = [f.name for f in fields(Hardware)]
    perfect = {name: 1.0 for name in names if name.endswith("_efficiency")}
    free = {name: 0.0 for name in names if name.endswith("_us")}
    return Hardware(**{name: keys[name] for name in names if name in keys} | perfect | free)


def demand_of(requests: Columns, offered: Trace, manifest: Mapping[str, Any]) -> Demand:
    """All requests of a run, in the order of its table."""
    assert offered.request_id is not None
    place = {name: row for row, name in enumerate(offered.request_id.tolist())}
    names = requests["request_id"]
    rows = np.array([place[name if name in place else name.rpartition("~")[0]] for name in names], dtype=np.int64)
    again = np.array([name not in place for name in names])  # an attempt at what may have been computed before
    caching = manifest.get("engine", {}).get("enable_prefix_caching", True)
    hits = np.where(again, requests["prompt_tokens"] - 1, shared_tokens(offered)[rows]) if caching else 0 * rows

    def ns(name: str) -> np.ndarray:
        return np.asarray(np.rint(requests[name] * NS))

    model = manifest.get("config", {}).get("model")
    return Demand(
        ns("arrival_s"), ns("visible_s"), ns("delivery_s"), requests["prompt_tokens"], requests["output_tokens"], hits,
        _model_window(model) if isinstance(model, dict) else None, bool((requests["preemptions"] > 0).any()),
    )  # fmt: skip


def _model_window(model: Mapping[str, Any]) -> Window:
    return layers_window(tuple(model.get("layer_windows") or (model.get("sliding_window"),)))


def shared_tokens(trace: Trace) -> np.ndarray:
    """Prompt tokens of each request that some other request of the trace could leave in the cache, int64 [N]; at most
    all but the last."""
    shared = np.zeros(len(trace), dtype=np.int64)
    for ids, scope in ((trace.ids, trace.scope), (trace.tokens, None)):
        if ids is not None:
            shared = np.maximum(shared, leading_shared(trace.with_columns(ids=ids, scope=scope), ids))
    if trace.grows is not None and trace.after is not None:
        grows = np.asarray(trace.grows, dtype=bool)
        shared = np.where(grows, trace.prompt_tokens - 1, shared)  # of its session's past, however long that was
    return np.asarray(np.minimum(shared, trace.prompt_tokens - 1))


def leading_shared(trace: Trace, ids: BlockIds) -> np.ndarray:
    row = np.repeat(np.arange(len(trace)), ids.counts)
    return longest_shared(prefix_keys(trace), row, ids.token_widths(trace.prompt_tokens), len(trace))


def window_of(requests: Columns, window: Mapping[str, Any]) -> np.ndarray:
    """bool [N]: arrived inside of the measured window."""
    arrival, start, stop = requests["arrival_s"], window.get("start_s"), window.get("stop_s")
    inside = np.ones(len(arrival), dtype=bool)
    if start is not None:
        inside &= arrival >= start
    if stop is not None:
        inside &= arrival < stop
    return inside


# ---- how they are told ----


@dataclass(frozen=True, slots=True)
class Tightness:
    """One metric of several runs of a variant: mean of their bounds, of the ratios of value to bound, and how many are
    within TIGHT of it."""

    metric: str
    bound: float
    ratio: float
    tight: int
    runs: int
    by: str
    weak: bool


def tightness(runs: Sequence[tuple[RunTables, Mapping[str, Bound]]], metrics: Sequence[str] = SHOWN) -> list[Tightness]:
    """For each metric that is bounded in any of `runs`."""
    found = []
    for metric in metrics:
        known = [(t.summary[metric], b[metric]) for t, b in runs if metric in b and t.summary[metric] is not None]
        if known:
            values, limits = [value for value, _ in known], [bound for _, bound in known]
            ratios = [value / bound.value for value, bound in known if bound.value]
            by = "/".join(sorted({bound.by for bound in limits}))
            found.append(
                Tightness(
                    metric, float(np.mean([bound.value for bound in limits])), float(np.mean(ratios)),
                    tight(values, limits, TIGHT), len(known), by, any(bound.weak for bound in limits),
                )
            )  # fmt: skip
    return found


def of_variants(variants: Mapping[str, Sequence[Run]]) -> dict[str, list[Tightness]]:
    """How near the replicates of each variant come to their bounds; runs without logs have none."""
    found = {}
    for name, runs in variants.items():
        logged = [run for run in runs if run.tables.result["record"] == "full"]
        logged = [run for run in logged if find(run.directory, OFFERED).exists()]
        bounded = [(run.tables, limits) for run in logged if (limits := _known(run))]
        if told := tightness(bounded):
            found[name] = told
    return found


def _known(run: Run) -> dict[str, Bound]:
    """Those of `bounds_of`, worked out once for each run."""
    told = derived(run.directory, "bounds", lambda: bounds_of(run.directory, run.tables))
    return {key: Bound(*limit) for key, limit in told.items()}


def as_json(bounds_by_variant: Mapping[str, Sequence[Tightness]]) -> dict[str, Any]:
    return {name: [asdict(found) for found in told] for name, told in bounds_by_variant.items()}


def draw_alone(axis: Axes, values_s: np.ndarray, scale: float = 1e3, whole: float = 1.0) -> None:
    """On a picture of a cumulative distribution: the bound of each request alone, which no curve can cross."""
    from schedlab.experiments.analysis.series import cumulative

    value, share = cumulative(values_s)
    label = "each request alone (bound)"
    axis.step(value * scale, share * whole, where="post", color="#999999", linestyle=":", label=label)


def draw_limit(axis: Axes, value: float, label: str) -> None:
    """A bound as a horizontal line."""
    axis.axhline(value, color="#999999", linestyle=":", label=label)
