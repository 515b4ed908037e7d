"""From a trace to the engine: a `Source` that builds each request when it is due.

Open loop: requests arrive as recorded. Sessions and programs: a request that is tied to others (`Trace.after`,
`also_after`) arrives its think time after the last of their ends and deliveries, whatever the ends were: finished,
rejected or aborted. Memory is the trace's columns, one chunk of rows as Python objects, and what is in flight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np

from schedlab.framework.content import Content, IdContent, SessionContent, TokenContent, UniqueContent
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.request import SLO, Attempt, EngineRequest, SamplingParams
from schedlab.framework.source import Source
from schedlab.workloads.content import SegmentContent
from schedlab.workloads.files import shown
from schedlab.workloads.soundness import beginning
from schedlab.workloads.trace import BlockIds, Labels, Trace

PLAIN = {"source_row", "arrival_ns", "prompt_tokens", "output_tokens"}


class TraceRequest(EngineRequest):
    """A request that also knows its place in the workload: its turn, what it followed after how long, and whether its
    prompt `grows` out of that one; and what else it waited for."""

    __slots__ = ("after", "also_after", "grows", "think_ns", "turn")

    after: str | None
    also_after: Sequence[str]
    grows: bool
    think_ns: int | None
    turn: int | None


def another_attempt(request: EngineRequest, tried: Attempt, arrival_ns: int) -> TraceRequest:
    """The same once more, at `arrival_ns`; its deadline and its withdrawal are where they were."""
    assert isinstance(request, TraceRequest)
    known = request.max_tokens >= 0
    again = TraceRequest(
        f"{request.logical_id}~{tried.number}", arrival_ns, request.num_prompt_tokens, request.content,
        recorded_output_tokens=request.recorded_output_tokens, max_tokens=request.max_tokens if known else None,
        client=request.client, priority=request.priority, deadline_ns=request.deadline_ns, session=request.session,
        slo=request.slo, abort_ns=request.abort_ns, sampling=request.sampling, source_row=request.source_row,
        visible_ns=arrival_ns + request.visible_ns - request.arrival_ns, delivery_ns=request.delivery_ns,
    )  # fmt: skip
    for name in TraceRequest.__slots__:
        setattr(again, name, getattr(request, name))
    again.place_in(request.own_program, request.depth)
    again.tried = tried
    return again


@dataclass(frozen=True, slots=True)
class Terms:
    """What a workload's configuration adds to every row.

    slo         : objective of rows that name no class; `slo_classes`: those that rows may name beside the trace's own
    max_tokens  : cap on the output, or None for the model's limit
    prompt_seed : seed of generated prompts
    vocab_size  : of the executor; needed for the tokens of a session's past turns, None where there are no tokens
    """

    slo: SLO | None = None
    slo_classes: Mapping[str, SLO] | None = None
    max_tokens: int | None = None
    prompt_seed: int = 0
    vocab_size: int | None = None


class Rows:
    """The rows of a trace as requests, one at a time.

    `eager` turns the columns into Python lists first: faster when every row is visited, and once.
    """

    def __init__(self, trace: Trace, terms: Terms, eager: bool = True) -> None:
        check_outputs(trace, terms.max_tokens)
        self._trace, self._terms = trace, terms
        self._classes = {**trace.slo_classes, **(terms.slo_classes or {})}
        self._at = {n: _getter(column, eager) for n, column in trace.columns() if not isinstance(column, BlockIds)}
        self._plain = {name for name, _ in trace.columns()} == PLAIN

    def request(self, row: int, arrival_ns: int, past: EngineRequest | None = None) -> TraceRequest:
        """The request of a row, arriving at `arrival_ns`; `past` is the turn it follows, where it is tied to one."""
        at, terms = self._at, self._terms
        source_row, recorded = at["source_row"](row), at["output_tokens"](row)
        if recorded < 1:  # a kept failure computes its prompt, which emits one token; -1 is live
            recorded = 1 if recorded == 0 else None
        if not self._plain:
            return self._full(row, arrival_ns, source_row, recorded, past)
        request = TraceRequest(
            str(source_row), arrival_ns, at["prompt_tokens"](row), UniqueContent(source_row, terms.prompt_seed),
            recorded_output_tokens=recorded, max_tokens=terms.max_tokens, slo=terms.slo, source_row=source_row,
        )  # fmt: skip
        request.after = request.think_ns = request.turn = None
        request.also_after = ()
        request.grows = False
        return request

    def _full(
        self, row: int, arrival_ns: int, source_row: int, recorded: int | None, past: EngineRequest | None
    ) -> TraceRequest:
        get, terms = self._get, self._terms
        deadline, abort, sampling = get("deadline_ns", row), get("abort_ns", row), get("sampling", row)
        request = TraceRequest(
            self.name(row), arrival_ns, self._at["prompt_tokens"](row),
            self._content(row, source_row, past), recorded_output_tokens=recorded,
            max_tokens=_first(get("max_tokens", row), terms.max_tokens), client=get("client", row) or "default",
            priority=self._at["priority"](row) if "priority" in self._at else 0,
            deadline_ns=None if deadline is None else arrival_ns + deadline,
            session=get("session", row), slo=self._slo(row, source_row),
            abort_ns=None if abort is None else arrival_ns + abort,
            sampling=None if sampling is None else decode_sampling(sampling), source_row=source_row,
            visible_ns=arrival_ns + (get("preparation_ns", row) or 0), delivery_ns=get("delivery_ns", row) or 0,
        )  # fmt: skip
        request.think_ns, request.turn = get("think_ns", row), get("turn", row)
        request.after = None if past is None else past.logical_id
        request.also_after = self._others(row) if past is not None else ()
        request.grows = past is not None and bool(get("grows", row))
        if past is not None or "program" in self._at:
            depth = get("depth", row)
            request.place_in(get("program", row), depth if depth is not None else 0 if past is None else past.depth + 1)
        return request

    def _others(self, row: int) -> Sequence[str]:
        also = self._trace.also_after
        return () if also is None else [self.name(other) for other in also.row(row).tolist()]

    def name(self, row: int) -> str:
        """What the request of a row is called."""
        return self._get("request_id", row) or str(self._at["source_row"](row))

    def _get(self, name: str, row: int) -> Any:
        """A value of an optional column, or None."""
        getter = self._at.get(name)
        value = None if getter is None else getter(row)
        return None if value == -1 else value

    def _slo(self, row: int, source_row: int) -> SLO | None:
        name = self._get("slo", row)
        if name is None:
            return self._terms.slo
        if name not in self._classes:
            there = ", ".join(sorted(self._classes)) or "none"
            raise ConfigError(f"{self._trace.name}: row {source_row} names SLO class {shown(name)}; there are {there}")
        return self._classes[name]

    def _content(self, row: int, source_row: int, past: EngineRequest | None) -> Content:
        seed, ids, tokens = self._terms.prompt_seed, self._trace.ids, self._trace.tokens
        if tokens is not None and tokens.counts[row]:
            return TokenContent(tokens.row(row))
        if ids is not None and ids.offsets[row] < ids.offsets[row + 1]:
            scope = self._get("scope", row) or ""
            if ids.widths is None:
                return IdContent(ids.row(row).tolist(), ids.width, scope, seed)
            return SegmentContent(ids.row(row).tolist(), ids.row_widths(row).tolist(), scope, seed)
        if "grows" in self._at and self._get("session", row) is not None:
            return self._turn(row, past)
        return UniqueContent(_first(self._get("content_row", row), source_row), seed)

    def _turn(self, row: int, past: EngineRequest | None) -> SessionContent:
        """A turn's content: what the session has so far, where this prompt contains it; else a new beginning."""
        session: str = self._at["session"](row)
        if not self._at["grows"](row) or past is None:
            return SessionContent(beginning(session, self._get("turn", row)), None, self._terms.prompt_seed)
        assert isinstance(past.content, SessionContent)
        return SessionContent(past.content.session, self._history(past), self._terms.prompt_seed)

    def _history(self, past: EngineRequest) -> np.ndarray | None:
        vocab = self._terms.vocab_size
        if vocab is None:
            return None
        prompt = past.content.tokens(past.num_prompt_tokens, vocab)
        return np.concatenate([prompt, np.array(past.output_token_ids, dtype=np.int64)])


def _first(own: int | None, default: Any) -> Any:
    return default if own is None else own


def decode_sampling(text: str) -> SamplingParams:
    """Sampling parameters from the JSON that `writers.encode_request` writes."""
    params: dict[str, Any] = json.loads(text)
    lists = {name: tuple(value) for name, value in params.items() if type(value) is list}
    return SamplingParams(**params | lists)


def _getter(column: np.ndarray | Labels, eager: bool) -> Callable[[int], Any]:
    """Row number to Python value."""
    if eager:
        return column.tolist().__getitem__
    return column.__getitem__ if isinstance(column, Labels) else column.item


def check_outputs(trace: Trace, max_tokens: int | None) -> None:
    """A recorded output must fit under the cap, the row's own if it has one."""
    if trace.max_tokens is None and max_tokens is None:
        return
    cap = np.full(len(trace), -1 if max_tokens is None else max_tokens, dtype=np.int64)
    if trace.max_tokens is not None:
        cap = np.where(trace.max_tokens >= 0, trace.max_tokens, cap)
    over = np.flatnonzero((cap >= 0) & (trace.output_tokens > cap))
    if len(over):
        row = over[0]
        raise TraceError(
            f"{trace.name}: row {trace.source_row[row]} has an output of {trace.output_tokens[row]} tokens, "
            f"above max_tokens={cap[row]} ({len(over)} such rows)"
        )


def visible_ns(trace: Trace) -> np.ndarray:
    """When each row is visible to the engine, int64 [N]: after its preparation, where the trace brings one."""
    own = trace.preparation_ns
    return trace.arrival_ns if own is None else trace.arrival_ns + np.where(own >= 0, own, 0)


class StreamSource:
    """Open loop over parts of a trace in order of arrival; a part is dropped when its last request has arrived."""

    def __init__(self, parts: Iterable[Trace], terms: Terms) -> None:
        self._parts: Iterator[Trace] = iter(parts)
        self._terms = terms
        self._row = 0
        self._arrival: list[int] = []
        self._visible: list[int] = []
        self._rows: Rows
        self._advance()

    def _advance(self) -> None:
        """To the next part that has rows."""
        self._row, self._visible = 0, []
        for part in self._parts:
            if len(part):
                self._rows = Rows(part, self._terms)
                self._arrival = part.arrival_ns.tolist()
                self._visible = visible_ns(part).tolist()
                return

    def peek(self) -> int | None:
        return self._visible[self._row] if self._visible else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        due: list[EngineRequest] = []
        while self._visible and self._visible[self._row] <= now_ns:
            visible, row = self._visible, self._row
            while row < len(visible) and visible[row] <= now_ns:
                due.append(self._rows.request(row, self._arrival[row]))
                row += 1
            self._row = row
            if row == len(visible):
                self._advance()
        return due

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        pass


UNSERVED = ("rejected", "aborted", "failed")


class SessionSource:
    """A trace in which tied requests wait for the ends of all that they follow; all other rows arrive as recorded.

    A tied request arrives its think time after the last of these ends and deliveries, whatever the ends were. With
    `abandon` what follows a request that was rejected, aborted or failed never arrives, directly or not: `abandoned`
    counts it.
    """

    def __init__(self, trace: Trace, terms: Terms, abandon: bool = False) -> None:
        assert trace.after is not None and trace.think_ns is not None
        self._trace, self._rows = trace, Rows(trace, terms, eager=False)
        self._abandon, self.abandoned = abandon, 0
        self._roots = iter(np.flatnonzero(trace.after < 0).tolist())
        self._followers, self._followed = _edges(trace)
        self._open = np.bincount(self._followers, minlength=len(trace))  # ends that each row still waits for
        self._ready: dict[int, tuple[int, EngineRequest | None]] = {}  # of rows that wait for more: last end, past
        self._preparation = visible_ns(trace) - trace.arrival_ns
        self._due: list[tuple[int, int, int, EngineRequest | None]] = []  # (visible, row, arrival, followed)
        self._in_flight: dict[str, int] = {}
        self._next_root()

    def _next_root(self) -> None:
        row = next(self._roots, None)
        if row is not None:
            self._push(row, int(self._trace.arrival_ns[row]), None)

    def _push(self, row: int, arrival_ns: int, past: EngineRequest | None) -> None:
        heappush(self._due, (arrival_ns + int(self._preparation[row]), row, arrival_ns, past))

    def peek(self) -> int | None:
        return self._due[0][0] if self._due else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        due: list[EngineRequest] = []
        while self._due and self._due[0][0] <= now_ns:
            _, row, arrival_ns, past = heappop(self._due)
            if past is None:
                self._next_root()
            request = self._rows.request(row, arrival_ns, past)
            if self._children(row):
                self._in_flight[request.request_id] = row
            due.append(request)
        return due

    def _children(self, row: int) -> list[int]:
        """Rows that follow this one."""
        low, high = np.searchsorted(self._followed, [row, row + 1])
        children: list[int] = self._followers[low:high].tolist()
        return children

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        row = self._in_flight.pop(request.logical_id, None)
        if row is None:
            return
        if self._abandon and request.state in UNSERVED:
            self._give_up(row)
            return
        for child in self._children(row):
            self._one_ended(child, row, request, now_ns + request.delivery_ns)

    def _one_ended(self, child: int, row: int, request: EngineRequest, end_ns: int) -> None:
        """`row`, which `child` waits for, ended and was delivered at `end_ns`."""
        after, think = self._trace.after, self._trace.think_ns
        assert after is not None and think is not None
        last_ns, past = self._ready.pop(child, (end_ns, None))
        last_ns, past = max(last_ns, end_ns), request if after[child] == row else past
        self._open[child] -= 1
        if self._open[child] > 0:
            self._ready[child] = last_ns, past
        elif self._open[child] == 0:  # below: it was given up
            self._push(child, last_ns + int(think[child]), past)

    def _give_up(self, row: int) -> None:
        """Nothing that follows `row` will arrive."""
        lost = self._children(row)
        for child in lost:
            if self._open[child] > 0:
                self._open[child] = 0
                self._ready.pop(child, None)
                self.abandoned += 1
                lost += self._children(child)


def _edges(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Who follows whom, ordered by whom, then by who."""
    assert trace.after is not None
    children = np.flatnonzero(trace.after >= 0)
    parents = trace.after[children]
    if trace.also_after is not None:
        children = np.concatenate([children, np.repeat(np.arange(len(trace)), trace.also_after.counts)])
        parents = np.concatenate([parents, trace.also_after.values])
    order = np.lexsort((children, parents))
    return children[order], parents[order]


class Until:
    """A source that ends: what would arrive at or after `stop_ns` is not offered any more."""

    def __init__(self, source: Source, stop_ns: int) -> None:
        self._source, self._stop_ns = source, stop_ns

    @property
    def abandoned(self) -> int:
        """Requests that never arrived because one that they follow failed."""
        return getattr(self._source, "abandoned", 0)

    def peek(self) -> int | None:
        due = self._source.peek()
        return due if due is not None and due < self._stop_ns else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        return self._source.pop(min(now_ns, self._stop_ns - 1))

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        self._source.finished(request, now_ns)
