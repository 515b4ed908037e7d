"""GitHub Copilot coding-agent traces (github.com/Azure/AzurePublicDataset, 2026): one session a line.

A session has turns, a turn `llm_calls` with stamps, durations and token counts, and `tool_batches`. Each call follows
the one before it in its session by what lay between, tools included. A prompt is long enough to contain the call before
and its answer, and the provider found no less of it cached than before: then it is taken to contain them (`grows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, finish
from schedlab.workloads.calls import Calls
from schedlab.workloads.files import at_row, shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.tracelab import grown
from schedlab.workloads.records import json_objects
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import parse_count, parse_stamp, parse_time

OPTIONS = frozenset[str]()
MS = 1_000_000


def matches(record: Mapping[str, Any]) -> bool:
    return type(record.get("turns")) is list and "session_id" in record


def read(path: Path, options: ReadOptions) -> Trace:
    builder, calls, sessions, cached = Builder(), Calls(), dict[str, list[int]](), list[int]()
    for number, (line, session) in enumerate(json_objects(path)):
        name = str(session.get("session_id", number))
        if name in sessions:
            raise at_row(path, number, line, f"session {shown(name)} stands in a row above too")
        found = list(_calls(path, number, line, session))
        sessions[name] = list(range(builder.rows, builder.rows + len(found)))
        for call in found:
            calls.add(call["start"], call["end"])
            cached.append(call["cached"])
        _add(builder, name, found)
    trace = builder.trace(path, "copilot")
    calls.follow_in(sessions)
    trace = finish(calls.tie(trace, options), options, wall_clock=True, by_session=True)
    return grown(trace, np.array(cached)[trace.source_row]).assuming("waits for tools are the gaps between calls")


def _calls(path: Path, row: int, line: int, session: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        for turn in session["turns"]:
            for call in turn["llm_calls"]:
                start, tokens = parse_stamp(call["timestamp"]), call["tokens"]
                yield {
                    "start": start, "end": start + parse_time(call["duration_ms"], MS),
                    "prompt": parse_count(tokens["prompt"]), "output": parse_count(tokens["completion"]),
                    "cached": parse_count(tokens.get("cached") or 0), "model": call.get("model"),
                    "kind": call.get("initiator_type"),
                }  # fmt: skip
    except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
        what = "turns of llm_calls with timestamp, duration_ms and tokens (prompt, completion)"
        raise at_row(path, row, line, f"expected {what}; {type(error).__name__} {error}") from None


def _add(builder: Builder, session: str, found: list[dict[str, Any]]) -> None:
    n = len(found)
    numbers = {name: np.array([c[name] for c in found], dtype=np.int64) for name in ("start", "prompt", "output")}
    builder.add(
        n, source_row=np.arange(builder.rows, builder.rows + n), arrival_ns=numbers["start"],
        prompt_tokens=numbers["prompt"], output_tokens=numbers["output"], session=[session] * n,
        model=[c["model"] for c in found], kind=[c["kind"] for c in found],
    )  # fmt: skip
