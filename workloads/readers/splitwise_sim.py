"""splitwise-sim csv (github.com/Mutinifni/splitwise-sim): arrival_timestamp in seconds, prompt_size, token_size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedlab.workloads.builder import Columns, build, finish
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, csv_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit"})
REQUIRED = ("arrival_timestamp", "prompt_size", "token_size")
KNOWN = (*REQUIRED, "request_id", "application_id")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    unit = options.time_unit or "s"

    def columns(batch: Batch) -> Columns:
        out: dict[str, Any] = {
            "arrival_ns": batch.times("arrival_timestamp", unit),
            "prompt_tokens": batch.counts("prompt_size"),
            "output_tokens": batch.counts("token_size"),
        }
        names = (("request_id", "request_id"), ("client", "application_id"))
        return out | {ours: batch.labels(theirs) for ours, theirs in names if batch.has(theirs)}

    trace = build(path, "splitwise_sim", csv_batches(path, REQUIRED), columns, KNOWN).assuming(f"times in {unit}")
    return finish(trace, options)
