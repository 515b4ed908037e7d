"""What a vLLM engine does, as the rows of a schedlab run: requests, steps, decisions.

A step is logged when its output has come. With two steps in flight, the second begins when the first has ended.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedlab.framework.request import EngineRequest
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow
from schedlab.framework.step import Decision
from schedlab.framework.vllm.books import VllmBooks


class Decided(NamedTuple):
    """A decision, and what there was when it was taken."""

    decision: Decision
    context_tokens: int
    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    scheduler_us: float


class Journal:
    """Keeps the rows of one scheduler. `finished(request, now_ns)` is called after the row of each request."""

    def __init__(self, recorder: Recorder, finished: Callable[[EngineRequest, int], None] | None = None) -> None:
        self.recorder = recorder
        self.finished = finished
        self.num_steps = 0
        self._decided: deque[Decided] = deque()
        self._last_token_ns: dict[EngineRequest, int] = {}
        self._ended_ns = 0

    def arrived(self, request: EngineRequest) -> None:
        """`request` was accepted."""

    def decided(self, decision: Decision, books: VllmBooks, scheduler_us: float) -> None:
        """A step is on its way; called before requests move on."""
        members = books.decode_set
        if decision.decodes_all:
            context = members.total_base + len(decision.decodes) * (members.tick + 1)
        else:
            context = sum([request.num_computed_tokens + 1 for request in decision.decodes])
        context += sum([start + count for _, start, count in decision.prefills])
        self._decided.append(
            Decided(
                decision, context, len(books.running) + len(books.ending), len(books.waiting) + len(books.blocked),
                books.num_free_blocks, books.num_cached_blocks, scheduler_us,
            )
        )  # fmt: skip

    def admitted(self, request: EngineRequest, start: int, now_ns: int) -> None:
        """`request` begins at `start`: for the first time, or again after it was preempted."""
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = now_ns
            request.cached_tokens = start if request.content.has_identity else None
        elif request._state == "preempted":
            request.resumed_tokens += start
            request.recomputed_tokens += max(request.lost_tokens - start, 0)
            request.lost_tokens = 0

    def executed(self, emitted: list[EngineRequest], now_ns: int) -> None:
        """The oldest step on its way has run, and each of `emitted` got a token."""
        row = self._decided.popleft()
        decision = row.decision
        did = decision.prefills or decision.decodes or decision.preempted or decision.rejected
        if did or decision.idle_until_ns is not None:
            self._log(row, now_ns)
            self.num_steps += 1
        gaps: Counter[int] = Counter()
        for request in emitted:
            last = self._last_token_ns.get(request)
            if last is None:
                request._first_token_ns = now_ns
            else:
                gaps[now_ns - last] += 1
            self._last_token_ns[request] = now_ns
        for gap_ns, count in gaps.items():
            self.recorder.gap(gap_ns, count)
        self._ended_ns = now_ns

    def _log(self, row: Decided, now_ns: int) -> None:
        decision = row.decision
        self._log_decision(decision)
        began = max(decision.now_ns, self._ended_ns)
        runs = bool(decision.prefills or decision.decodes)
        self.recorder.step(StepRow(
            self.num_steps, 1, began, now_ns - began if runs else 0, sum(p.tokens for p in decision.prefills),
            len(decision.decodes), len(decision.prefills), len(decision.decodes), row.context_tokens, row.running,
            row.waiting, row.free_blocks, row.cached_blocks, 0, None, row.scheduler_us,
        ))  # fmt: skip

    def _log_decision(self, decision: Decision) -> None:
        if decision.decodes_all and not (
            decision.prefills or decision.preempted or decision.rejected or decision.refusals
        ):
            self.recorder.decode_all(self.num_steps, decision.now_ns)
            return
        idle = decision.idle_until_ns
        self.recorder.decision(
            self.num_steps,
            decision.now_ns,
            [(victim.request_id, mode) for victim, mode, _ in decision.preempted],
            [(prefill.request.request_id, prefill.tokens) for prefill in decision.prefills],
            "all" if decision.decodes_all else [request.request_id for request in decision.decodes],
            decision.decodes_at,
            decision.refusals,
            None if idle is None or math.isinf(idle) else int(idle),
            [prefill.start for prefill in decision.prefills],
            [(request.request_id, reason) for request, reason in decision.rejected],
        )

    def ended(self, request: EngineRequest, output_token_ids: list[int], now_ns: int) -> None:
        """`request` is in its terminal state."""
        self._last_token_ns.pop(request, None)
        request.output_token_ids = output_token_ids
        request.finished_ns = now_ns
        self.recorder.request(request)
        if self.finished is not None:
            self.finished(request, now_ns)

    def close(self, backlog_end: int, counters: Mapping[str, int]) -> Any:
        """The engine ends; `backlog_end` requests are left."""
        return self.recorder.close(backlog_end=backlog_end, counters=counters)
