"""What every request of a run went through, step row by step row, from the logs alone.

Time is cut into *slots*: from the start of one logged step (a row may be a jump of many) to the start of the next.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from schedlab.framework.request import NS
from schedlab.framework.results.tables import Columns, RunTables

Kind = Literal["prefill", "decode", "recompute", "swap"]
"""What a request is in: its prompt (or what it computes again), its output, or waiting after a preemption."""


class LoggedGrant(NamedTuple):
    """`tokens` computed from `start` in step row `row`; the last of a prompt `emits` a token."""

    row: int
    start: int
    tokens: int
    emits: bool


class Phase(NamedTuple):
    """Step rows [first, stop) that a request spent in one kind of activity; `grants` of a prefill."""

    kind: Kind
    first: int
    stop: int
    grants: tuple[LoggedGrant, ...] = ()


@dataclass(slots=True)
class History:
    """One request; times in integer nanoseconds, None for what it did not reach.

    `listed` are the rows with a list of decodes that name it, in order: other rows decode all.
    """

    request_id: str
    status: str
    arrival_ns: int
    visible_ns: int
    first_scheduled_ns: int | None
    first_token_ns: int | None
    finished_ns: int
    delivery_ns: int
    prompt_tokens: int
    output_tokens: int
    phases: list[Phase] = field(default_factory=list)
    listed: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Slots:
    """The rows of the steps table as intervals of time: row r lasts from `now_ns[r]` to `now_ns[r + 1]`."""

    now_ns: np.ndarray
    duration_ns: np.ndarray
    index: np.ndarray
    repeat: np.ndarray

    @classmethod
    def of(cls, steps: Columns) -> Slots:
        end = steps["now_ns"][-1:] + steps["duration_ns"][-1:]
        now = np.concatenate([steps["now_ns"], end])
        return cls(now, steps["duration_ns"], steps["index"], steps["repeat"])

    def rows(self, steps: np.ndarray) -> list[int]:
        """The rows that hold the steps of these indices."""
        rows: list[int] = (np.searchsorted(self.index, steps, "right") - 1).tolist()
        return rows

    def from_ns(self, ns: int) -> int:
        """The first row that starts at `ns` or later."""
        return int(np.searchsorted(self.now_ns[:-1], ns))


@dataclass(frozen=True)
class Histories:
    """All requests of a run in the order of the requests table. `list_rows`: rows that decode some by name."""

    slots: Slots
    requests: list[History]
    list_rows: list[int]
    decodes: np.ndarray
    """Requests that decode in each row, int64 [R]."""

    def left_out(self, history: History, phase: Phase) -> list[int]:
        """Rows of a decode phase in which others decoded by name and this request did not."""
        low, high = (bisect_left(self.list_rows, row) for row in (phase.first, phase.stop))
        mine = set(history.listed)
        return [row for row in self.list_rows[low:high] if row not in mine]

    def decoded_apart(self, history: History, phase: Phase) -> list[int]:
        """Rows of a decode phase in which this request decoded by a grant of its own and no others decoded."""
        low, high = (bisect_left(history.listed, row) for row in (phase.first, phase.stop))
        return [row for row in history.listed[low:high] if not self.decodes[row]]


def histories(run: RunTables) -> Histories:
    """From the logs of `run`, whole or as far as they go."""
    walk = _Walk(run)
    for row in range(len(run.decisions["index"])):
        walk.decide(row)
    walk.end()
    return Histories(walk.slots, list(walk.requests.values()), walk.list_rows, run.steps["decode_requests"])


@dataclass(slots=True)
class _State:
    """Where a request is: the phase that it is in since row `first`, and the tokens that it has emitted."""

    kind: Kind
    first: int
    grants: list[LoggedGrant]
    emitted: int = 0
    since: int = 0  # place among the request's listed rows where the phase began


class _Walk:
    """Goes through the decisions in order and opens and closes phases."""

    def __init__(self, run: RunTables) -> None:
        self.decisions = run.decisions
        self.slots = Slots.of(run.steps)
        self.requests = {history.request_id: history for history in _rows(run.requests)}
        self.list_rows: list[int] = []
        self._states: dict[str, _State] = {}
        index = run.decisions["index"]
        self._first, self._last = self.slots.rows(index), self.slots.rows(index + run.decisions["repeat"] - 1)
        self._all_ticks = self._ticks()

    def _ticks(self) -> np.ndarray:
        """Decode steps that were for all, summed over the rows before each; int64 [R + 1]."""
        ticks = np.zeros(len(self.slots.repeat) + 1, dtype=np.int64)
        for first, last, decodes in zip(self._first, self._last, self.decisions["decodes"], strict=True):
            if decodes == "all":
                ticks[first + 1 : last + 2] = self.slots.repeat[first : last + 1]
        return np.cumsum(ticks)

    def decide(self, at: int) -> None:
        """One decision row: victims leave, grants compute, decodes by name are noted."""
        decisions, row, last = self.decisions, self._first[at], self._last[at]
        for request_id, mode in decisions["preempted"][at]:
            self._preempt(request_id, mode, row)
        for (request_id, tokens), start in zip(decisions["grants"][at], decisions["starts"][at], strict=True):
            self._grant(request_id, row, start, tokens)
        if decisions["decodes"][at] not in ("all", []):
            self.list_rows += range(row, last + 1)
            for request_id in decisions["decodes"][at]:
                if (history := self.requests.get(request_id)) is not None:
                    history.listed += range(row, last + 1)

    def _preempt(self, request_id: str, mode: Kind, row: int) -> None:
        if (state := self._states.get(request_id)) is not None:
            self._close(request_id, state, row)
            self._states[request_id] = _State(mode, row, [], state.emitted)

    def _grant(self, request_id: str, row: int, start: int, tokens: int) -> None:
        history = self.requests.get(request_id)
        if history is None:  # still alive where the log ends
            return
        state = self._states.get(request_id)
        if state is None or state.kind in ("recompute", "swap"):
            if state is not None:
                self._close(request_id, state, row)
            state = self._states[request_id] = _State("prefill", row, [], state.emitted if state else 0)
        if state.kind == "decode":  # a decode apart from the others: it stays in its phase
            history.listed.append(row)
            return
        missing = history.prompt_tokens + state.emitted - start - tokens
        state.grants.append(LoggedGrant(row, start, tokens, emits=missing == 0))
        if missing == 0 or (missing == 1 and state.emitted):  # one token to compute, which was emitted before
            self._close(request_id, state, row + 1)
            emitted, listed = state.emitted + (missing == 0), len(history.listed)
            self._states[request_id] = _State("decode", row + 1, [], emitted, listed)

    def _close(self, request_id: str, state: _State, stop: int) -> None:
        history = self.requests[request_id]
        if state.kind == "decode":
            ticks = int(self._all_ticks[stop] - self._all_ticks[state.first])
            state.emitted += ticks + sum(int(self.slots.repeat[row]) for row in history.listed[state.since :])
        if stop > state.first:
            history.phases.append(Phase(state.kind, state.first, stop, tuple(state.grants)))

    def end(self) -> None:
        for request_id, state in self._states.items():
            self._close(request_id, state, self.slots.from_ns(self.requests[request_id].finished_ns))


def _rows(requests: Columns) -> Iterator[History]:
    """Histories without phases."""
    names = ("arrival_s", "visible_s", "first_scheduled_s", "first_token_s", "finished_s", "delivery_s")
    times = [[None if np.isnan(s) else round(s * NS) for s in requests[name].tolist()] for name in names]
    columns = (requests["request_id"], requests["status"], *times, requests["prompt_tokens"].tolist())
    for row in zip(*columns, requests["output_tokens"].tolist(), strict=True):
        yield History(*row)
