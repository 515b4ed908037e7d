"""vidur csv (github.com/microsoft/vidur): arrived_at in seconds, num_prefill_tokens, num_decode_tokens.

Its length files have no arrivals: they load as lengths, to be combined with an arrival process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedlab.workloads.builder import Columns, build, finish
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, csv_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit"})
REQUIRED = ("num_prefill_tokens", "num_decode_tokens")
KNOWN = (*REQUIRED, "arrived_at", "num_total_tokens", "pd_ratio")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    unit = options.time_unit or "s"

    def columns(batch: Batch) -> Columns:
        out = {
            "prompt_tokens": batch.counts("num_prefill_tokens"),
            "output_tokens": batch.counts("num_decode_tokens"),
        }
        return out | {"arrival_ns": batch.times("arrived_at", unit)} if batch.has("arrived_at") else out

    trace = build(path, "vidur", csv_batches(path, REQUIRED), columns, KNOWN)
    trace = trace.assuming(f"times in {unit}" if trace.stamped is None else "lengths only, no arrival times")
    return finish(trace, options)
