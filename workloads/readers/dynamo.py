"""Dynamo request traces (`dynamo.request.trace.v1`): one event a line, of which `request_end` rows are the requests.

A request has its own times (received, total), and with `replay` block ids of `trace_block_size` tokens. Requests of one
`session_id` follow each other by what lay between the end of one and the receipt of the next, tools included. A session
with a `parent_session_id` begins after the parent's last request that had ended by then, and the parent's first request
received after the session's end waits for that end. Requests without a session arrive as received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, finish
from schedlab.workloads.calls import Calls
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import parse_count, parse_time

OPTIONS = frozenset({"block_size", "hash_scope"})
SCHEMA = "dynamo.request.trace.v1"
MS = 1_000_000


def matches(record: Mapping[str, Any]) -> bool:
    return record.get("schema") == SCHEMA


def read(path: Path, options: ReadOptions) -> Trace:
    builder, found = Builder(), Found(width=options.block_size)
    for batch in json_batches(path, ("schema", "event_type")):
        rows = [row for row, event in enumerate(batch.column("event_type")) if event == "request_end"]
        found.other_events += len(batch) - len(rows)
        requests = [found.one(batch, row) for row in rows]
        if requests:
            _add(builder, batch, rows, requests)
    trace = builder.trace(path, "dynamo", found.width or 0)
    found.calls.follow_in(found.sessions)
    for child, parent in found.parent_of.items():
        if parent in found.sessions:
            found.calls.fork_and_join(found.sessions[child], found.sessions[parent])
    trace = scoped(found.calls.tie(trace, options), options.hash_scope or "global")
    trace = trace.counted(events_that_are_no_request=found.other_events)
    if found.width:
        trace = trace.assuming(f"block ids stand for {found.width} tokens")
    return finish(trace.assuming("waits for tools are the gaps between requests"), options, wall_clock=True)


@dataclass
class Found:
    """What the requests say beside their columns."""

    width: int | None
    calls: Calls = field(default_factory=Calls)
    sessions: dict[str, list[int]] = field(default_factory=dict)
    parent_of: dict[str, str] = field(default_factory=dict)
    other_events: int = 0

    def one(self, batch: Batch, row: int) -> dict[str, Any]:
        """The columns of a request."""
        request, context = batch.column("request")[row], batch.column("agent_context")[row] or {}
        try:
            received = parse_time(request["request_received_ms"], MS)
            total = parse_time(request.get("total_time_ms") or 0, MS)
            replay = request.get("replay") or {}
            prompt = parse_count(replay.get("input_length", request["input_tokens"]))
            output = parse_count(request["output_tokens"])
            ids, width = replay.get("input_sequence_hashes"), replay.get("trace_block_size")
            session, parent = context.get("session_id"), context.get("parent_session_id")
        except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
            raise batch.fault(row, f"request is {shown(request)}: {type(error).__name__} {error}") from None
        if ids is not None:
            self._check_ids(batch, row, ids, width, prompt)
        if session is not None:
            self.sessions.setdefault(str(session), []).append(len(self.calls.start_ns))
            if parent is not None and self.parent_of.setdefault(str(session), str(parent)) != str(parent):
                raise batch.fault(row, f"session {shown(session)} has another parent than in the rows above")
        self.calls.add(received, received + total)
        return {"arrival": received, "prompt": prompt, "output": output, "ids": ids,
                "session": None if session is None else str(session), "id": request.get("request_id"),
                "model": request.get("model")}  # fmt: skip

    def _check_ids(self, batch: Batch, row: int, ids: Any, width: Any, prompt: int) -> None:
        if type(ids) is not list or type(width) is not int or width < 1:
            raise batch.fault(row, f"replay has {shown(ids)} of {shown(width)} tokens each, expected a list and a size")
        self.width = width if self.width is None else self.width
        if width != self.width:
            raise batch.fault(row, f"trace_block_size is {width}, expected {self.width} as in the rows above")
        if len(ids) not in (prompt // width, -(-prompt // width)):
            raise batch.fault(row, f"{len(ids)} hashes of {width} tokens for a prompt of {prompt}")


def _add(builder: Builder, batch: Batch, rows: list[int], requests: list[dict[str, Any]]) -> None:
    part = Batch(batch.path, batch.first_row, [batch.lines[row] for row in rows], batch.column, batch.keys)
    builder.add_ids(part, [request["ids"] for request in requests])
    columns = {name: np.array([r[name] for r in requests], dtype=np.int64) for name in ("arrival", "prompt", "output")}
    builder.add(
        len(rows), source_row=batch.rows()[rows], arrival_ns=columns["arrival"], prompt_tokens=columns["prompt"],
        output_tokens=columns["output"], session=[r["session"] for r in requests],
        request_id=[None if r["id"] is None else str(r["id"]) for r in requests], model=[r["model"] for r in requests],
    )  # fmt: skip
