"""Curves of one run, as plots and Weights & Biases show them: distributions of requests, and steps over engine time.

Knows the columns of a run's tables; takes every definition of a latency from framework/metrics.py. Seconds throughout.
"""

from __future__ import annotations

import numpy as np

from schedlab.framework import metrics
from schedlab.framework.request import NS
from schedlab.framework.tables import Columns

LATENCIES = {"ttft": metrics.ttft_ns, "tpot": metrics.tpot_ns, "e2e": metrics.e2e_ns, "queue": metrics.queue_ns}


def latencies(requests: Columns) -> dict[str, np.ndarray]:
    """float64 seconds of the requests that count, by latency name."""
    rows = measured_rows(requests)
    return {name: np.asarray(of(rows), dtype=np.float64) / NS for name, of in LATENCIES.items()}


def measured_rows(requests: Columns) -> np.ndarray:
    """metrics.MEASURED [N] of the requests table; SLO classes and clients, which no latency needs, stay unknown."""
    rows = np.full(len(requests["request_id"]), metrics.UNKNOWN, dtype=metrics.MEASURED)
    for name in metrics.MEASURED.names or ():
        if name in requests and name not in ("client", "slo", "status"):
            rows[name] = np.nan_to_num(np.asarray(requests[name], dtype=np.float64), nan=metrics.UNKNOWN)
        elif (seconds := name.replace("_ns", "_s")) in requests and seconds != name:
            rows[name] = np.rint(np.nan_to_num(requests[seconds] * NS, nan=metrics.UNKNOWN))
    rows["status"] = [metrics.STATUSES.index(status) for status in requests["status"]]
    return rows


def cumulative(values: np.ndarray, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Values and the share of all that is at most as large, at `points` places at most."""
    if not len(values):
        return values, values
    ordered = np.sort(values)
    kept = np.unique(np.linspace(0, len(ordered) - 1, min(points, len(ordered))).round().astype(int))
    return ordered[kept], (kept + 1) / len(ordered)


def over_time(steps: Columns, num_blocks: int, points: int) -> dict[str, np.ndarray]:
    """Means and rates per bin of an even grid of engine time; bins in which no step began are left out.

    Occupancies are weighted by the duration of the steps that begin in the bin; rates are tokens a second of the bin.
    """
    if not len(steps["now_ns"]):
        return {}
    start, stop = int(steps["now_ns"][0]), int(steps["now_ns"][-1] + steps["duration_ns"][-1])
    width = max((stop - start) / points, 1.0)
    place = np.minimum(((steps["now_ns"] - start) / width).astype(int), points - 1)
    weight = np.bincount(place, steps["duration_ns"], points)
    used = weight > 0

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, values * steps["duration_ns"], points)[used] / weight[used]

    def rate(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, values, points)[used] / (width / NS)

    return {
        "engine/time_s": (start + (np.flatnonzero(used) + 1) * width) / NS,
        "queue/waiting": mean(steps["waiting"]),
        "queue/running": mean(steps["running"]),
        "kv/utilization": 1 - mean(steps["free_blocks"]) / num_blocks,
        "kv/cached_share": mean(steps["cached_blocks"]) / num_blocks,
        "sched/prefill_tokens_per_s": rate(steps["prefill_tokens"]),
        "sched/decode_tokens_per_s": rate(steps["decode_tokens"]),
        "sched/batch_tokens": mean(tokens_per_step(steps)),
        "sched/batch_requests": mean(steps["prefill_requests"] + steps["decode_requests"]),
    }


def tokens_per_step(steps: Columns) -> np.ndarray:
    return np.asarray(steps["prefill_tokens"] + steps["decode_tokens"])


def decode_gaps(steps: Columns) -> tuple[np.ndarray, np.ndarray]:
    """When each decode step ended, and how long after the one before: what every stream that decodes in both feels."""
    decoding = steps["decode_requests"] > 0
    end = (steps["now_ns"] + steps["duration_ns"])[decoding]
    repeat = steps["repeat"][decoding]
    gaps = np.diff(end, prepend=end[:1])
    return end[1:] / NS, (gaps / repeat)[1:] / NS
