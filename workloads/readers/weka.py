"""Agentic sessions in the WEKA format (github.com/callanjfox/kv-cache-tester): one JSON object a session.

A file of one object a line, a single object, or a folder of such files. Block ids of 64 tokens, floor(in / 64) of them,
mean something inside their session only. Times are seconds from the start of the session; sessions have no common
clock, so all start at 0 unless an arrival process is given. A call follows the one before it by `think_time`, else by
the gap between the two less `api_time`. A nested list of a sub-agent has its own clock and runs beside its parent: its
first call follows the parent's last call before it, and the parent's first call recorded after the sub-agent's end
waits
for that end too: such a join follows the last of the ends by what was recorded between them.
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
from schedlab.workloads.dependencies import with_parents
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_objects
from schedlab.workloads.trace import Trace, ragged

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope"})


def matches(record: Mapping[str, Any]) -> bool:
    return type(record.get("requests")) is list and "hash_id_scope" in record


@dataclass
class Calls:
    """The calls of one session in the order of its lists; `parents`, last call of its own list first, and
    `think_ns`."""

    name: str
    unit_ns: int
    where: str
    records: list[dict[str, Any]] = field(default_factory=list)
    session: list[str] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
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
        previous, running = parent, list[int]()  # last calls of sub-agents that nobody has waited for yet
        for record in requests:
            start_ns = zero_ns + self._time(record, "t")
            if record.get("type") == "subagent":
                agent, before = f"{name}/{record.get('agent_id', len(self.records))}", len(self.records)
                self.flatten(record.get("requests"), agent, start_ns, previous)
                running += [len(self.records) - 1] if len(self.records) > before else []
                continue
            ended = [call for call in running if self._end_ns(call) <= start_ns]
            running = [call for call in running if call not in ended]
            self._append(record, name, start_ns, previous, ended, first=previous == parent, nested=parent >= 0)
            previous = len(self.records) - 1

    def _append(
        self, record: dict[str, Any], name: str, start_ns: int, previous: int, ended: list[int], *, first: bool,
        nested: bool,
    ) -> None:  # fmt: skip
        think_ns = -1
        if ended:
            think_ns = self._not_before(start_ns - max(map(self._end_ns, [previous, *ended])))
            self.counts["joins"] += 1
        elif previous >= 0:
            own_ns = -1 if first else self._time(record, "think_time", absent=-1)
            think_ns = self._gap(start_ns, previous) if own_ns < 0 else own_ns
        self.records.append(record)
        self.session.append(name)
        self.start_ns.append(start_ns)
        self.parents.append([*([previous] if previous >= 0 else []), *ended])
        self.think_ns.append(max(think_ns, 0) if self.parents[-1] else -1)
        self.kind.append("sub-agent call" if nested else "call")

    def _end_ns(self, call: int) -> int:
        """The recorded end of a call; its start if its duration is unknown."""
        return self.start_ns[call] + self._time(self.records[call], "api_time", absent=0)

    def _gap(self, start_ns: int, previous: int) -> int:
        """From the end of the previous call; 0 if its duration is unknown, so as not to count its service twice."""
        service_ns = self._time(self.records[previous], "api_time", absent=-1)
        if service_ns < 0:
            self.counts["unknown_think_times"] += 1
            return 0
        gap_ns = start_ns - self.start_ns[previous] - service_ns
        self.counts["think_times_from_gaps"] += 1
        return self._not_before(gap_ns)

    def _not_before(self, gap_ns: int) -> int:
        """A gap, 0 where a call begins before what it follows had ended; that is counted, or refused by `strict`."""
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
    parents, think_ns = list[list[int]](), list[int]()
    for number, (line, file, session) in enumerate(sessions(path)):
        where = f"{file}: session {number} (line {line})"
        calls = Calls(str(session.get("id", number)), unit_ns, where, strict=options.strict)
        calls.flatten(session.get("requests"), calls.name, 0, -1)
        widths.add(width := options.block_size or _width(session, where))
        counts += calls.counts
        parents += [[builder.rows + call for call in row] for row in calls.parents]
        think_ns += calls.think_ns
        batch = Batch(file, builder.rows, [line] * len(calls.records), calls.column, frozenset())
        scope = _scope(options.hash_scope or session.get("hash_id_scope"), calls.name, where)
        _add(builder, calls, batch, width, scope)
    if len(widths) > 1:
        raise TraceError(f"{path}: sessions of different block sizes {sorted(widths)}")
    trace = builder.trace(path, "weka", max(widths, default=0)).counted(**counts)
    trace = with_parents(trace, ragged(parents), np.array(think_ns, dtype=np.int64))
    trace = trace.assuming("sessions have no common clock: all start at 0", f"block ids stand for {max(widths)} tokens")
    return finish(trace, options, by_session=True)


def sessions(path: Path) -> Iterator[tuple[int, Path, dict[str, Any]]]:
    """Line, file and object of every session."""
    for file in sorted(path.glob("*.json*")) if path.is_dir() else [path]:
        for line, session in json_objects(file):
            yield line, file, session


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
    prompt = batch.counts("in")
    check_id_counts(batch, builder.add_ids(batch, batch.column("hash_ids")), prompt, width, floor=True)
    builder.add(
        len(batch), source_row=batch.rows(), arrival_ns=np.array(calls.start_ns, dtype=np.int64), prompt_tokens=prompt,
        output_tokens=batch.counts("out"), session=calls.session, scope=[scope] * len(batch),
        model=batch.labels("model"), kind=calls.kind,
    )  # fmt: skip
