"""TraceLab replay csv (github.com/uw-syfi/TraceLab): sessions of coding agents, round by round.

A round's prompt is `prefix_len` tokens of history and `input_len` new ones; it starts `tool_wait_after_ms` after the
end of the round before. `arrival_time`, of a session's first round, has no stated unit: ms is assumed, as of the waits.
Without the column sessions start when an arrival process says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Columns, build, finish, previous_turns
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, csv_batches
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit"})
REQUIRED = ("session_id", "round_idx", "prefix_len", "input_len", "output_len", "tool_wait_after_ms")
ARRIVAL = "arrival_time"


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    unit = options.time_unit or "ms"
    waits, prefixes = list[np.ndarray](), list[np.ndarray]()

    def columns(batch: Batch) -> Columns:
        waits.append(batch.times("tool_wait_after_ms", "ms"))
        prefixes.append(batch.counts("prefix_len"))
        turn = batch.counts("round_idx")
        out: dict[str, Any] = {
            "session": batch.labels("session_id"),
            "turn": turn,
            "prompt_tokens": prefixes[-1] + batch.counts("input_len"),
            "output_tokens": batch.counts("output_len"),
        }
        if batch.has(ARRIVAL):
            out |= {"arrival_ns": batch.times(ARRIVAL, unit), "stamped": turn == 0}
        return out

    trace = build(path, "tracelab", csv_batches(path, REQUIRED), columns, (*REQUIRED, ARRIVAL))
    previous = previous_turns(trace)
    think = np.where(previous >= 0, np.concatenate(waits)[previous], -1)
    trace = finish(replace(trace, think_ns=think), options, by_session=True)
    return grown(trace, np.concatenate(prefixes)[trace.source_row]).assuming(f"arrival times in {unit}")


def grown(trace: Trace, prefix: np.ndarray) -> Trace:
    """With the turns marked that contain the one before: long enough for it and its output, and no shorter a prefix.

    `prefix` is int64 [N], the tokens of history in each prompt. A history that was compacted begins anew.
    """
    if trace.after is None:
        return trace
    before, tied = trace.after, trace.after >= 0
    contains = trace.prompt_tokens >= trace.prompt_tokens[before] + trace.output_tokens[before]
    grows = tied & contains & (prefix >= prefix[before])
    return replace(trace, grows=grows).counted(histories_begun_anew=int(tied.sum() - grows.sum()))
