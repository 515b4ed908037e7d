"""Agentic sessions in the WEKA format (github.com/callanjfox/kv-cache-tester): one JSON object a session.

A file of one object a line, a single object, or a folder of such files. Block ids of 64 tokens, floor(in / 64) of them,
mean something inside their session only. Times are seconds from the start of the session; sessions have no common
clock, so all start at 0 unless an arrival process is given. A call follows the one before it by `think_time`, else by
the gap between the two less `api_time`. A nested list of a sub-agent has its own clock and runs beside its parent: its
first call follows the parent's last call before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads import values
from schedlab.workloads.builder import FORBIDDEN, Builder, check_id_counts, finish
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_lines, parse_object
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope"})


def matches(record: Mapping[str, Any]) -> bool:
    return type(record.get("requests")) is list and "hash_id_scope" in record


@dataclass
class Calls:
    """The calls of one session in the order of its lists; `after` and `think_ns` as in `Trace`, within the session."""

    name: str
    unit_ns: int
    where: str
    records: list[dict[str, Any]] = field(default_factory=list)
    session: list[str] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    think_ns: list[int] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    strict: bool = False
    counts: Counter[str] = field(default_factory=Counter)

    def column(self, key: str) -> list[Any]:
        return [record.get(key) for record in self.records]

    def flatten(self, requests: Any, name: str, zero_ns: int, parent: int) -> None:
        """Appends the calls of a list, and those of the lists nested in it, which follow the call before them."""
        if type(requests) is not list or not all(type(r) is dict for r in requests):
            raise TraceError(f"{self.where}: requests of {shown(name)} are not a list of objects")
        previous = parent
        for record in requests:
            start_ns = zero_ns + self._time(record, "t")
            if record.get("type") == "subagent":
                agent = f"{name}/{record.get('agent_id', len(self.records))}"
                self.flatten(record.get("requests"), agent, start_ns, previous)
                continue
            self._append(record, name, start_ns, previous, first=previous == parent, nested=parent >= 0)
            previous = len(self.records) - 1

    def _append(
        self, record: dict[str, Any], name: str, start_ns: int, previous: int, *, first: bool, nested: bool
    ) -> None:
        own_ns = -1 if first else self._time(record, "think_time", absent=-1)
        if previous >= 0 and own_ns < 0:
            own_ns = self._gap(start_ns, previous)
        self.records.append(record)
        self.session.append(name)
        self.start_ns.append(start_ns)
        self.after.append(previous)
        self.think_ns.append(own_ns if previous >= 0 else -1)
        self.kind.append("sub-agent call" if nested else "call")

    def _gap(self, start_ns: int, previous: int) -> int:
        """From the end of the previous call; 0 if its duration is unknown, so as not to count its service twice, and
        if it had not ended, which `strict` refuses."""
        service_ns = self._time(self.records[previous], "api_time", absent=-1)
        if service_ns < 0:
            self.counts["unknown_think_times"] += 1
            return 0
        gap_ns = start_ns - self.start_ns[previous] - service_ns
        self.counts["think_times_from_gaps"] += 1
        self.counts["overlapping_turns"] += gap_ns < 0
        if self.strict and gap_ns < 0:
            call = f"call {len(self.records)} begins before the call before has ended"
            raise TraceError(f"{self.where}: {call}; {FORBIDDEN}")
        return max(gap_ns, 0)

    def _time(self, record: Mapping[str, Any], key: str, absent: int | None = None) -> int:
        value = record.get(key)
        if value is None and absent is not None:
            return absent
        try:
            return values.parse_time(value, self.unit_ns)
        except (ValueError, ArithmeticError):
            raise TraceError(f"{self.where}: {key} is {shown(value)}, expected a finite time of at least 0") from None


def read(path: Path, options: ReadOptions) -> Trace:
    unit_ns = values.UNITS[options.time_unit or "s"]
    builder, widths, counts = Builder(), set[int](), Counter[str]()
    for number, (line, file, session) in enumerate(sessions(path)):
        where = f"{file}: session {number} (line {line})"
        calls = Calls(str(session.get("id", number)), unit_ns, where, strict=options.strict)
        calls.flatten(session.get("requests"), calls.name, 0, -1)
        widths.add(width := options.block_size or _width(session, where))
        counts += calls.counts
        batch = Batch(file, builder.rows, [line] * len(calls.records), calls.column, frozenset())
        scope = _scope(options.hash_scope or session.get("hash_id_scope"), calls.name, where)
        _add(builder, calls, batch, width, scope)
    if len(widths) > 1:
        raise TraceError(f"{path}: sessions of different block sizes {sorted(widths)}")
    trace = builder.trace(path, "weka", max(widths, default=0)).counted(**counts)
    trace = trace.assuming("sessions have no common clock: all start at 0", f"block ids stand for {max(widths)} tokens")
    return finish(trace, options, by_session=True)


def sessions(path: Path) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """Line, file and object of every session."""
    for file in sorted(path.glob("*.json*")) if path.is_dir() else [path]:
        lines = json_lines(file)
        if lines and lines[0][1].strip() == "{":  # one object over many lines
            lines = [(1, "".join(line for _, line in lines))]
        for row, (n, line) in enumerate(lines):
            yield n, file, parse_object(file, row, n, line)


def _width(session: Mapping[str, Any], where: str) -> int:
    width = session.get("block_size")
    if type(width) is not int or width < 1:
        raise TraceError(f"{where}: block_size is {shown(width)}, expected at least 1")
    return width


def _scope(scope: Any, session: str, where: str) -> str | None:
    if scope not in ("local", "session", "global"):
        raise TraceError(f"{where}: hash_id_scope is {shown(scope)}, expected local or global")
    return None if scope == "global" else session


def _add(builder: Builder, calls: Calls, batch: Batch, width: int, scope: str | None) -> None:
    if not calls.records:
        return
    prompt, first = batch.counts("in"), builder.rows
    check_id_counts(batch, builder.add_ids(batch, batch.column("hash_ids")), prompt, width, floor=True)
    after = np.array([-1 if a < 0 else first + a for a in calls.after], dtype=np.int64)
    builder.add(
        len(batch), source_row=batch.rows(), arrival_ns=np.array(calls.start_ns, dtype=np.int64), prompt_tokens=prompt,
        output_tokens=batch.counts("out"), after=after, think_ns=np.array(calls.think_ns, dtype=np.int64),
        session=calls.session, scope=[scope] * len(batch), model=batch.labels("model"), kind=calls.kind,
    )  # fmt: skip
