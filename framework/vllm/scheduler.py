"""The scheduler class that a vLLM engine is given: a policy decides a step, and vLLM's own `schedule` carries it out.

A grant has taken its blocks in vLLM's pool already. vLLM's loop then runs over exactly the requests that were granted,
with a KV manager that repeats what each of them was given, and builds its scheduler output itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any, ClassVar, NamedTuple

from vllm import __version__
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.request import RequestStatus

from schedlab.framework.clock import Clock
from schedlab.framework.errors import ConfigError, PolicyError
from schedlab.framework.policy import Aborted, Admitted, Arrived, Finished, Preempted, Progressed, Rejected
from schedlab.framework.request import EngineRequest, State
from schedlab.framework.step import Decision
from schedlab.framework.vllm import surface
from schedlab.framework.vllm.books import Taken, VllmBooks
from schedlab.framework.vllm.journal import Journal
from schedlab.framework.vllm.own import OwnScheduler
from schedlab.framework.vllm.pilot import Pilot
from schedlab.framework.vllm.queue import ArrivalQueue, Granted
from schedlab.framework.vllm.requests import request_of
from schedlab.framework.vllm.settings import Settings, read_settings

logger = logging.getLogger("vllm.schedlab")  # below vLLM's own, and so shown as its lines are
NAP_S = 0.001
"""How long an empty step of a policy that idles sleeps at most, so that an arrival is seen soon."""
WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
STATES: dict[Any, State] = {
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "failed",
    RequestStatus.FINISHED_IGNORED: "rejected",
}
"""How requests end; others are finished, or capped where vLLM's length limit came first."""


class Flying(NamedTuple):
    """A step that vLLM executes: its number, what was decided, and what was scheduled."""

    number: int
    out: Any
    decision: Decision


class Repeated:
    """vLLM's KV manager while its loop repeats what was granted: nothing is allocated again.

    `prefills` are by request id (tokens, what was taken); whoever is not in it computes one token in a block it has.
    """

    def __init__(self, real: Any, prefills: dict[str, tuple[int, Taken]]) -> None:
        self._real = real
        self._prefills = prefills
        self._nothing = (1, Taken(real.empty_kv_cache_blocks))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def new_step_starts(self) -> None:
        """It has started when the policy was asked."""

    def tokens(self, request_id: str) -> int:
        """What was granted to the request."""
        return self._prefills.get(request_id, self._nothing)[0]

    def expected(self, request_ids: list[str]) -> dict[str, int]:
        """The same of all that were granted something."""
        return dict.fromkeys(request_ids, 1) | {name: tokens for name, (tokens, _) in self._prefills.items()}

    def get_computed_blocks(self, request: Any, *_: Any, **__: Any) -> Any:
        return self._prefills[request.request_id][1].found

    def allocate_slots(self, request: Any, num_new_tokens: int, *_: Any, **__: Any) -> Any:
        tokens, taken = self._prefills.get(request.request_id, self._nothing)
        assert num_new_tokens == tokens, f"{request.request_id}: granted {tokens} tokens, vLLM wants {num_new_tokens}"
        return taken.blocks


class Steered:
    """Mixed into vLLM's schedulers. `settings` None: read from vLLM's configuration or the environment."""

    settings: ClassVar[Settings | None] = None
    journal: ClassVar[Journal | None] = None

    def __init__(self, *args: Any, **keys: Any) -> None:
        surface.check_version(__version__)
        super().__init__(*args, **keys)
        vllm: Any = self
        surface.check_names(vllm)
        surface.check_features(vllm)
        settings = self.steering = self.settings or read_settings(vllm.vllm_config.additional_config)
        own = isinstance(settings.policy, OwnScheduler)
        self._zero = (time.monotonic_ns(), time.time())
        self.boundary_ns: int | None = None  # when the requests of this step were taken, if they are not pushed
        self._books = VllmBooks(vllm, self._is_ready, hides=settings.publish == "commit" and not own)
        self._pilot = None if own else Pilot(settings.policy, self._books, self.now_ns)
        self._observe = self._pilot.observe if self._pilot is not None else None
        self._predictor = settings.predictor
        self._falls_back = settings.on_fault == "fallback"
        self._refused: dict[str, int] = {}
        self._offered: dict[str, EngineRequest] = {}
        self._flying: deque[Flying] = deque()
        self._budget = min(vllm.max_num_scheduled_tokens, vllm.scheduler_config.max_num_batched_tokens)
        self._journal = self.journal
        self._repeated: Repeated | None = None
        self.num_fallbacks = 0
        if self._pilot is not None:
            self.waiting: Any = ArrivalQueue(self._place)

    def now_ns(self) -> int:
        """Nanoseconds since this scheduler was made, or on the clock of `start_clock`."""
        return time.monotonic_ns() - self._zero[0]

    def record(self, journal: Journal | None) -> None:
        """Tell `journal` from now on what happens; None: nobody."""
        self._journal = journal

    def start_clock(self, clock: Clock) -> None:
        """From now on times are those of `clock`, which measures real time."""
        zero_ns = time.monotonic_ns() - clock.now()
        self._zero = (zero_ns, time.time() - (time.monotonic_ns() - zero_ns) / 1e9)

    @property
    def policy_name(self) -> str:
        return "vllm" if self._pilot is None else self._pilot.name

    def counters(self) -> dict[str, int]:
        """What became of what vLLM cannot do, or did in the policy's place."""
        return {"swaps_refused": self._books.swaps_refused, "fallback_steps": self.num_fallbacks}

    @property
    def num_flying(self) -> int:
        """Steps on their way."""
        return len(self._flying)

    @property
    def sleeps_for_ever(self) -> bool:
        """The policy idles until something happens."""
        return self._pilot is not None and self._pilot.sleep_s() == float("inf")

    # -- coming and going --

    def offer(self, request: EngineRequest) -> None:
        """`request` will be added under its own name: what a replay knows of it beyond what vLLM is told."""
        self._offered[request.request_id] = request

    def add_request(self, theirs: Any) -> None:
        if theirs.request_id in self.requests:  # type: ignore[attr-defined]
            raise ConfigError(f"request {theirs.request_id}: a request of this name is already in the engine")
        refusal = None
        try:
            request = self._request(theirs)
        except ConfigError as error:
            refusal = str(error)
        if refusal is not None:
            logger.warning("schedlab: request %s is refused: %s", theirs.request_id, refusal)
            self._refused[theirs.request_id] = -1 - len(self._refused)
            super().add_request(theirs)  # type: ignore[misc]
            self.grammar_compile_error_reqs.add(theirs.request_id)  # type: ignore[attr-defined]
            return
        self._books.arrive(request, theirs)
        super().add_request(theirs)  # type: ignore[misc]
        if self._journal is not None:
            self._journal.arrived(request)
        self._tell(Arrived(request))

    def _request(self, theirs: Any) -> EngineRequest:
        surface.check_request(theirs)
        if theirs.resumable:
            raise ConfigError("a prompt that is streamed in cannot be scheduled by a schedlab policy")
        extra_args = theirs.sampling_params.extra_args or {}
        request = self._offered.pop(str(extra_args.get("schedlab_offered")), None)
        if request is None:
            now_ns = self.now_ns()
            arrival_ns = min(max(round((theirs.arrival_time - self._zero[1]) * 1e9), 0), now_ns)
            request = request_of(theirs, arrival_ns, now_ns, self._books.block_size)
        if self._predictor is not None and request._predicted is None:
            request._predicted = self._predictor.predict(request)
        return request

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for theirs in ended:
            self._end(theirs)
        return ended

    def _end(self, theirs: Any) -> None:
        """vLLM is done with a request."""
        self._refused.pop(theirs.request_id, None)
        request = self._books.ours.get(theirs.request_id)
        if request is None:
            return
        state = self._state_of(request, theirs)
        self._books.leave(request)
        request.mirror(state, theirs.num_tokens, request.num_computed_tokens)
        if self._journal is not None:
            self._journal.ended(request, list(theirs.output_token_ids), self.now_ns())
        if self._predictor is not None and state not in ("aborted", "rejected"):
            self._predictor.observe(request)
        self._tell({"aborted": Aborted, "rejected": Rejected}.get(state, Finished)(request))

    def _state_of(self, request: EngineRequest, theirs: Any) -> State:
        """How `request` ends; vLLM ends what a policy rejected with an error."""
        if theirs.status == RequestStatus.FINISHED_ERROR and request in self._books.rejected:
            return "rejected"
        if theirs.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return STATES.get(theirs.status, "finished")
        recorded = request.recorded_output_tokens
        if len(theirs.output_token_ids) >= (request.max_tokens if recorded is None else recorded):
            return "finished"
        request.reason = f"outgrew max_model_len {self.max_model_len} or the KV cache"  # type: ignore[attr-defined]
        return "length_capped"

    def _tell(self, event: Any) -> None:
        if self._pilot is not None and not isinstance(event, Preempted | Admitted | Progressed):
            self._pilot.wake()
        if self._observe is not None:
            self._observe(event)

    def _place(self, theirs: Any) -> int:
        request = self._books.ours.get(theirs.request_id)
        return self._refused[theirs.request_id] if request is None else request.order

    def _is_ready(self, theirs: Any) -> bool:
        if theirs.num_stale_output_tokens and not theirs.drop_stale_output:
            return False
        return theirs.status in WAITS or bool(self._handle_blocked_waiting_request(theirs))  # type: ignore[attr-defined]

    # -- a step --

    def schedule(self, *args: Any, **keys: Any) -> Any:
        started = time.perf_counter_ns()
        self._books.begin(self.current_step + 1)  # type: ignore[attr-defined]
        now_ns = self.now_ns() if self.boundary_ns is None else self.boundary_ns
        out, decision = self._scheduled(now_ns, args, keys)
        self._books.index.step = None
        self._flying.append(Flying(self.current_step, out, decision))  # type: ignore[attr-defined]
        if self._journal is not None:
            self._journal.decided(decision, self._books, (time.perf_counter_ns() - started) / 1000)
        self._apply(decision)
        return out

    def _scheduled(self, now_ns: int, args: Any, keys: Any) -> tuple[Any, Decision]:
        pilot, books = self._pilot, self._books
        if pilot is None:
            return self._left_to_vllm(now_ns, args, keys)
        books.admits = self._pause_state == PauseState.UNPAUSED  # type: ignore[attr-defined]
        is_work = books.running or (books.waiting and books.admits)
        if self._pause_state == PauseState.PAUSED_ALL or not is_work:  # type: ignore[attr-defined]
            return self._execute(Decision(now_ns)), Decision(now_ns)
        if left_s := pilot.sleep_s():
            if not self._flying:
                time.sleep(min(left_s, NAP_S))
            return self._execute(Decision(now_ns)), Decision(now_ns)
        self.kv_cache_manager.new_step_starts()
        try:
            index: int = self.current_step + 1  # type: ignore[attr-defined]
            decision = pilot.decide(index, now_ns, self._budget, bool(self._flying))
        except PolicyError as error:
            if not self._falls_back:
                raise
            self._note_fallback(error)
            return self._left_to_vllm(now_ns, args, keys)
        return self._execute(decision), decision

    def _note_fallback(self, error: PolicyError) -> None:
        if not self.num_fallbacks:
            logger.error("schedlab: %s; vLLM's own scheduler decides this step and every other such one", error)
        self.num_fallbacks += 1
        self._books.give_back()

    def _left_to_vllm(self, now_ns: int, args: Any, keys: Any) -> tuple[Any, Decision]:
        out = super().schedule(*args, **keys)  # type: ignore[misc]
        return out, self._books.read_decision(out, now_ns)

    def _execute(self, decision: Decision) -> Any:
        """vLLM's own `schedule` over what was granted, and nothing else."""
        books, theirs = self._books, self._books.theirs
        repeated = Repeated(self.kv_cache_manager, books.prefills_of(decision))  # type: ignore[has-type]
        order, admitted = batch_order(decision), [theirs[r] for r in decision.admitted]
        running = [theirs[r] for r in order if r not in decision.admitted]
        kept = self.running, self.waiting, self.kv_cache_manager  # type: ignore[has-type]
        self.running, self.waiting = running, Granted(admitted)
        self.kv_cache_manager = self._repeated = repeated
        try:
            out = super().schedule()  # type: ignore[misc]
        finally:
            self.running, self.waiting, self.kv_cache_manager = kept
            self._repeated = None
        self.running += admitted
        self.waiting.remove_requests(admitted)
        expected = repeated.expected([theirs[r].request_id for r in order])
        assert out.num_scheduled_tokens == expected, f"granted {expected}, vLLM scheduled {out.num_scheduled_tokens}"
        return out

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM asks this of every chunk, last of all."""
        tokens: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        return tokens if self._repeated is None else min(tokens, self._repeated.tokens(request.request_id))

    def _apply(self, decision: Decision) -> None:
        """Everybody moves on as vLLM's counters have."""
        books = self._books
        if decision.preempted:
            books.requeue_victims()
        for request, reason in decision.rejected:
            self.grammar_compile_error_reqs.add(books.theirs[request].request_id)  # type: ignore[attr-defined]
            books.turn_away(request, reason)
        for request, start in decision.admitted.items():
            if self._journal is not None:
                self._journal.admitted(request, start, decision.now_ns)
            books.enter_running(request, start)
        if decision.prefills or decision.decodes:
            books.advance(decision)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        step = self._flying.popleft()
        assert step.out is scheduler_output, "steps end in the order in which they were scheduled"
        theirs_of = {id_: self.requests.get(id_) for id_ in scheduler_output.num_scheduled_tokens}  # type: ignore[attr-defined]
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self._books.index.publish(step.number)
        ours = self._books.ours
        answers = [output for group in outputs.values() for output in group.outputs if output.request_id in ours]
        emitted = [ours[answer.request_id] for answer in answers if answer.new_token_ids]
        for request in emitted:
            self._books.take_late_token(request)
        if self._journal is not None:
            self._journal.executed(emitted, self.now_ns())
        self._tell_progress(step.decision)
        for answer in answers:
            if answer.finish_reason is not None:
                self._end(theirs_of[answer.request_id])
        return outputs

    def _tell_progress(self, decision: Decision) -> None:
        if self._observe is None or not (decision.prefills or decision.decodes or decision.preempted):
            return
        for victim, mode, _ in decision.preempted:
            self._observe(Preempted(victim, mode))
        for request, start in decision.admitted.items():
            self._observe(Admitted(request, start))
        prefills = tuple((prefill.request, prefill.tokens) for prefill in decision.prefills)
        self._observe(Progressed(prefills, tuple(decision.decodes), 1))

    # -- what vLLM's operators do --

    def reset_prefix_cache(self, *args: Any, **keys: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **keys)  # type: ignore[misc]
        self._books.follow_preemptions()
        return done

    def shutdown(self) -> None:
        super().shutdown()  # type: ignore[misc]
        if self._journal is not None:
            self._journal.close(len(self._books.theirs), self.counters())


def batch_order(decision: Decision) -> list[EngineRequest]:
    """Who was granted, in batch order."""
    if not decision.prefills:
        return decision.decodes
    requests, at = [prefill.request for prefill in decision.prefills], decision.decodes_at
    return requests[:at] + decision.decodes + requests[at:]


class Synchronous(Steered, SyncScheduler):  # type: ignore[misc]
    """One step at a time."""


class Asynchronous(Steered, AsyncScheduler):  # type: ignore[misc]
    """A step is decided while the one before runs."""


def steered(vllm_config: Any, *args: Any, **keys: Any) -> Any:
    """A scheduler of the kind that vLLM's configuration asks for."""
    kind = Asynchronous if vllm_config.scheduler_config.async_scheduling else Synchronous
    return kind(vllm_config, *args, **keys)
