"""RAGPulse (github.com/flashserve/RAGPulse): prompts of retrieved segments, their lengths in files beside the trace.

`hash_ids` is an object of five lists; the prompt is their segments in the order of KINDS, passages in retrieval order,
and a few tokens of template that belong to no segment. Times are strings of whole seconds from noon.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.builder import Builder, finish, ignoring
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit", "hash_scope"})
REQUIRED = ("timestamp", "input_length", "output_length", "hash_ids")
KINDS = {
    "sys_prompt": ("1_sys_prompt", "sys_prompt_id"),
    "passages_ids": ("2_passages", "passage_id"),
    "history": ("3_history", "history_id"),
    "web_search": ("5_web_search", "web_search_id"),
    "user_input": ("4_user_input", "user_input_id"),
}
"""Our order of a prompt's segments -> the file of their lengths, and the key of its ids."""


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED) and type(record["hash_ids"]) is dict


def read(path: Path, options: ReadOptions) -> Trace:
    unit, lengths = options.time_unit or "s", segment_lengths(path.parent)
    builder, ignored = Builder(), set[str]()
    for batch in json_batches(path, REQUIRED):
        ignored |= batch.keys - {*REQUIRED, "session_id"}
        prompt = batch.counts("input_length")
        ids = [_segments(batch, row, value, lengths) for row, value in enumerate(batch.column("hash_ids"))]
        widths = [[lengths[i] for i in row] for row in ids]
        _check(batch, widths, prompt)
        builder.add_ids(batch, ids, widths)
        columns: dict[str, Any] = {"session": batch.labels("session_id")} if batch.has("session_id") else {}
        builder.add(
            len(batch), source_row=batch.rows(), arrival_ns=batch.times("timestamp", unit), prompt_tokens=prompt,
            output_tokens=batch.counts("output_length"), **columns,
        )  # fmt: skip
    trace = scoped(ignoring(builder.trace(path, "ragpulse"), ignored), options.hash_scope or "global")
    return finish(trace.assuming(f"times in {unit}"), options)


def segment_lengths(folder: Path) -> dict[int, int]:
    """Tokens of every segment, from the files beside the trace; an id may stand in one of them only."""
    lengths: dict[int, int] = {}
    for stem, key in KINDS.values():
        found = [p for p in (folder / f"{stem}.jsonl", folder / f"{stem}.jsonl.gz") if p.exists()]
        if not found:
            raise TraceError(f"{folder}: no {stem}.jsonl beside the trace; it has the lengths of its segments")
        for batch in json_batches(found[0], (key, "token_length")):
            pairs = zip(batch.counts(key).tolist(), batch.counts("token_length").tolist(), strict=True)
            for row, (segment, tokens) in enumerate(pairs):
                if segment in lengths:
                    raise batch.fault(row, f"{key} {segment} stands above, or in another file, too")
                lengths[segment] = tokens
    return lengths


def _segments(batch: Batch, row: int, value: Any, lengths: Mapping[int, int]) -> list[int]:
    if type(value) is not dict or value.keys() != KINDS.keys():
        raise batch.fault(row, f"hash_ids is {shown(value)}, expected an object with {', '.join(KINDS)}")
    segments: list[int] = []
    for kind in KINDS:
        if type(value[kind]) is not list:
            raise batch.fault(row, f"hash_ids.{kind} is {shown(value[kind])}, expected a list")
        segments += value[kind]
    unknown = [s for s in segments if type(s) is not int or s not in lengths]
    if unknown:
        raise batch.fault(row, f"segment {shown(unknown[0])} has no length in the files beside the trace")
    return [s for s in segments if lengths[s]]


def _check(batch: Batch, widths: list[list[int]], prompt: np.ndarray) -> None:
    totals = np.array([sum(row) for row in widths])
    over = np.flatnonzero(totals > prompt)
    if len(over):
        row = int(over[0])
        raise batch.fault(row, f"segments of {totals[row]} tokens in a prompt of {prompt[row]}")
