"""TraceLab rounds (github.com/uw-syfi/TraceLab): one LLM call of a coding agent a line, with its timed events.

A round arrives with the last of its inputs (user message or tool result) and ends with its last event. What lies
between the end of one round and the next arrival, tools included, is think time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Columns, build, finish, previous_turns, thinking
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.tracelab import grown
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import parse_stamp

OPTIONS = frozenset[str]()
REQUIRED = ("session_id", "round_index", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events")
INPUTS = ("user_message", "tool_result")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    ends, prefixes = list[int](), list[np.ndarray]()

    def columns(batch: Batch) -> Columns:
        times = [_arrival_and_end(batch, row, events) for row, events in enumerate(batch.column("timing_events"))]
        ends.extend(end for _, end in times)
        prefixes.append(batch.counts("prefix_tokens"))
        out: dict[str, Any] = {
            "arrival_ns": np.array([arrival for arrival, _ in times], dtype=np.int64),
            "session": batch.labels("session_id"),
            "turn": batch.counts("round_index"),
            "prompt_tokens": batch.counts("input_tokens_total"),
            "output_tokens": batch.counts("output_tokens"),
        }
        return out | {"model": batch.labels("model")} if batch.has("model") else out

    trace = build(path, "tracelab_rounds", json_batches(path, REQUIRED), columns, (*REQUIRED, "model"))
    previous = previous_turns(trace)
    trace = thinking(trace, trace.arrival_ns - np.array(ends)[previous], previous >= 0, options)
    trace = finish(trace, options, wall_clock=True, by_session=True)
    return grown(trace, np.concatenate(prefixes)[trace.source_row])


def _arrival_and_end(batch: Batch, row: int, events: Any) -> tuple[int, int]:
    """ns of the last input and of the last event of a round."""
    try:
        stamped = [(parse_stamp(event["timestamp"]), event["event_type"]) for event in events]
        return max(at for at, kind in stamped if kind in INPUTS), max(at for at, _ in stamped)
    except (TypeError, KeyError, ValueError):
        expected = f"events with stamps, one of them {' or '.join(INPUTS)}"
        raise batch.fault(row, f"timing_events is {shown(events)}, expected {expected}") from None
