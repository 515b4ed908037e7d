"""Mooncake jsonl (github.com/kvcache-ai/Mooncake, FAST'25) and its extensions by aiperf and dynamo.

Every row is a whole prompt: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids`, ceil(input_length / 512)
ids of 512 tokens. Rows of one `session_id` are its turns; a turn with `delay` or `delay_ms` starts so many ms after the
end of the one before, and needs no stamp. A stamped turn without one arrives as stamped, or by `gap: tie` the stamps'
difference after that end. In agentic files rows have a `request_id`; one with `wait_for` starts `delay + tool_wait_ms`
after the ends of all that it names; `branches` names the rows that a row lets go, which say so too.

Files that we write say more: `arrival_ns` and `think_ns`, the exact values behind these times, and `block_size` where
ids are not 512 tokens wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, check_id_counts, finish, previous_turns
from schedlab.workloads.dependencies import Names, fault, named_parents, with_parents
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.soundness import request_name
from schedlab.workloads.trace import BlockIds, Trace
from schedlab.workloads.values import integers

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope", "gap"})
BLOCK_SIZE = 512
REQUIRED = ("input_length", "output_length")
EXACT = frozenset({"arrival_ns", "think_ns", "block_size"})
AGENTIC = frozenset({"wait_for", "tool_wait_ms", "branches", "prefix_reset", "tool_events"})
KNOWN = frozenset(
    {*REQUIRED, *EXACT, *AGENTIC, "timestamp", "hash_ids", "session_id", "delay", "delay_ms", "request_id"}
)
UNREADABLE = {
    "dependencies": "dependencies with triggers",
    "hash_id_scope": "a scope of ids in the row; hash_scope says it for the file",
    "parent_session_id": "sessions that wait for sessions",
    "priority": "priorities",
}
"""Keys that would change when or what is sent, and that no reader here understands."""


def matches(record: Mapping[str, Any]) -> bool:
    timed = "wait_for" in record or "timestamp" in record
    ours = timed and record.keys() >= set(REQUIRED) and "chat_id" not in record
    return ours and (type(record.get("hash_ids")) is list or "arrival_ns" in record)


def read(path: Path, options: ReadOptions) -> Trace:
    unit, width = options.time_unit or "ms", options.block_size
    builder, links, has_ids = Builder(), Links(), False
    for batch in json_batches(path, REQUIRED):
        links.add(batch, unit)
        has_ids |= batch.has("hash_ids")
        width = width_of(batch, width) or BLOCK_SIZE
        add_rows(builder, batch, unit, width)
    trace = builder.trace(path, "mooncake", width or BLOCK_SIZE)
    refuse_deltas(trace)
    trace = trace.assuming(f"times in {unit}", "every row's input_length is the whole prompt")
    trace = links.tie(trace, options)
    if has_ids:
        trace = scoped(trace, options.hash_scope or "global").assuming(f"block ids stand for {width} tokens")
    if links.ignored:
        trace = trace.assuming(f"ignored keys: {', '.join(sorted(links.ignored))}")
    return finish(trace, options)


@dataclass
class Links:
    """What the rows say of others, in the order of the file."""

    ignored: set[str] = field(default_factory=set)
    wait_for: Names = field(default_factory=lambda: Names("wait_for"))
    branches: Names = field(default_factory=lambda: Names("branches"))
    think_ns: list[np.ndarray] = field(default_factory=list)
    delayed: list[np.ndarray] = field(default_factory=list)
    agentic: bool = False

    def add(self, batch: Batch, unit: str) -> None:
        unreadable = sorted(batch.keys & UNREADABLE.keys())
        if unreadable:
            key = unreadable[0]
            row = next(i for i, value in enumerate(batch.column(key)) if value is not None)
            raise batch.fault(row, f"has {key} ({UNREADABLE[key]}), which format mooncake does not read")
        self.ignored |= batch.keys - KNOWN
        self.agentic |= bool(batch.keys & AGENTIC)
        for key, names in (("wait_for", self.wait_for), ("branches", self.branches)):
            names.add(batch, batch.column(key)) if batch.has(key) else names.skip(len(batch))
        delay = _delays(batch, unit)
        tools = batch.optional_times("tool_wait_ms", "ms") if batch.has("tool_wait_ms") else np.full(len(batch), -1)
        self.delayed.append(delay >= 0)
        self.think_ns.append(np.where((delay < 0) & (tools < 0), -1, np.maximum(delay, 0) + np.maximum(tools, 0)))

    def tie(self, trace: Trace, options: ReadOptions) -> Trace:
        think = np.concatenate(self.think_ns)
        if self.agentic:
            return self._tie_by_name(trace, think)
        if trace.session is None:
            return trace
        return stamps_as_gaps(trace, think) if options.gap == "tie" else _stated(trace.with_columns(think_ns=think))

    def _tie_by_name(self, trace: Trace, think: np.ndarray) -> Trace:
        parents = named_parents(trace, self.wait_for.names, self.wait_for.per_row())
        self._check_branches(trace, parents)
        previous = previous_turns(trace.with_columns(stamped=np.zeros(len(trace), dtype=bool)))
        follows = np.concatenate(self.delayed) & (parents.counts == 0) & (previous >= 0)
        if follows.any():  # a turn with a delay and no names waits for the turn before
            parents = _appended(parents, follows, previous)
        return with_parents(trace, parents, think)

    def _check_branches(self, trace: Trace, parents: BlockIds) -> None:
        if not self.branches.names:
            return
        children = named_parents(trace, self.branches.names, self.branches.per_row())
        for row in np.flatnonzero(children.counts).tolist():
            for child in children.row(row).tolist():
                if row not in parents.row(child):
                    name = shown(request_name(trace, child))
                    raise fault(trace, row, f"branches into {name}, whose wait_for does not name it")


def _delays(batch: Batch, unit: str) -> np.ndarray:
    if batch.has("delay") and batch.has("delay_ms"):
        raise batch.fault(0, "has delay and delay_ms, expected one of the two")
    return exact_times(batch, "think_ns", "delay_ms" if batch.has("delay_ms") else "delay",
                       "ms" if batch.has("delay_ms") else unit)  # fmt: skip


def _appended(parents: BlockIds, rows: np.ndarray, previous: np.ndarray) -> BlockIds:
    """With the row before as the one parent of each of `rows`, bool [N], which have none."""
    counts = parents.counts + rows
    offsets = np.concatenate([[0], np.cumsum(counts)])
    values = np.insert(parents.values, parents.offsets[:-1][rows], previous[rows])
    return BlockIds(offsets, values, 1)


def stamps_as_gaps(trace: Trace, think: np.ndarray) -> Trace:
    """Stamped turns without a delay start the difference of the stamps after the end of the turn before."""
    previous = previous_turns(trace)
    stamped = np.ones(len(trace), dtype=bool) if trace.stamped is None else trace.stamped.astype(bool)
    known = (previous >= 0) & (think < 0) & stamped & stamped[previous]
    gap = trace.arrival_ns - trace.arrival_ns[previous]
    if (known & (gap < 0)).any():
        raise fault(trace, int(np.argmax(known & (gap < 0))), "is a later turn of its session, but arrives earlier")
    statement = "a turn without a delay starts the stamps' difference after the turn before has ended (gap: tie)"
    return trace.with_columns(think_ns=np.where(known, gap, think)).assuming(statement)


def _stated(trace: Trace) -> Trace:
    previous, think = previous_turns(trace), trace.think_ns
    assert think is not None
    if not ((previous >= 0) & (think < 0)).any():
        return trace
    return trace.assuming("a turn without a delay arrives as stamped (gap: tie lets it wait for the turn before)")


def refuse_deltas(trace: Trace) -> None:
    """Later turns with a delay whose ids have none of the turn before bring only their new tokens, not the prompt."""
    if trace.ids is None or trace.session is None or trace.stamped is None:
        return
    previous, rows = previous_turns(trace), 0
    for row in np.flatnonzero((previous >= 0) & ~trace.stamped.astype(bool)).tolist():
        before, own = trace.ids.row(int(previous[row])), trace.ids.row(row)
        if not len(before) or not len(own) or len(np.intersect1d(before, own)):
            return
        rows += 1
    if rows:
        row = int(np.argmax((previous >= 0) & ~trace.stamped.astype(bool)))
        raise fault(
            trace, row, f"and all {rows:,} later turns share no block with the turn before: they bring only their new "
            f"tokens, which format=mooncake_delta reads"
        )  # fmt: skip


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
    columns |= {ours: batch.labels(theirs) for ours, theirs in NAMES.items() if batch.has(theirs)}
    output = batch.counts("output_length")
    builder.add(len(batch), source_row=batch.rows(), prompt_tokens=prompt, output_tokens=output, **columns)


NAMES = {"session": "session_id", "request_id": "request_id"}


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
