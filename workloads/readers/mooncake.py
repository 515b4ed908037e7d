"""Mooncake jsonl (github.com/kvcache-ai/Mooncake, FAST'25) and its extensions by aiperf and dynamo.

Every row is a whole prompt: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, ceil(input_length / 512)
ids of 512 tokens. Rows of one `session_id` are its turns; a turn with `delay` (ms) starts so long after the end of the
one before, and needs no stamp. `arrival_ns` and `think_ns`, where present, are the exact values behind the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, check_id_counts, finish
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope"})
BLOCK_SIZE = 512
REQUIRED = ("input_length", "output_length")
KNOWN = frozenset({*REQUIRED, "timestamp", "hash_ids", "session_id", "delay", "arrival_ns", "think_ns"})


def matches(record: Mapping[str, Any]) -> bool:
    has_ids = type(record.get("hash_ids")) is list
    return has_ids and record.keys() >= {*REQUIRED, "timestamp"} and "chat_id" not in record


def read(path: Path, options: ReadOptions) -> Trace:
    unit, width = options.time_unit or "ms", options.block_size or BLOCK_SIZE
    builder, ignored, has_ids = Builder(), set[str](), False
    for batch in json_batches(path, REQUIRED):
        ignored |= batch.keys - KNOWN
        has_ids |= batch.has("hash_ids")
        add_rows(builder, batch, unit, width)
    trace = builder.trace(path, "mooncake", width)
    trace = trace.assuming(f"times in {unit}", "every row's input_length is the whole prompt")
    if has_ids:
        trace = scoped(trace, options.hash_scope or "global").assuming(f"block ids stand for {width} tokens")
    if ignored:
        trace = trace.assuming(f"ignored keys: {', '.join(sorted(ignored))}")
    return finish(trace, options)


def add_rows(builder: Builder, batch: Batch, unit: str, width: int) -> None:
    prompt = batch.counts("input_length")
    if batch.has("hash_ids"):
        counts = builder.add_ids(batch, batch.column("hash_ids"))
        check_id_counts(batch, counts, prompt, width, floor=False)
    columns: dict[str, Any] = {"arrival_ns": exact_times(batch, "arrival_ns", "timestamp", unit)}
    if (columns["arrival_ns"] < 0).any():
        columns["stamped"] = columns["arrival_ns"] >= 0
    if batch.has("session_id"):
        columns["session"] = batch.labels("session_id")
        columns["think_ns"] = exact_times(batch, "think_ns", "delay", unit)
    output = batch.counts("output_length")
    builder.add(len(batch), source_row=batch.rows(), prompt_tokens=prompt, output_tokens=output, **columns)


def exact_times(batch: Batch, exact: str, rounded: str, unit: str) -> np.ndarray:
    """ns: the exact key where a row has it, else the rounded one, else -1."""
    times = batch.optional_times(rounded, unit)
    if not batch.has(exact):
        return times
    precise = batch.optional_times(exact, "ns")
    return np.where(precise >= 0, precise, times)


def scoped(trace: Trace, scope: str) -> Trace:
    """With the namespace that block ids mean something in: the session's, or none."""
    return trace.with_columns(scope=trace.session) if scope == "session" else trace
