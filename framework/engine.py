"""The engine: between steps commit, aborts and arrivals, then one step decided by the policy and run by the executor.

Owns requests, KV blocks and time; the order of events at a boundary is fixed here. Knows no policy, no trace format, and
not how an executor computes or a jump is made.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedlab.framework import fast_forward, invariants
from schedlab.framework.batch import Batch, Columns, Prefill
from schedlab.framework.clock import Clock
from schedlab.framework.errors import ConfigError, PolicyError, PolicyStalled
from schedlab.framework.executor import Executor, StepResult
from schedlab.framework.ledger import Ledger
from schedlab.framework.policy import Aborted, Admitted, Arrived, Event, Finished, Policy, Preempted, Progressed
from schedlab.framework.predictors import Predictor
from schedlab.framework.record import Recorder
from schedlab.framework.request import EngineRequest, State
from schedlab.framework.source import Source
from schedlab.framework.step import Step

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The scheduler's limits, named as in vLLM where vLLM has them.

    `num_blocks`: KV blocks on the device. `swap_space_gib`: host memory for swapped requests. `fast_forward` and
    `honour_holds` change how a standing decision is executed, never what is decided. `audit_every`: steps between full
    audits of the books.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    enable_prefix_caching: bool = True
    swap_space_gib: float = 0.0
    fast_forward: bool = True
    honour_holds: bool = True
    audit_every: int = 1000

    def __post_init__(self) -> None:
        for key in ("num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "audit_every"):
            if getattr(self, key) < 1:
                raise ConfigError(f"engine.{key}: expected a number of at least 1, found {getattr(self, key)}")
        if not 0 <= self.swap_space_gib < math.inf:
            raise ConfigError(f"engine.swap_space_gib: expected a size of at least 0, found {self.swap_space_gib}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"engine.max_num_batched_tokens: expected at least engine.max_num_seqs = {self.max_num_seqs}, so that all "
                f"running requests can decode in one step; found {self.max_num_batched_tokens}"
            )


class Engine:
    """Runs one policy on one executor over one source. `run` to the end, or `step` by step."""

    def __init__(
        self,
        policy: Policy,
        executor: Executor,
        source: Source,
        config: EngineConfig,
        clock: Clock,
        recorder: Recorder,
        predictor: Predictor | None = None,
    ) -> None:
        if policy.needs_prediction and predictor is None:
            raise ConfigError(f"policy {_name(policy)} reads predicted_output_tokens: choose a predictor other than none")
        self.policy = policy
        self.executor = executor
        self.source = source
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.predictor = predictor
        self.num_steps = 0
        self.ledger = self._allocate()
        self.columns = self._columns() if executor.needs_inputs else None
        self._observe = policy.observe if type(policy).observe is not Policy.observe else None
        self._requests: dict[str, EngineRequest] = {}
        self._aborts: list[tuple[int, int, EngineRequest]] = []
        self._abort_ids: list[str] = []
        self._standing_until: float | None = None  # a held decision stands until this boundary; None: ask the policy
        self._served: dict[str, int] = {}
        self._modelled_us = getattr(executor, "scheduler_us", 0.0)
        self._jump = fast_forward.jumper(self) if config.fast_forward else None

    def _allocate(self) -> Ledger:
        config, executor = self.config, self.executor
        block_bytes = executor.block_bytes(config.block_size)
        num_host_blocks = int(config.swap_space_gib * GIB // block_bytes) if config.swap_space_gib else 0
        executor.allocate(config.num_blocks, config.block_size, num_host_blocks, config.max_num_seqs)
        return Ledger(
            config.num_blocks,
            config.block_size,
            num_host_blocks,
            config.max_num_seqs,
            prefix_caching=config.enable_prefix_caching,
            on_free=getattr(executor, "discard", None),
        )

    def _columns(self) -> Columns:
        config = self.config
        widest = min(-(-config.max_model_len // config.block_size), config.num_blocks)
        return Columns(config.max_num_seqs, config.max_model_len, widest, config.block_size)

    # -- running ------------------------------------------------------------------------------------------------------

    @property
    def now_ns(self) -> int:
        return self.clock.now()

    @property
    def num_unfinished(self) -> int:
        """Requests that are visible and not yet in a terminal state."""
        return len(self._requests)

    def run(self, on_step: Callable[[Engine], None] | None = None) -> None:
        """Step until the source is exhausted and nothing is left; `on_step` is called after every boundary."""
        while self.step():
            if on_step is not None:
                on_step(self)

    def step(self) -> bool:
        """One boundary and one step (or one jump over standing steps); False when nothing is left to do."""
        now = self.clock.now()
        self._take_aborts(now)
        self._take_arrivals(now)
        if not self._requests:
            return self._await_arrival()
        if self._jump is not None and self._standing_until is not None and self._jump(now):
            return True
        self.clock.start()
        step, scheduler_us = self._decide(now)
        batch = self._batch(step)
        if step._idle_until_ns is not None:
            self._idle(step, batch)
            return True
        result = self.executor.execute(batch)
        self.clock.stop(result.duration_ns)
        self._commit(step, batch, result, scheduler_us)
        return True

    def submit(self, request: EngineRequest) -> None:
        """`request` becomes visible now: it waits, or is rejected if it can never fit."""
        now = self.clock.now()
        if request._request_id in self._requests:
            raise ConfigError(f"request {request._request_id}: a request of this name is already in the engine")
        reason = self._never_fits(request)
        if reason is not None:
            request.reason = reason
            self._record_end(request, "rejected", now)
            return
        self._set_limits(request)
        self._requests[request._request_id] = request
        self._standing_until = None
        self.ledger.arrive(request)
        if request.abort_ns is not None:
            heapq.heappush(self._aborts, (request.abort_ns, request.order, request))
        self._tell(Arrived, request)

    def abort(self, request_id: str) -> None:
        """Withdraw a request at the next boundary; unknown or finished ones are ignored."""
        self._abort_ids.append(request_id)

    def audit(self) -> None:
        """Check every invariant of the books; raises AssertionError on the first that is broken."""
        invariants.audit(self.ledger)

    # -- arrivals and aborts --------------------------------------------------------------------------------------------

    def _take_arrivals(self, now: int) -> None:
        earliest = self.source.peek()
        if earliest is None or earliest > now:
            return
        for request in self.source.pop(now):
            self.submit(request)
        if self._aborts:
            self._take_aborts(now)  # what was withdrawn before it became visible is never scheduled
        if self.source.peek() is None:
            self.recorder.last_arrival(now, self._tokens_served())

    def _take_aborts(self, now: int) -> None:
        while self._aborts and self._aborts[0][0] <= now:
            self._abort_now(heapq.heappop(self._aborts)[2], now)
        if self._abort_ids:
            due, self._abort_ids = self._abort_ids, []
            for request_id in due:
                if request_id in self._requests:
                    self._abort_now(self._requests[request_id], now)

    def _abort_now(self, request: EngineRequest, now: int) -> None:
        if request._request_id not in self._requests:
            return
        self._leave_columns(request, request.slot)
        self.ledger.leave(request)
        self._end(request, "aborted", now)
        self._tell(Aborted, request)

    def next_event_ns(self) -> float:
        """Time of the next arrival or abort; infinite if none is known."""
        while self._aborts and self._aborts[0][2]._request_id not in self._requests:
            heapq.heappop(self._aborts)
        arrival = self.source.peek()
        return min(math.inf if arrival is None else arrival, self._aborts[0][0] if self._aborts else math.inf)

    def _await_arrival(self) -> bool:
        arrival = self.source.peek()
        if arrival is None:
            return False
        self.clock.idle_until(arrival)
        return True

    def _never_fits(self, request: EngineRequest) -> str | None:
        prompt, recorded = request._num_prompt_tokens, request.recorded_output_tokens
        pool, model = self.config.num_blocks * self.config.block_size, self.config.max_model_len
        if prompt < 1 or (recorded is not None and recorded < 1):
            return f"empty: {prompt} prompt tokens, {recorded} output tokens"
        needed, length = (prompt + 1, prompt + 1) if recorded is None else (prompt + recorded - 1, prompt + recorded)
        if needed > pool:
            return f"needs {needed} tokens of KV cache, the pool holds {pool}"
        if length > model:
            return f"needs {length} tokens, max_model_len is {model}"
        return None

    def _set_limits(self, request: EngineRequest) -> None:
        """Where it ends at the latest: recorded or allowed length, the model's limit, or the pool's."""
        if request._max_tokens < 0:
            request._max_tokens = self.config.max_model_len - request._num_prompt_tokens
        recorded = request.recorded_output_tokens
        wanted = request._num_prompt_tokens + (request._max_tokens if recorded is None else recorded)
        pool = self.config.num_blocks * self.config.block_size
        request.final_tokens = min(wanted, self.config.max_model_len, pool + 1)
        if self.predictor is not None:
            request._predicted = self.predictor.predict(request)

    # -- deciding -------------------------------------------------------------------------------------------------------

    def _decide(self, now: int) -> tuple[Step, float]:
        step = Step(self.ledger, _name(self.policy), self.num_steps, now, self.config.max_num_batched_tokens)
        if self.decision_stands(now):
            step.grant_decodes()
            step.close()
            return step, 0.0
        self._standing_until = None
        started = time.perf_counter_ns()
        self.policy.schedule(step)
        elapsed = (time.perf_counter_ns() - started) / 1000
        step.close()
        self._check(step, now)
        return step, elapsed if self.clock.measures else self._modelled_us

    def decision_stands(self, now: int) -> bool:
        """Whether a held decision covers the step that begins now."""
        if self._standing_until is None or now >= self._standing_until:
            return False
        need = len(self.ledger.cohort.needing_block())
        cache = self.ledger.cache
        return need <= cache.num_free and not (need and cache.eviction_disturbs(need))

    def _check(self, step: Step, now: int) -> None:
        invariants.check_step(step, self.config.max_num_batched_tokens, self.ledger)
        name = _name(self.policy)
        granted = bool(step._prefills or step._decodes)
        if step._idle_until_ns is not None:
            if granted:
                raise PolicyError(name, "granted tokens and called idle_until in one step")
            if step._idle_until_ns <= now or min(step._idle_until_ns, self.next_event_ns()) == math.inf:
                raise PolicyStalled(name, f"idle_until({step._idle_until_ns}) at {now} ns never wakes")
        elif not granted:
            raise PolicyStalled(name, "granted nothing and did not idle: " + self._head_lacks(step))
        if step._hold_until_ns is not None:
            members = self.ledger.cohort.members
            if step._prefills or step._preempted or step._decodes != members:
                raise PolicyError(name, "hold is legal only when a step grants one token to all of decoding, and no more")

    def _head_lacks(self, step: Step) -> str:
        ledger = self.ledger
        head = next(iter(ledger.running), None) or (ledger.waiting[0] if ledger.waiting else step._preempted[0][0])
        return (
            f"request {head._request_id} ({head._state}) needs {head.num_uncomputed_tokens} tokens; "
            f"{len(ledger.free_slots)} slots and {ledger.cache.num_free} blocks are free"
        )

    def _batch(self, step: Step) -> Batch:
        ledger, decodes = self.ledger, step._decodes
        cohort = ledger.cohort
        if decodes is cohort.members:
            context = cohort.context + len(decodes)
            decodes = list(decodes) if step._prefills else decodes  # members change when a prompt is done
        else:
            context = sum(request.num_computed_tokens for request in decodes) + len(decodes)
        tokens = sum(prefill.count for prefill in step._prefills) if step._prefills else 0
        batch = Batch(
            step._prefills, decodes, step._decodes_at, tokens, context, ledger.copies_out, ledger.copies_in
        )
        if self.columns is not None:
            self._write_columns(step, batch, self.columns)
        return batch

    def _write_columns(self, step: Step, batch: Batch, columns: Columns) -> None:
        for victim, _, slot in step._preempted:
            columns.leave(victim, slot)
        for request in step._admitted:
            columns.enter(request, self.executor.prompt_token_ids(request))
        batch.inputs = columns.inputs(batch, self.ledger.cohort)

    def _idle(self, step: Step, batch: Batch) -> None:
        """The policy chose to wait: run pending copies, pass the time, move what was preempted."""
        assert step._idle_until_ns is not None
        duration = 0
        if batch.copies_out:
            duration = self.executor.execute(batch).duration_ns
            self.clock.stop(duration)
        self._move(step, step._now_ns)
        self._log(step, batch, None, duration, 0.0)
        wake = min(step._idle_until_ns, self.next_event_ns())
        if self.clock.now() < wake:
            self.clock.idle_until(int(wake))

    # -- committing -------------------------------------------------------------------------------------------------------

    def _commit(self, step: Step, batch: Batch, result: StepResult, scheduler_us: float) -> None:
        now = self.clock.now()
        self._log(step, batch, result, result.duration_ns, scheduler_us)
        if self.columns is not None and result.tokens is not None:
            self.columns.store(batch, result.tokens)
        if step._preempted or step._prefills or self.ledger.copies_out:
            self._move(step, step._now_ns)
        if self._observe is not None:
            prefills = tuple((prefill.request, prefill.count) for prefill in batch.prefills)
            self._tell(Progressed, prefills, tuple(batch.decodes), 1)
        if result.failed:
            batch, result = self._drop_failed(batch, result, now)
        ended = self._progress(batch, result, now)
        if step._hold_until_ns is not None and self.config.honour_holds:
            self._standing_until = step._hold_until_ns
        for request, state in ended:
            self._finish(request, state, now)
        if self.num_steps % self.config.audit_every == 0:
            self.audit()

    def _move(self, step: Step, now: int) -> None:
        """Preempted and admitted requests change places; what victims left behind becomes visible."""
        self.ledger.commit()
        for victim, mode, _ in step._preempted:
            self.ledger.enter_waiting(victim)
            self._tell(Preempted, victim, mode)
        for request, start in step._admitted.items():
            self._note_admission(request, start, now)
            self.ledger.enter_running(request)
            self._tell(Admitted, request, start)

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
        cohort = self.ledger.cohort
        split = [prefill.request for prefill in batch.prefills if prefill.request._cadence is cohort]
        decoded = batch.decodes + split if split else batch.decodes
        if decoded:
            self._advance(decoded, now)
        ended = [p.request for p in batch.prefills if p.request._cadence is not cohort and self._compute(p, now)]
        if result.tokens is None:
            return self._ended_by_length(batch, ended)
        return [
            (request, state)
            for request, emitted_K in zip(list(batch.requests()), result.tokens, strict=True)
            if (state := self._ended(request, emitted_K)) is not None
        ]

    def _ended_by_length(self, batch: Batch, ended: list[EngineRequest]) -> list[tuple[EngineRequest, State]]:
        """Without tokens only lengths end requests: those of `ended`, and whom the cohort knows to be done."""
        finished = self.ledger.cohort.take_finished()
        if ended:
            place = {request: i for i, request in enumerate(batch.requests())}
            finished = sorted(finished + ended, key=place.__getitem__)
        return [(request, self._ending(request)) for request in finished]

    def _advance(self, decoded: list[EngineRequest], now: int) -> None:
        cohort = self.ledger.cohort
        if decoded is cohort.members or decoded == cohort.members:
            common = len(decoded) - len(cohort.stragglers)
            if common:
                self.recorder.gap(now - cohort.emitted_ns, common)
            for emitted_ns in cohort.stragglers.values():
                self.recorder.gap(now - emitted_ns, 1)
            cohort.advance(now)
            return
        for request in decoded:
            self.recorder.gap(now - cohort.stragglers.get(request, cohort.emitted_ns), 1)
        cohort.advance_only(decoded, now)

    def _compute(self, prefill: Prefill, now: int) -> bool:
        """A grant of a request that is not decoding: it computed `count` tokens, and emitted one if these were its last.

        Returns whether it reached its final length by that.
        """
        request = prefill.request
        request._computed = prefill.start + prefill.count
        self.ledger.publish(request)
        if request._computed == request._tokens:
            request._tokens += 1
            if request._first_token_ns is None:
                request._first_token_ns = now
            else:
                self.recorder.gap(now - request.emitted_ns, 1)
            request.emitted_ns = now
            if request._tokens >= request.final_tokens:
                return True
        if request._tokens - request._computed == 1 and request._tokens > request._num_prompt_tokens:
            self.ledger.enter_decoding(request)
            if self.columns is not None:
                self.columns.refresh(request)
        return False

    def _ended(self, request: EngineRequest, emitted_K: np.ndarray) -> State | None:
        if request.num_tokens >= request.final_tokens:
            return self._ending(request)
        if request.recorded_output_tokens is None and self._stops(request, int(emitted_K[0])):
            return "finished"
        return None

    def _ending(self, request: EngineRequest) -> State:
        """It reached its final length: by what was recorded or allowed, or because model or pool hold no more."""
        recorded = request.recorded_output_tokens
        wanted = request._max_tokens if recorded is None else recorded
        if request.num_output_tokens >= wanted:
            return "finished"
        request.reason = f"outgrew max_model_len {self.config.max_model_len} or the {self.config.num_blocks} KV blocks"
        return "length_capped"

    def _stops(self, request: EngineRequest, token: int) -> bool:
        sampling = request.sampling
        if sampling is not None and token in sampling.stop_token_ids:
            return True
        return token in self.executor.eos_token_ids and not (sampling is not None and sampling.ignore_eos)

    def _drop_failed(self, batch: Batch, result: StepResult, now: int) -> tuple[Batch, StepResult]:
        """End the requests that failed in this step; what the others computed stands."""
        requests = list(batch.requests())
        failed = {requests[i]: reason for i, reason in result.failed.items()}
        at = batch.decodes_at - sum(prefill.request in failed for prefill in batch.prefills[: batch.decodes_at])
        prefills = [prefill for prefill in batch.prefills if prefill.request not in failed]
        decodes = [request for request in batch.decodes if request not in failed]
        for request, reason in failed.items():
            request.reason = reason
            self._finish(request, "failed", now)
        tokens = None if result.tokens is None else np.delete(result.tokens, list(result.failed), axis=0)
        return Batch(prefills, decodes, at), StepResult(result.duration_ns, tokens)

    def _finish(self, request: EngineRequest, state: State, now: int) -> None:
        self._leave_columns(request, request.slot)
        self.ledger.leave(request, keep=state != "failed")
        self._end(request, state, now)
        if self.predictor is not None:
            self.predictor.observe(request)
        self._tell(Finished, request)

    def _leave_columns(self, request: EngineRequest, slot: int) -> None:
        if self.columns is not None and slot >= 0:
            self.columns.leave(request, slot)

    def _end(self, request: EngineRequest, state: State, now: int) -> None:
        self._standing_until = None
        del self._requests[request._request_id]
        self._served[request._client] = self._served.get(request._client, 0) + _served(request)
        self._record_end(request, state, now)

    def _record_end(self, request: EngineRequest, state: State, now: int) -> None:
        request._state = state
        request.finished_ns = now
        self.recorder.request(request)
        self.source.finished(request, now)

    def _tokens_served(self) -> dict[str, int]:
        served = dict(self._served)
        for request in self._requests.values():
            served[request._client] = served.get(request._client, 0) + _served(request)
        return served

    # -- telling ------------------------------------------------------------------------------------------------------------

    def _tell(self, event: Callable[..., Event], *what: object) -> None:
        if self._observe is not None:
            self._observe(event(*what))

    def _log(self, step: Step, batch: Batch, result: StepResult | None, duration_ns: int, scheduler_us: float) -> None:
        ledger, recorder, now = self.ledger, self.recorder, step._now_ns
        index, decodes, prefills = self.num_steps, batch.decodes, batch.prefills
        all_decoded = bool(decodes) and decodes == ledger.cohort.members
        if all_decoded and not (prefills or step._preempted or step._refusals):
            recorder.decode_all(index, now)
        else:
            idle = step._idle_until_ns
            recorder.decision(
                index,
                now,
                [(victim._request_id, mode) for victim, mode, _ in step._preempted],
                [(request._request_id, count) for request, _, count in prefills],
                "all" if all_decoded else [request._request_id for request in decodes],
                batch.decodes_at,
                step._refusals,
                None if idle is None or math.isinf(idle) else int(idle),
            )
        context = batch.decode_context + sum(start + count for _, start, count in prefills)
        recorder.step(
            index, 1, now, duration_ns, batch.prefill_tokens, len(decodes), len(prefills), len(decodes), context,
            len(ledger.running), len(ledger.waiting), ledger.cache.num_free, ledger.cache.num_unowned,
            len(batch.copies_out) + len(batch.copies_in), None if result is None else result.bound, scheduler_us,
        )  # fmt: skip
        self.num_steps += 1


def _name(policy: Policy) -> str:
    return type(policy).__name__


def _served(request: EngineRequest) -> int:
    prompt = request._num_prompt_tokens
    return (prompt if request._first_token_ns is not None else min(request._computed, prompt)) + request.num_output_tokens
