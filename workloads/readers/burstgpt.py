"""BurstGPT csv, versions 1 to 3 (github.com/HPMLL/BurstGPT): lengths, arrivals in whole seconds, no prefix identity.

Rows without response tokens are recorded failures. Version 3 adds `Session ID` (blank on API rows) and `Elapsed time`,
the seconds a response took: the think time of a later turn is its distance from the turn before less that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Columns, build, finish, skip_failures, think_from_gaps
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, csv_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit"})
REQUIRED = ("Timestamp", "Request tokens", "Response tokens")
SESSION, ELAPSED = "Session ID", "Elapsed time"
KNOWN = (*REQUIRED, SESSION, ELAPSED, "Model", "Log Type", "Total tokens")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    unit = options.time_unit or "s"
    elapsed: list[np.ndarray] = []

    def columns(batch: Batch) -> Columns:
        out: dict[str, Any] = {
            "arrival_ns": batch.times("Timestamp", unit),
            "prompt_tokens": batch.counts("Request tokens"),
            "output_tokens": batch.counts("Response tokens"),
        }
        names = (("session", SESSION), ("model", "Model"), ("kind", "Log Type"))
        out |= {ours: batch.labels(theirs) for ours, theirs in names if batch.has(theirs)}
        if batch.has(ELAPSED):
            elapsed.append(batch.optional_times(ELAPSED, "s"))
        return out

    trace = build(path, "burstgpt", csv_batches(path, REQUIRED), columns, KNOWN).assuming(f"times in {unit}")
    if elapsed and trace.session is not None:
        trace = skip_failures(trace, options)
        trace = think_from_gaps(trace, np.concatenate(elapsed)[trace.source_row], options)
        trace = trace.assuming("think time of a turn: its distance from the turn before, less that one's elapsed time")
    return finish(trace, options)
