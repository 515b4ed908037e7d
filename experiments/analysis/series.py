"""Curves of one run, as plots and Weights & Biases show them: distributions of requests, and steps over engine time.

Every definition of a latency is framework/results/metrics.py's. Seconds throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedlab.framework.request import NS
from schedlab.framework.results import metrics
from schedlab.framework.results.tables import Columns, RunTables

LATENCIES = {"ttft": metrics.ttft_ns, "tpot": metrics.tpot_ns, "e2e": metrics.e2e_ns, "queue": metrics.queue_ns}


def latencies(requests: Columns) -> dict[str, np.ndarray]:
    """float64 seconds of the requests that count, by latency name."""
    rows = measured_rows(requests)
    return {name: np.asarray(of(rows), dtype=np.float64) / NS for name, of in LATENCIES.items()}


def measured_rows(requests: Columns) -> np.ndarray:
    """metrics.MEASURED [N] of the requests table; SLO classes and clients, which no latency needs, stay unknown."""
    rows = np.full(len(requests["request_id"]), metrics.UNKNOWN, dtype=metrics.MEASURED)
    for name in metrics.MEASURED.names or ():
        seconds = name.removesuffix("_ns") + "_s"
        if name.endswith("_ns"):
            rows[name] = np.rint(np.nan_to_num(requests[seconds] * NS, nan=metrics.UNKNOWN))
        elif name in requests and name not in ("client", "slo", "status"):
            rows[name] = np.nan_to_num(np.asarray(requests[name], dtype=np.float64), nan=metrics.UNKNOWN)
    rows["status"] = [metrics.STATUSES.index(status) for status in requests["status"]]
    return rows


def cumulative(values: np.ndarray, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Values and the share of all that is at most as large, at `points` places at most."""
    if not len(values):
        return values, values
    ordered = np.sort(values)
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).round().astype(int))
    return ordered[kept], (kept + 1) / len(ordered)


def over_time(tables: RunTables, points: int) -> dict[str, np.ndarray]:
    """float64 [points]: means and rates per bin of an even grid of engine time, which is named by the end of each bin.

    A step counts for as long as it lasts. Between steps nothing runs, waits or owns blocks; cached blocks stay.
    """
    steps, num_blocks = tables.steps, tables.result["measurement"]["num_blocks"]
    if not len(steps["now_ns"]):
        return {}
    start, duration = steps["now_ns"].astype(np.float64), np.maximum(steps["duration_ns"], 1).astype(np.float64)
    until_next = np.append(np.diff(start), duration[-1])
    edges = np.linspace(start[0], start[-1] + duration[-1], points + 1)

    def mean(values: Any, lasting: np.ndarray = duration) -> np.ndarray:
        return bin_means(start, lasting, np.asarray(values, dtype=np.float64), edges)

    return {
        "engine/time_s": edges[1:] / NS,
        "queue/waiting": mean(steps["waiting"]),
        "queue/running": mean(steps["running"]),
        "kv/utilization": mean(1 - steps["free_blocks"] / num_blocks),
        "kv/cached_share": mean(steps["cached_blocks"] / num_blocks, until_next),
        "sched/prefill_tokens_per_s": mean(steps["prefill_tokens"] / duration) * NS,
        "sched/decode_tokens_per_s": mean(steps["decode_tokens"] / duration) * NS,
        "sched/batch_requests": mean(steps["prefill_requests"] + steps["decode_requests"]),
    }


def bin_means(start: np.ndarray, lasting: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean in each bin of a signal that is `values[i]` for `lasting[i]` from `start[i]` on, and 0 between."""
    times = np.column_stack([start, start + lasting]).ravel()
    total = np.cumsum(values * lasting)
    integral = np.column_stack([np.append(0.0, total[:-1]), total]).ravel()
    means: np.ndarray = np.diff(np.interp(edges, times, integral)) / np.diff(edges)
    return means
