"""What an executed step changes: who moves, what is published, which tokens were emitted, who ended and how.

Knows the ledger, the columns and the recorder; knows no policy and no clock, and decides nothing. The order of events
at a boundary is engine.py's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from schedlab.framework.batch import Batch, Prefill
from schedlab.framework.columns import Columns
from schedlab.framework.executor import StepResult
from schedlab.framework.ledger import Ledger
from schedlab.framework.limits import EngineConfig, ending
from schedlab.framework.policy import Admitted, Event, Preempted, Progressed, Rejected
from schedlab.framework.request import EngineRequest, State
from schedlab.framework.results.record import Recorder
from schedlab.framework.step import Decision


class Commit:
    """Applies executed steps to the books. `finish` ends a request by itself, `leave` for another reason; `observe`
    tells the policy, if it listens."""

    def __init__(
        self,
        ledger: Ledger,
        columns: Columns | None,
        recorder: Recorder,
        config: EngineConfig,
        eos_token_ids: tuple[int, ...],
        finish: Callable[[EngineRequest, State, int], None],
        leave: Callable[[EngineRequest, State, int], None],
        observe: Callable[[Event], None] | None,
    ) -> None:
        self.ledger = ledger
        self.columns = columns
        self.recorder = recorder
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.finish = finish
        self.leave = leave
        self.observe = observe

    def part(self) -> None:
        """From the engine, which refers to this and is referred to by it."""
        self.finish = self.leave = self.observe = _parted

    def apply(self, decision: Decision, batch: Batch, result: StepResult, now: int) -> None:
        """`batch` was executed with `result`, and it is `now`."""
        if self.columns is not None and result.tokens is not None:
            self.columns.store(batch, result.tokens)
        if decision.preempted or decision.admitted:
            self.move(decision)
        if decision.rejected:
            self.turn_away(decision, now)
        if result.failed:
            ended = self._progress_without_failed(batch, result, now)
        else:
            ended = self._progress(batch, result, now)
        for request, state in ended:
            self.finish(request, state, now)

    def _progress_without_failed(self, batch: Batch, result: StepResult, now: int) -> list[tuple[EngineRequest, State]]:
        """What the requests that did not fail computed stands; those that failed end with their reason."""
        place = {request: i for i, request in enumerate(batch.requests())}
        failed = {request: result.failed[i] for request, i in place.items() if i in result.failed}
        others, theirs = _survivors(batch, result, failed)
        ended = self._progress(others, theirs, now)
        for request, reason in failed.items():
            request.reason = reason
            ended.append((request, "failed"))
        return sorted(ended, key=lambda end: place[end[0]])

    def move(self, decision: Decision) -> None:
        """Preempted and admitted requests change places; what victims left behind becomes visible."""
        self.ledger.commit()
        for victim, mode, _ in decision.preempted:
            self.ledger.enter_waiting(victim)
            if self.observe is not None:
                self.observe(Preempted(victim, mode))
        for request, start in decision.admitted.items():
            self._note_admission(request, start, decision.now_ns)
            self.ledger.enter_running(request)
            if self.observe is not None:
                self.observe(Admitted(request, start))

    def turn_away(self, decision: Decision, now: int) -> None:
        """What the policy rejected ends."""
        for request, reason in decision.rejected:
            request.reason = reason
            self.leave(request, "rejected", now)
            if self.observe is not None:
                self.observe(Rejected(request))

    def _note_admission(self, request: EngineRequest, start: int, now: int) -> None:
        if request.first_scheduled_ns is None:
            request.first_scheduled_ns = now
            request.cached_tokens = start if request.content.has_identity else None
        elif request._state == "preempted":
            request.resumed_tokens += start
            request.recomputed_tokens += max(request.lost_tokens - start, 0)
            request.lost_tokens = 0

    def _progress(self, batch: Batch, result: StepResult, now: int) -> list[tuple[EngineRequest, State]]:
        """Advance what was computed and emitted; returns who ended and how, in batch order."""
        decode_set = self.ledger.decode_set
        split = [prefill.request for prefill in batch.prefills if prefill.request._clock is decode_set]
        decoded = batch.decodes + split if split else batch.decodes
        for _ in range(batch.steps if decoded else 0):  # a chain's tokens all became visible now
            if batch.decodes_all and not split:
                self._advance_all(now)
            else:
                self._advance_only(decoded, now)
        ended = [p.request for p in batch.prefills if p.request not in split and self._compute(p, now)]
        if self.observe is not None:
            prefills = tuple([(prefill.request, prefill.tokens) for prefill in batch.prefills])
            self.observe(Progressed(prefills, tuple(batch.decodes), batch.steps))
        if result.tokens is None:
            return self._ended_by_length(batch, ended)
        return [
            (request, state)
            for request, emitted_K in zip(list(batch.requests()), result.tokens, strict=True)
            if (state := self._ended(request, emitted_K)) is not None
        ]

    def _advance_all(self, now: int) -> None:
        """All of decoding computed and emitted a token."""
        for gap_ns, count in self.gaps(now):
            self.recorder.gap(gap_ns, count)
        self.ledger.decode_set.advance(now)

    def _advance_only(self, decoded: list[EngineRequest], now: int) -> None:
        """`decoded` each computed and emitted a token; others that decode did not."""
        decode_set = self.ledger.decode_set
        for request in decoded:
            self.recorder.gap(now - decode_set.last_emitted_overrides.get(request, decode_set.emitted_ns), 1)
        decode_set.advance_only(decoded, now)

    def gaps(self, now: int) -> list[tuple[int, int]]:
        """All of decoding emit a token at `now`: the times since their last ones, each with how many it is of."""
        decode_set = self.ledger.decode_set
        if not decode_set.last_emitted_overrides:
            return [(now - decode_set.emitted_ns, len(decode_set.members))]
        together = len(decode_set.members) - len(decode_set.last_emitted_overrides)
        gaps = [(now - decode_set.emitted_ns, together)] if together else []
        return gaps + [(now - emitted_ns, 1) for emitted_ns in decode_set.last_emitted_overrides.values()]

    def _compute(self, prefill: Prefill, now: int) -> bool:
        """A grant of a request that is not decoding: it computed `count` tokens, and emitted one if these were its
        last.

        Returns whether it reached its final length by that.
        """
        request = prefill.request
        request._base_computed = prefill.start + prefill.tokens
        self.ledger.publish(request)
        if request._base_computed == request._base_tokens:
            self._emit(request, now)
            if request._base_tokens >= request.final_tokens:
                return True
        if request._base_tokens - request._base_computed == 1 and request._base_tokens > request._num_prompt_tokens:
            self.ledger.enter_decoding(request)
            if self.columns is not None:
                self.columns.refresh(request)
        return False

    def _emit(self, request: EngineRequest, now: int) -> None:
        request._base_tokens += 1
        if request._first_token_ns is None:
            request._first_token_ns = now
        else:
            self.recorder.gap(now - request.emitted_ns, 1)
        request.emitted_ns = now

    def _ended_by_length(self, batch: Batch, ended: list[EngineRequest]) -> list[tuple[EngineRequest, State]]:
        """Without tokens only lengths end requests: those of `ended`, and whom the decode_set knows to be done."""
        finished = self.ledger.decode_set.take_finished()
        if ended or (len(finished) > 1 and not batch.decodes_all):
            place = {request: i for i, request in enumerate(batch.requests())}
            finished = sorted(finished + ended, key=place.__getitem__)
        return [(request, ending(request, self.config)) for request in finished]

    def _ended(self, request: EngineRequest, emitted_K: np.ndarray) -> State | None:
        if request.num_tokens >= request.final_tokens:
            return ending(request, self.config)
        if request.recorded_output_tokens is None and self._stops(request, int(emitted_K[0])):
            return "finished"
        return None

    def _stops(self, request: EngineRequest, token: int) -> bool:
        sampling = request.sampling
        if sampling is not None and token in sampling.stop_token_ids:
            return True
        return token in self.eos_token_ids and not (sampling is not None and sampling.ignore_eos)


def _parted(*_: object) -> None:
    raise AssertionError("the engine is closed")


def _survivors(batch: Batch, result: StepResult, failed: dict[EngineRequest, str]) -> tuple[Batch, StepResult]:
    """The batch and its tokens without the requests that failed: what the others computed stands."""
    at = batch.decodes_at - sum(prefill.request in failed for prefill in batch.prefills[: batch.decodes_at])
    prefills = [prefill for prefill in batch.prefills if prefill.request not in failed]
    decodes = [request for request in batch.decodes if request not in failed]
    tokens = None if result.tokens is None else np.delete(result.tokens, list(result.failed), axis=0)
    return Batch(prefills, decodes, at, steps=batch.steps), StepResult(result.duration_ns, tokens)
