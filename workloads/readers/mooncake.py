"""Mooncake jsonl (github.com/kvcache-ai/Mooncake, FAST'25) and its extensions by aiperf and dynamo.

Every row is a whole prompt: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, ceil(input_length / 512)
ids of 512 tokens. Rows of one `session_id` are its turns; a turn with `delay` (ms) starts so long after the end of the
one before, and needs no stamp. Files that we write say more: `arrival_ns` and `think_ns`, the exact values behind these
times, and `block_size` where ids are not 512 tokens wide.
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
from schedlab.workloads.values import integers

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope"})
BLOCK_SIZE = 512
REQUIRED = ("input_length", "output_length")
KNOWN = frozenset({*REQUIRED, "timestamp", "hash_ids", "session_id", "delay", "arrival_ns", "think_ns", "block_size"})


def matches(record: Mapping[str, Any]) -> bool:
    ours = record.keys() >= {*REQUIRED, "timestamp"} and "chat_id" not in record
    return ours and (type(record.get("hash_ids")) is list or "arrival_ns" in record)


def read(path: Path, options: ReadOptions) -> Trace:
    unit, width = options.time_unit or "ms", options.block_size
    builder, ignored, has_ids = Builder(), set[str](), False
    for batch in json_batches(path, REQUIRED):
        ignored |= batch.keys - KNOWN
        has_ids |= batch.has("hash_ids")
        width = width_of(batch, width) or BLOCK_SIZE
        add_rows(builder, batch, unit, width)
    trace = builder.trace(path, "mooncake", width or BLOCK_SIZE)
    trace = trace.assuming(f"times in {unit}", "every row's input_length is the whole prompt")
    if has_ids:
        trace = scoped(trace, options.hash_scope or "global").assuming(f"block ids stand for {width} tokens")
    if ignored:
        trace = trace.assuming(f"ignored keys: {', '.join(sorted(ignored))}")
    return finish(trace, options)


def width_of(batch: Batch, width: int | None) -> int | None:
    """Tokens of an id: what the rows say, which must agree with each other and with `width`, else `width`."""
    if not batch.has("block_size"):
        return width
    for row, said in enumerate(batch.parse("block_size", lambda v: integers(v, low=1)).tolist()):
        width = said if width is None and said > 0 else width
        if said > 0 and said != width:
            raise batch.fault(row, f"block_size is {said}, expected {width} as in the rows above or as configured")
    return width


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
