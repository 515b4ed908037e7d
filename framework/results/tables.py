"""The three tables of a run: which columns they have, in which units, as JSON lines and as arrays.

Times named `_ns` are integer nanoseconds on the engine's clock, times named `_s` are seconds of the same clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from schedlab.framework.request import NS

Columns = dict[str, Any]
"""Columns by name: int64 or float64 arrays (a missing number is NaN), lists for text and nested values."""
RawColumns = dict[str, list[Any]]
"""Columns by name as plain Python values."""
Schema = Mapping[str, str]
"""Column name to kind: int, real, text, json or time (ns in a buffer, seconds in a table); `?` if it may be null."""
Flat = list[Any]
"""Rows end to end, in column order: cheaper to collect than a list of rows."""

REQUESTS: Schema = {
    "request_id": "text",
    "source_row": "int?",
    "client": "text",
    "session": "text?",
    "priority": "int",
    "deadline_s": "time?",
    "slo": "text?",
    "max_tokens": "int?",
    "arrival_s": "time",
    "visible_s": "time",
    "first_scheduled_s": "time?",
    "first_token_s": "time?",
    "finished_s": "time?",
    "delivery_s": "time",
    "prompt_tokens": "int",
    "output_tokens": "int",
    "cached_tokens": "int?",
    "resumed_tokens": "int",
    "preemptions": "int",
    "swaps": "int",
    "recomputed_tokens": "int",
    "status": "text",
    "reason": "text?",
}
STEPS: Schema = {
    "index": "int",
    "repeat": "int",
    "now_ns": "int",
    "duration_ns": "int",
    "prefill_tokens": "int",
    "decode_tokens": "int",
    "prefill_requests": "int",
    "decode_requests": "int",
    "context_tokens": "int",
    "running": "int",
    "waiting": "int",
    "free_blocks": "int",
    "cached_blocks": "int",
    "copied_blocks": "int",
    "bound": "text?",
    "scheduler_us": "real?",
    "device_us": "real?",
}
DECISIONS: Schema = {
    "index": "int",
    "repeat": "int",
    "now_ns": "int",
    "preempted": "json",
    "grants": "json",
    "decodes": "json",
    "decodes_at": "int",
    "starts": "json",
    "refusals": "json",
    "idle_until_s": "time?",
    "rejected": "json",
}
SPARSE: Mapping[str, list[Any]] = {"rejected": []}
"""Columns that rows leave out where there is nothing to say, and what that means."""
SCHEMAS: Mapping[str, Schema] = {"requests": REQUESTS, "steps": STEPS, "decisions": DECISIONS}


def split(schema: Schema, flat: Flat) -> RawColumns:
    width = len(schema)
    return {name: flat[i::width] for i, name in enumerate(schema)}


def to_columns(schema: Schema, flat: Flat) -> RawColumns:
    """Columns of `flat`, times as seconds."""
    columns = split(schema, flat)
    for name, kind in schema.items():
        if kind.startswith("time"):
            columns[name] = [None if ns is None else ns / NS for ns in columns[name]]
    return columns


def integers(values: Collection[int]) -> np.ndarray:
    """int64 array of Python integers, for which numpy need not look at each to find their type."""
    return np.fromiter(values, np.int64, len(values))


def from_json_lines(schema: Schema, lines: Sequence[str]) -> RawColumns:
    rows = json.loads("[" + ",".join(lines) + "]")
    return {name: [row.get(name, SPARSE[name]) if name in SPARSE else row[name] for row in rows] for name in schema}


def to_arrays(schema: Schema, columns: RawColumns) -> Columns:
    return {name: _as_array(columns[name], kind) for name, kind in schema.items()}


def _as_array(values: list[Any], kind: str) -> Any:
    if kind == "int":
        return np.array(values, dtype=np.int64)
    if kind.startswith(("int", "real", "time")):
        return np.array(values, dtype=np.float64)
    return values


def join_columns(schema: Schema, parts: Sequence[Columns]) -> Columns:
    """Parts of one table, one after the other."""
    joined: Columns = {}
    for name, kind in schema.items():
        empty = _as_array([], kind)
        pieces = [part[name] for part in parts]
        if isinstance(empty, list):
            joined[name] = [value for piece in pieces for value in piece]
        else:
            joined[name] = np.concatenate([empty, *pieces])
    return joined


@dataclass
class RunTables:
    """What a run left behind.

    `status` is finished, failed or interrupted; `summary` has every key of `metrics.SUMMARY_KEYS`; `result` is all of
    result.json. `requests`, `steps` and `decisions` are columns by name, loaded when first asked for; they raise
    ConfigError where the run kept no logs.
    """

    status: str
    summary: dict[str, Any]
    digest: str | None
    result: dict[str, Any]
    load: Callable[[str], Columns]
    manifest: dict[str, Any] | None = None
    vllm_bench: dict[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def requests(self) -> Columns:
        return self.load("requests")

    @cached_property
    def steps(self) -> Columns:
        return self.load("steps")

    @cached_property
    def decisions(self) -> Columns:
        return self.load("decisions")
