"""A run under the names that `vllm bench serve` writes, for tools that read them.
Definitions are those of metrics.py: latencies run from the intended arrival, and ITL comes from a histogram at 1 us.
Times are milliseconds where the name says so; what is unknown is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from schedlab.framework.results import metrics
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.metrics import GAP_NS, PERCENTILES, Measured, Summary

NS_PER_MS = 1_000_000


DEFINITIONS = {
    "duration": "from the first intended arrival to the last token of any request",
    "totals and rates": "of completed requests",
    "ttft": "of completed and length-capped requests, and of aborted ones that had a first token",
    "tpot, e2el": "of completed and length-capped requests",
    "itl": "every gap after a first token, whatever became of its request",
}
"""Which requests enter a figure: `vllm bench serve` takes the completed ones throughout."""


def vllm_bench(run: Measured, summary: Summary) -> dict[str, Any]:
    """Content of vllm_bench.json. Totals are over completed requests, as there, and rates are these totals a second."""
    finished = metrics.with_status(run.requests, "finished")
    completed, seconds = int(finished.sum()), summary["makespan_s"]
    prompt, output = (int(run.requests[name][finished].sum()) for name in ("prompt_tokens", "output_tokens"))
    return {
        "definitions": DEFINITIONS,
        "duration": seconds,
        "completed": completed,
        "failed": len(run.requests) - completed,
        "num_prompts": summary["requests/offered"],
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": summary["throughput/requests_per_s"],
        "request_goodput": summary["goodput/requests_per_s"],
        "output_throughput": metrics.per(output, seconds),
        "total_token_throughput": metrics.per(prompt + output, seconds),
        **_latency("ttft", metrics.ttft_ns(run.requests)),
        **_latency("tpot", metrics.tpot_ns(run.requests)),
        **_gaps(run.gaps_us),
        **_latency("e2el", metrics.e2e_ns(run.requests)),
    }


def _latency(name: str, values_ns: np.ndarray) -> dict[str, float | None]:
    if not len(values_ns):
        return _named(name, None, None, None, [None] * len(PERCENTILES))
    values_ms = values_ns / NS_PER_MS
    percentiles = [float(v) for v in np.percentile(values_ms, PERCENTILES)]
    return _named(name, float(values_ms.mean()), float(np.median(values_ms)), float(values_ms.std()), percentiles)


def _gaps(gaps_us: Histogram) -> dict[str, float | None]:
    scale = GAP_NS / NS_PER_MS
    values = [gaps_us.mean(), gaps_us.std(), *gaps_us.percentiles((50, *PERCENTILES))]
    mean, std, median, *percentiles = [None if v is None else v * scale for v in values]
    return _named("itl", mean, median, std, percentiles)


def _named(
    name: str, mean: float | None, median: float | None, std: float | None, percentiles: Sequence[float | None]
) -> dict[str, float | None]:
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": median,
        f"std_{name}_ms": std,
        **{f"p{p}_{name}_ms": v for p, v in zip(PERCENTILES, percentiles, strict=True)},
    }
