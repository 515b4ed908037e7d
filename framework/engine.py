"""The engine: between steps commit, aborts and arrivals, then one step decided by the policy and run by the executor.

Owns requests, KV blocks and time; the order of events at a boundary is fixed here. Knows no policy, no trace format,
and not how an executor computes or a jump is made.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import replace

from schedlab.framework import invariants
from schedlab.framework.admission import Admission, refusal
from schedlab.framework.attempts import leaves, leaving_times, why_it_leaves
from schedlab.framework.batch import Batch
from schedlab.framework.block_pool import AdjacentPool, BlockPool
from schedlab.framework.chain import Chains
from schedlab.framework.clock import Clock
from schedlab.framework.columns import Columns
from schedlab.framework.commit import Commit
from schedlab.framework.errors import ConfigError, PolicyError, PolicyStalled, SchedlabError, policy_fault
from schedlab.framework.executor import Executor, StepResult
from schedlab.framework.journal import Journal
from schedlab.framework.jump import Jump, StandingCost, can_jump
from schedlab.framework.ledger import Ledger
from schedlab.framework.limits import EngineConfig, ending, never_fits, set_limits, tokens_served
from schedlab.framework.policy import Aborted, Arrived, Event, Finished, Policy, Progressed, check_policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import EngineRequest, State
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import Source
from schedlab.framework.step import Decision, Step

__all__ = ["Engine", "EngineConfig"]

GIB = 1 << 30


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
        admission: Admission | None = None,
    ) -> None:
        check_policy(policy)
        self.name = type(policy).__name__
        if policy.needs_prediction and predictor is None:
            raise ConfigError(
                f"policy {self.name} reads predicted_output_tokens, and predictor=none predicts nothing: "
                f"choose predictor=max, oracle, noisy or quantile"
            )
        if config.max_chained_steps > 1 and not getattr(executor, "chains", False):
            kind = type(executor).__name__
            raise ConfigError(f"engine.max_chained_steps: expected 1, as {kind} runs one step at a time")
        self.policy = policy
        self.executor = executor
        self.source = source
        self.config = config
        self.clock = clock
        self.recorder = recorder
        self.predictor = predictor
        self.admission = admission
        self.ledger = self._allocate()
        self.columns = self._columns() if executor.needs_inputs else None
        self.standing_until: float | None = None  # a held decision stands before this time; None: ask the policy
        self.horizon_ns: float = math.inf  # where the caller of `step` wants the engine back
        self._idle_until_ns: float | None = None  # what the policy chose, while nothing that would wake it has happened
        self._awaits_release = False  # it idles because blocks that could be granted are held
        self._observe = self._tell if type(policy).observe is not Policy.observe else None
        self._requests: dict[str, EngineRequest] = {}
        self._aborts: list[tuple[int, int, EngineRequest]] = []
        self._abort_ids: list[str] = []
        self._arrival_ns = math.inf
        self._served: dict[str, int] = {}
        self._demanded: dict[str, int] = {}
        self._boundaries = 0
        self._next_audit = config.audit_every
        self._modelled_us: float = getattr(executor, "scheduler_us", 0.0)
        self.journal = Journal(recorder, self.ledger, self._modelled_us)
        self._chains = Chains(self.ledger, config.max_chained_steps)
        self.commit = Commit(
            self.ledger, self.columns, recorder, config, executor.eos_token_ids, self.finish, self._leave,
            self._observe,
        )  # fmt: skip
        self._jump: Jump | None = None
        if config.fast_forward and can_jump(clock, executor):
            decode_cost: Callable[[int], StandingCost] = executor.decode_cost  # type: ignore[attr-defined]
            self._jump = Jump(self.ledger, self._chains, self.commit, self.journal, decode_cost)

    def _allocate(self) -> Ledger:
        config, executor = self.config, self.executor
        block_bytes = executor.block_bytes(config.block_size)
        num_host_blocks = int(config.swap_space_gib * GIB // block_bytes) if config.swap_space_gib else 0
        executor.allocate(config.num_blocks, config.block_size, num_host_blocks, config.max_num_seqs)
        pool = AdjacentPool if getattr(executor, "adjacent_blocks", False) else BlockPool
        return Ledger(
            pool(config.num_blocks, getattr(executor, "discard", None)),
            config.block_size,
            num_host_blocks,
            config.max_num_seqs,
            prefix_caching=config.enable_prefix_caching,
            eviction=config.eviction,
            watermark_blocks=config.watermark_blocks,
        )

    def _columns(self) -> Columns:
        config = self.config
        widest = min(-(-config.max_model_len // config.block_size), config.num_blocks)
        return Columns(config.max_num_seqs, config.max_model_len, widest, config.block_size)

    # -- running --

    @property
    def now_ns(self) -> int:
        return self.clock.now()

    @property
    def num_steps(self) -> int:
        """Steps executed so far, each of a jump and of a chain counted."""
        return self.journal.num_steps

    @property
    def num_unfinished(self) -> int:
        """Requests that are visible and not yet in a terminal state."""
        return len(self._requests)

    def run(self, on_step: Callable[[Engine], None] | None = None) -> None:
        """Step until the source is exhausted and nothing is left; `on_step` is called after every boundary."""
        while self.step():
            if on_step is not None:
                on_step(self)

    def close(self) -> None:
        """Give back the KV memory; nothing can be run afterwards. What refers to nothing else is then free at once:
        garbage collections may be far apart, and a device has no room for a second engine meanwhile."""
        release = getattr(self.executor, "release", None)
        if release is not None:
            release()
        self.commit.part()
        self._observe = None

    def step(self, horizon_ns: float = math.inf) -> bool:
        """One boundary and one step (or one jump over standing steps); False when nothing is left to do.

        At `horizon_ns` the caller may want to put further requests into the source: a jump ends with the step that
        reaches it, and idle time passes no further; the next call goes on with either as if it had not stopped.
        """
        self.horizon_ns = horizon_ns
        now = self.clock.boundary()
        if self._aborts or self._abort_ids:
            self._take_aborts(now)
        self._arrival_ns = self._next_arrival()
        while now >= self._arrival_ns:  # what ends on arrival may bring another arrival of this instant
            self._take_arrivals(now)
        if not self._requests:
            return self._await_arrival()
        if self._idle_until_ns is not None and now < self._idle_until_ns:
            self._check_wakes(self._idle_until_ns, now)
            self._pass_time(self._idle_until_ns)
            return True
        self._boundaries += 1
        if self._boundaries >= self._next_audit:
            self.audit()
            self._next_audit = self._boundaries + self._audit_spacing()
        if self.standing_until is not None and now < self.standing_until and self.ledger.next_tick_fits():
            self._continue(now)
        else:
            self._ask(now)
        return True

    def submit(self, request: EngineRequest) -> None:
        """`request` becomes visible now: it waits, or is rejected if it can never fit or finds the queue full."""
        if request._request_id in self._requests:
            raise ConfigError(f"request {request._request_id}: a request of this name is already in the engine")
        self._idle_until_ns = None
        now = self.clock.now()
        reason = never_fits(request, self.config)
        if reason is None and request not in self.ledger.held:
            reason = refusal(request, self.ledger, self.config, self.admission, now)
        if reason is not None:
            request.reason = reason
            self._record_end(request, "rejected", now)
            return
        set_limits(request, self.config)
        if self.predictor is not None:
            request._predicted = self.predictor.predict(request)
        self._requests[request._request_id] = request
        self._demanded[request._client] = self._demanded.get(request._client, 0) + request.final_tokens
        self.standing_until = None
        self.ledger.arrive(request)
        if request.abort_ns is not None or request.tried is not None:
            for due_ns in leaving_times(request):
                heapq.heappush(self._aborts, (due_ns, request.order, request))
        if self._observe is not None:
            self._observe(Arrived(request))

    def abort(self, request_id: str) -> None:
        """Withdraw a request at the next boundary; unknown or finished ones are ignored."""
        self._abort_ids.append(request_id)

    def reserve(self, request: EngineRequest) -> bool:
        """Take blocks for a request whose keys and values come from another engine, before it arrives; False if there
        are too few."""
        reserved = self.ledger.reserve(request)
        if reserved:
            self.standing_until = None
        return reserved

    def release(self, request: EngineRequest, now_ns: int) -> None:
        """What `request` handed over has been read: others may have its blocks."""
        self.ledger.release(request)
        if self._awaits_release:
            self._awaits_release = False
            self._idle_until_ns = None
            self.clock.idle_until(now_ns)

    def audit(self) -> None:
        """Check every invariant of the books; raises AssertionError on the first that is broken."""
        invariants.audit(self.ledger)

    def _audit_spacing(self) -> int:
        """Boundaries to the next audit: as configured, but more of them where the books are large. An audit looks at
        every entry, which at one boundary for each costs less than 3 % of a run. 1 is every boundary, at any cost.
        """
        every = self.config.audit_every
        return every if every == 1 else max(every, invariants.num_entries(self.ledger))

    # -- arrivals and aborts --

    def _take_arrivals(self, now: int) -> None:
        for request in self.source.pop(now):
            self.submit(request)
        if self._aborts:
            self._take_aborts(now)  # what was withdrawn before it became visible is never scheduled
        self._arrival_ns = self._next_arrival()
        if self._arrival_ns == math.inf:
            self.note_last_arrival()

    def note_last_arrival(self) -> None:
        """No further arrival is known: what each client was served by now is what its share is judged by."""
        self.recorder.last_arrival(self.clock.now(), self._tokens_served(), self._demanded)

    def _next_arrival(self) -> float:
        arrival = self.source.peek()
        return math.inf if arrival is None else arrival

    def _await_arrival(self) -> bool:
        if self._arrival_ns == math.inf:
            return False
        self.clock.idle_until(int(min(self._arrival_ns, self.horizon_ns)))
        return True

    def _take_aborts(self, now: int) -> None:
        while self._aborts and self._aborts[0][0] <= now:
            due_ns, _, request = heapq.heappop(self._aborts)
            if leaves(request, due_ns):
                self._withdraw(request, now, why_it_leaves(request, due_ns))
        if self._abort_ids:
            due, self._abort_ids = self._abort_ids, []
            for request_id in due:
                if request_id in self._requests:
                    self._withdraw(self._requests[request_id], now)

    def _withdraw(self, request: EngineRequest, now: int, reason: str | None = None) -> None:
        if self._requests.get(request._request_id) is not request:
            return
        self._idle_until_ns, request.reason = None, reason
        self._leave(request, "aborted", now)
        if self._observe is not None:
            self._observe(Aborted(request))

    def next_event_ns(self) -> float:
        """Time of the next arrival or abort; infinite if none is known."""
        while self._aborts and not self._may_leave(self._aborts[0]):
            heapq.heappop(self._aborts)
        return min(self._arrival_ns, self._aborts[0][0]) if self._aborts else self._arrival_ns

    def _may_leave(self, leaving: tuple[int, int, EngineRequest]) -> bool:
        due_ns, _, request = leaving
        return request._request_id in self._requests and leaves(request, due_ns)

    def wakes_ns(self) -> float:
        """When the next step begins if nothing new is put into the source: now, when idling ends, or never."""
        if not self._requests:
            return math.inf
        now = self.clock.now()
        if self._idle_until_ns is None:
            return now
        return max(now, min(self._idle_until_ns, self.next_event_ns()))

    # -- deciding --

    def _continue(self, now: int) -> None:
        """A held decision stands: decode all again without asking the policy."""
        if self._jump is not None:
            self._fast_forward(self._jump, now, None)
            return
        self.clock.start()
        step = Step(self.ledger, self.name, self.num_steps, now, self.config.max_num_batched_tokens)
        step.grant_decodes()
        self._execute(step.close(), 0.0 if self.clock.measures else self._modelled_us, self._chains.take())

    def _ask(self, now: int) -> None:
        self.standing_until = self._idle_until_ns = None
        self._awaits_release = False
        self.clock.start()
        step = Step(self.ledger, self.name, self.num_steps, now, self.config.max_num_batched_tokens)
        scheduler_us = self._schedule(step)
        decision = step.close()
        held = decision.hold_until_ns is not None
        if held:
            self._check_held(decision)
        else:
            self._check(decision)
        if decision.idle_until_ns is not None or not (decision.prefills or decision.decodes):
            self._idle(decision)
            return
        if held and self.config.honour_holds:
            self.standing_until = decision.hold_until_ns
            if self._jump is not None:
                self._fast_forward(self._jump, now, decision)
                return
        self._execute(decision, scheduler_us, self._chains.take() if held else 1)

    def _schedule(self, step: Step) -> float:
        """Let the policy decide; returns its time in microseconds, measured or modelled. Its faults name it."""
        started = time.perf_counter_ns() if self.clock.measures else 0
        try:
            self.policy.schedule(step)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "schedule", error) from error
        return (time.perf_counter_ns() - started) / 1000 if started else self._modelled_us

    def _tell(self, event: Event) -> None:
        """Let the policy hear of `event`."""
        try:
            self.policy.observe(event)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "observe", error) from error

    def _check(self, decision: Decision) -> None:
        if decision.prefills:
            invariants.check_step(decision, self.config.max_num_batched_tokens, self.ledger)
        if decision.idle_until_ns is not None:
            if decision.prefills or decision.decodes:
                raise PolicyError(self.name, "granted tokens and called idle_until in one step")
            if len(decision.rejected) < len(self._requests):
                self._check_wakes(decision.idle_until_ns, decision.now_ns)
        elif not (decision.prefills or decision.decodes or decision.rejected or self.ledger.take_back_received()):
            self._await_release(decision)

    def _await_release(self, decision: Decision) -> None:
        """Nothing was granted: if blocks are held, one of them may be what is missing."""
        if not self.ledger.held or min(self.next_event_ns(), self.horizon_ns) == math.inf:
            raise PolicyStalled(self.name, "granted nothing and did not idle: " + self._head_lacks(decision))
        self._awaits_release = True
        decision.idle_until_ns = math.inf

    def _check_wakes(self, until_ns: float, now_ns: int) -> None:
        if until_ns <= now_ns or min(until_ns, self.next_event_ns(), self.horizon_ns) == math.inf:
            raise PolicyStalled(self.name, f"idle_until({until_ns / 1e9} s) at {now_ns / 1e9} s never wakes")

    def _check_held(self, decision: Decision) -> None:
        idle = decision.idle_until_ns is not None
        if not (decision.prefills or decision.preempted or decision.rejected or decision.decodes or idle):
            decision.hold_until_ns = None
            self._check(decision)
            return
        if decision.prefills or decision.preempted or decision.rejected or idle or not decision.decodes_all:
            self._check(decision)
            raise PolicyError(self.name, "hold is legal only when a step grants one token to all of decoding, no more")

    def _head_lacks(self, decision: Decision) -> str:
        ledger = self.ledger
        head = next(iter(ledger.running), None) or (ledger.waiting[0] if ledger.waiting else decision.preempted[0][0])
        return (
            f"request {head._request_id} ({head._state}) needs {head.num_uncomputed_tokens} tokens; "
            f"{len(ledger.free_slots)} slots and {ledger.cache.num_free} blocks are free"
        )

    def _stop_ns(self, now: int) -> float:
        """Where a stretch from `now` on ends at the latest: at the hold's own time, an arrival, an abort, the horizon,
        or the edge of the measured window, as a stretch is one row.
        """
        assert self.standing_until is not None
        return min(self.standing_until, self.next_event_ns(), self.horizon_ns, self.recorder.next_edge_ns(now))

    # -- executing --

    def _fast_forward(self, jump: Jump, now: int, decision: Decision | None) -> None:
        """Execute the stretch of steps that the standing decision reaches to, all at once."""
        steps = self.num_steps
        end = jump.run(now, self._stop_ns(now), decision)
        self.clock.idle_until(end)
        if self._observe is not None:
            self._observe(Progressed((), tuple(self.ledger.decode_set.members), self.num_steps - steps))
        for request in self.ledger.decode_set.take_finished():
            self.finish(request, ending(request, self.config), end)

    def _execute(self, decision: Decision, scheduler_us: float, steps: int) -> None:
        batch = self._batch(decision, steps)
        result = self.executor.execute(batch)
        self.clock.stop(result.duration_ns)
        now = self.clock.now()
        self.journal.step(decision, batch, result, now - decision.now_ns, scheduler_us)
        self.commit.apply(decision, batch, result, now)

    def _idle(self, decision: Decision) -> None:
        """The policy chose to wait, or only rejected: run pending copies, move what was preempted, pass the time."""
        batch, result, duration = self._batch(decision), StepResult(0), 0
        if batch.copies_out:
            result = self.executor.execute(batch)
            self.clock.stop(result.duration_ns)
            duration = self.clock.now() - decision.now_ns
        self.journal.step(decision, batch, replace(result, bound=None), duration, 0.0)
        self.commit.move(decision)
        self.commit.turn_away(decision, self.clock.now())
        if decision.idle_until_ns is not None and self._requests:
            self._idle_until_ns = decision.idle_until_ns
            self._pass_time(decision.idle_until_ns)

    def _pass_time(self, until_ns: float) -> None:
        """Idle until `until_ns`, until something happens, or up to the horizon, whichever comes first."""
        wake = min(until_ns, self.next_event_ns(), self.horizon_ns)
        if self.clock.now() < wake:
            self.clock.idle_until(int(wake))

    def _batch(self, decision: Decision, steps: int = 1) -> Batch:
        ledger, decodes = self.ledger, decision.decodes
        decode_set = ledger.decode_set
        if decision.decodes_all:
            context = decode_set.context + len(decodes)
            decodes = list(decodes) if decision.prefills else decodes  # members change when a prompt is done
        else:
            context = sum([request.num_computed_tokens for request in decodes]) + len(decodes)
        tokens = sum([prefill.tokens for prefill in decision.prefills]) if decision.prefills else 0
        batch = Batch(
            decision.prefills, decodes, decision.decodes_at, tokens, context, ledger.copies_out, ledger.copies_in,
            steps=steps, decodes_all=decision.decodes_all,
        )  # fmt: skip
        if self.columns is not None:
            self._fill_inputs(decision, batch, self.columns)
        return batch

    def _fill_inputs(self, decision: Decision, batch: Batch, columns: Columns) -> None:
        for victim, _, slot in decision.preempted:
            columns.leave(victim, slot)
        for request in decision.admitted:
            columns.enter(request, self.executor.prompt_token_ids(request))
        batch.inputs = columns.inputs(batch, self.ledger.decode_set)

    # -- ending --

    def finish(self, request: EngineRequest, state: State, now: int) -> None:
        """`request` ended by itself."""
        self._leave(request, state, now)
        if self.predictor is not None:
            self.predictor.observe(request)
        if self._observe is not None:
            self._observe(Finished(request))

    def _leave(self, request: EngineRequest, state: State, now: int) -> None:
        if self.columns is not None and request.slot >= 0:
            self.columns.leave(request, request.slot)
        self.ledger.leave(request, keep=state != "failed", hold=request.hands_over and state == "finished")
        self.standing_until = None
        del self._requests[request._request_id]
        self._served[request._client] = self._served.get(request._client, 0) + tokens_served(request)
        self._record_end(request, state, now)

    def _record_end(self, request: EngineRequest, state: State, now: int) -> None:
        request._state = state
        request.finished_ns = now
        self.recorder.request(request)
        self.source.finished(request, now)

    def _tokens_served(self) -> dict[str, int]:
        served = dict(self._served)
        for request in self._requests.values():
            served[request._client] = served.get(request._client, 0) + tokens_served(request)
        return served
