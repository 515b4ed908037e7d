"""A run as a picture in time: `timeline.json` in the Chrome trace-event format, which Perfetto opens offline.

One track for the engine's steps, with counters and rejections, and one a request: preparation, queued, prefill with its
chunks, decode, preempted, swapped, delivery. The format: "Trace Event Format" (Google, 2016), slices as B and E pairs,
times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from schedlab.experiments.analysis.history import Histories, History, Phase, histories
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import write_whole

TIMELINE = "timeline.json"
ENGINE, REQUESTS = 1, 2
"""Process numbers of the two groups of tracks."""
WAITING = {"recompute": "preempted", "swap": "swapped"}
Event = dict[str, Any]


class Slice(NamedTuple):
    """Something that lasts on one track; a slice of `depth` 1 lies within one of depth 0."""

    name: str
    begin_ns: int
    end_ns: int
    depth: int = 0
    args: Mapping[str, Any] = {}


@dataclass(frozen=True)
class TimeWindow:
    """The part of engine time that is drawn: what lies across its edges is cut there."""

    start_ns: int
    stop_ns: int

    @classmethod
    def of(cls, start_s: float | None, stop_s: float | None) -> TimeWindow:
        start, stop = 0.0 if start_s is None else start_s, 1e9 if stop_s is None else stop_s
        if not 0 <= start < stop:
            raise ConfigError(f"timeline: expected 0 <= start < stop, found {start:g} and {stop:g} s")
        return cls(round(start * NS), round(stop * NS))

    def cut(self, piece: Slice) -> Slice | None:
        begin, end = max(piece.begin_ns, self.start_ns), min(piece.end_ns, self.stop_ns)
        return piece._replace(begin_ns=begin, end_ns=end) if begin < end else None

    def __contains__(self, ns: int) -> bool:
        return self.start_ns <= ns < self.stop_ns


def write_timeline(run: RunTables, path: Path, start_s: float | None = None, stop_s: float | None = None) -> int:
    """Write the events of [start_s, stop_s) of engine time, all by default; returns how many there are."""
    window = TimeWindow.of(start_s, stop_s)
    found = list(events(run, window))
    if (start_s, stop_s) != (None, None) and all(event["ph"] == "M" for event in found):
        raise ConfigError(f"timeline: nothing happened in [{window.start_ns / NS:g}, {window.stop_ns / NS:g}) s")
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in found)
    write_whole(path, '{"displayTimeUnit":"ms","traceEvents":[\n' + lines + "\n]}\n")
    return len(found)


def events(run: RunTables, window: TimeWindow) -> Iterator[Event]:
    """Track by track, each in order of time."""
    past = histories(run)
    yield _name("process_name", ENGINE, 0, "engine")
    yield _name("thread_name", ENGINE, 1, "steps")
    yield from _track(ENGINE, 1, _steps(run, past), window)
    yield from _counters(run, window)
    yield from _rejections(run, window)
    yield _name("process_name", REQUESTS, 0, "requests")
    for track, history in enumerate(past.requests, start=1):
        drawn = list(_track(REQUESTS, track, _request(past, history), window))
        if drawn:
            yield _name("thread_name", REQUESTS, track, history.request_id)
            yield from drawn
            yield from _preemptions(past, history, track, window)


# ---- the engine ----


def _steps(run: RunTables, past: Histories) -> Iterator[Slice]:
    """A slice a logged row; a row of many equal steps is one slice."""
    steps, now = run.steps, past.slots.now_ns
    for row, duration in enumerate(steps["duration_ns"].tolist()):
        begin = int(now[row])
        prefill, decode, repeat = (int(steps[name][row]) for name in ("prefill_tokens", "decode_tokens", "repeat"))
        if not (prefill or decode):
            yield Slice("idle", begin, int(now[row + 1]))
            continue
        parts = [f"prefill {prefill}"] if prefill else []
        parts += [f"decode {decode}" + (f" × {repeat} steps" if repeat > 1 else "")] if decode else []
        names = ("index", "repeat", "prefill_tokens", "decode_tokens", "prefill_requests", "context_tokens")
        args = {name: int(steps[name][row]) for name in (*names, "copied_blocks")}
        yield Slice(", ".join(parts), begin, begin + duration, args=args | {"bound": steps["bound"][row]})


def _counters(run: RunTables, window: TimeWindow) -> Iterator[Event]:
    """Values from the start of each step on."""
    steps, limits = run.steps, run.result.get("measurement") or (run.manifest or {})["engine"]
    num_blocks = limits["num_blocks"]
    owned = num_blocks - steps["free_blocks"]
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    for row, now in enumerate(steps["now_ns"].tolist()):
        if now in window:
            requests = {"running": int(steps["running"][row]), "waiting": int(steps["waiting"][row])}
            blocks = {"owned": int(owned[row]), "cached": int(steps["cached_blocks"][row])}
            yield _event("C", "requests", ENGINE, 0, now, args=requests)
            yield _event("C", "KV blocks", ENGINE, 0, now, args=blocks)
            yield _event("C", "budget used", ENGINE, 0, now, args={"tokens": int(tokens[row])})


def _rejections(run: RunTables, window: TimeWindow) -> Iterator[Event]:
    requests = run.requests
    for row, status in enumerate(requests["status"]):
        at = round(requests["finished_s"][row] * NS) if status == "rejected" else -1
        if at in window:
            args = {"request_id": requests["request_id"][row], "reason": requests["reason"][row]}
            yield _event("i", "rejected", ENGINE, 1, at, s="p", args=args)


# ---- a request ----


def _request(past: Histories, history: History) -> Iterator[Slice]:
    """What it went through in order; chunks lie within the prefill that they are of."""
    if history.status == "rejected" and history.finished_ns == history.visible_ns:
        return  # on arrival
    first, end = history.first_scheduled_ns, history.finished_ns
    yield Slice("preparation", history.arrival_ns, min(history.visible_ns, end))
    yield Slice("queued", history.visible_ns, end if first is None else first)
    for phase in history.phases:
        yield from _phase(past, history, phase)
    if history.delivery_ns:
        yield Slice("delivery", end, end + history.delivery_ns)


def _phase(past: Histories, history: History, phase: Phase) -> Iterator[Slice]:
    now, duration = past.slots.now_ns, past.slots.duration_ns
    begin, end = int(now[phase.first]), min(int(now[phase.stop]), history.finished_ns)
    if phase.kind == "decode":
        yield Slice("decode", begin, end)
    elif phase.kind != "prefill":
        yield Slice(WAITING[phase.kind], begin, end)
    else:
        tokens = sum(grant.tokens for grant in phase.grants)
        yield Slice("prefill", begin, end, args={"tokens": tokens, "start": phase.grants[0].start})
        for row, start, count, _ in phase.grants:
            done = min(int(now[row] + duration[row]), end)
            yield Slice(f"chunk {count}", int(now[row]), done, 1, {"start": start, "tokens": count, "row": row})


def _preemptions(past: Histories, history: History, track: int, window: TimeWindow) -> Iterator[Event]:
    for phase in history.phases:
        if phase.kind in WAITING and (now := int(past.slots.now_ns[phase.first])) in window:
            yield _event("i", "preemption", REQUESTS, track, now, s="t", args={"mode": phase.kind})


# ---- the format ----


def _track(process: int, track: int, slices: Iterator[Slice], window: TimeWindow) -> Iterator[Event]:
    """B and E events of one track in order: outer slices open first and close last."""
    open_ends: list[tuple[int, str]] = []
    for piece in slices:
        if (cut := window.cut(piece)) is None:
            continue
        while len(open_ends) > cut.depth:
            end, name = open_ends.pop()
            yield _event("E", name, process, track, end)
        open_ends.append((cut.end_ns, cut.name))
        yield _event("B", cut.name, process, track, cut.begin_ns, **({"args": dict(cut.args)} if cut.args else {}))
    while open_ends:
        end, name = open_ends.pop()
        yield _event("E", name, process, track, end)


def _event(phase: str, name: str, process: int, track: int, ns: int, **more: Any) -> Event:
    return {"ph": phase, "name": name, "pid": process, "tid": track, "ts": ns / 1000, **more}


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
