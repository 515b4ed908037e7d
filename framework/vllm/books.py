"""What a step asks and changes, answered from vLLM's scheduler: a grant takes its blocks in vLLM's pool at once.

Requests are counted as schedlab's own engine counts them. They move on when vLLM has scheduled them, as vLLM's own
counters do: with two steps in flight, the second is decided before the first has run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from schedlab.framework.batch import Prefill
from schedlab.framework.books import Books, PreemptMode, Quote
from schedlab.framework.ordered_requests import OrderedRequests, QueueView
from schedlab.framework.request import EngineRequest, Request
from schedlab.framework.step import Decision
from schedlab.framework.vllm.hits import Hits
from schedlab.framework.vllm.index import BlockIndex


class Offer(Quote):
    """A quote with what vLLM's cache lookup returned: (blocks, tokens, boundary)."""

    __slots__ = ("found",)

    def __init__(self, start: int, hit: int, held: int, block_size: int, found: Any = None) -> None:
        super().__init__(start, hit, held, block_size)
        self.found = found


@dataclass(slots=True)
class Taken:
    """What a grant of this step took: the new blocks as vLLM returned them, and the lookup that an admission used."""

    blocks: Any
    found: Any = None


class VllmBooks(Books):
    """`is_ready(theirs)`: whether a waiting vLLM request may be admitted, or something of it is still outstanding."""

    def __init__(self, scheduler: Any, is_ready: Callable[[Any], bool], hides: bool) -> None:
        self.scheduler = scheduler
        self.kv = scheduler.kv_cache_manager
        self.pool = self.kv.block_pool
        super().__init__(scheduler.block_size, self.kv.watermark_blocks)
        self.is_ready = is_ready
        self.lists_full_blocks = self.kv.enable_caching and not scheduler.scheduler_config.async_scheduling
        self.hits = Hits(self.kv, self.block_size)
        self.index = BlockIndex(self.hits.stale, hides)
        self.pool.cached_block_hash_to_block = self.index
        self.theirs: dict[EngineRequest, Any] = {}
        self.ours: dict[str, EngineRequest] = {}
        self.queue = OrderedRequests()
        self.waiting = self.queue.requests
        self.waiting_view = QueueView(self.waiting)
        self.blocked: dict[EngineRequest, None] = {}  # they wait for something else than the policy
        self.running: dict[EngineRequest, None] = {}
        self.prompts = OrderedRequests()
        self.ending: dict[EngineRequest, None] = {}  # their last token is in flight
        self.rejected: dict[EngineRequest, None] = {}  # turned away, until vLLM has told their clients
        self.taken: dict[EngineRequest, Taken] = {}
        self.admitted: dict[EngineRequest, None] = {}
        self.victims: list[EngineRequest] = []
        self.swaps_refused = 0
        self.admits = True  # vLLM can be told to finish what runs and to begin nothing
        self._arrivals = self._admissions = 0

    # -- coming and going, between steps --

    def arrive(self, request: EngineRequest, theirs: Any) -> None:
        request.order = self._arrivals
        self._arrivals += 1
        request.final_tokens = min(theirs.num_prompt_tokens + theirs.max_tokens, self.scheduler.max_model_len)
        self.theirs[request] = theirs
        self.ours[theirs.request_id] = request
        self.blocked[request] = None
        self.admit_to_queue()

    def admit_to_queue(self) -> None:
        """Requests that were blocked wait for the policy as soon as nothing else is outstanding."""
        for request in [r for r in self.blocked if self.is_ready(self.theirs[r])]:
            del self.blocked[request]
            self.queue.add(request.order, request)
            self.hits.watch(request, self.theirs[request])

    def leave(self, request: EngineRequest) -> None:
        """`request` reached its end, wherever it was; vLLM has freed its blocks."""
        theirs = self.theirs.pop(request)
        del self.ours[theirs.request_id]
        if request in self.running:
            self._leave_running(request)
        elif request in self.blocked:
            del self.blocked[request]
        elif request in self.ending:
            del self.ending[request]
        elif request in self.rejected:
            del self.rejected[request]
        else:
            self._leave_waiting(request)

    def _leave_running(self, request: EngineRequest) -> None:
        del self.running[request]
        if request._clock is self.decode_set:
            self.decode_set.leave(request)
        else:
            self.prompts.remove(request.admission)
        self.hits.stop_computing(request)

    def _leave_waiting(self, request: EngineRequest) -> None:
        self.queue.remove(request.order)
        self.hits.unwatch(request)

    # -- what a step asks --

    def begin(self, step: int | None) -> None:
        """A step of vLLM's number `step` is decided from now on."""
        self.taken, self.admitted, self.victims = {}, {}, []
        if self.pool.cached_block_hash_to_block is not self.index:  # vLLM has reset its cache
            self.index = BlockIndex(self.hits.stale, self.index.hides)
            self.pool.cached_block_hash_to_block = self.index
            self.hits.all_stale()
        self.index.step = step
        if self.blocked:
            self.admit_to_queue()

    def views(self) -> tuple[Sequence[Request], Sequence[Request], Sequence[Request]]:
        return (
            self.waiting_view if self.waiting and self.admits else (),
            self.prompts.snapshot(),
            self.decode_set.ordered.snapshot(),
        )

    def running_view(self) -> tuple[Request, ...]:
        return tuple(self.running)

    def decodes(self, request: EngineRequest) -> bool:
        return request._clock is self.decode_set

    @property
    def num_free_slots(self) -> int:
        if not self.admits:
            return 0
        return int(self.scheduler.max_num_active_reqs) - len(self.scheduler.running) - len(self.admitted)

    @property
    def num_free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def reserved_blocks(self) -> int:
        return self.watermark_blocks if self.running else 0

    def quote(self, request: EngineRequest) -> Offer:
        theirs = self.theirs[request]
        if request._state == "running":
            held = len(self.kv.get_blocks(theirs.request_id).blocks[0])
            return Offer(request.num_computed_tokens, 0, held, self.block_size)
        found = blocks, tokens, _ = self.kv.get_computed_blocks(theirs)
        hit = blocks.blocks[0]
        held = len(hit) - sum([block.ref_cnt == 0 for block in hit])
        return Offer(tokens, len(hit), held, self.block_size, found)

    def start_of(self, request: EngineRequest) -> int:
        if request._state == "running" or request not in self.theirs:
            return request.num_computed_tokens
        return self.hits.of(request) * self.block_size

    def pending_blocks(self, request: EngineRequest) -> int:
        return self.hits.pending(request)

    def take_changed(self) -> list[EngineRequest]:
        return self.hits.take_changed()

    # -- verbs --

    def admit(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        assert isinstance(quote, Offer)
        theirs, (blocks, start, _) = self.theirs[request], quote.found
        new = self.kv.allocate_slots(
            theirs, tokens, num_new_computed_tokens=start, new_computed_blocks=blocks, has_scheduled_reqs=False
        )
        assert new is not None, f"{request.request_id}: quoted {quote.blocks(tokens)} blocks, and vLLM has fewer"
        self.taken[request] = Taken(new, quote.found)
        self.admitted[request] = None
        self.hits.unwatch(request)
        self.hits.start_computing(request, theirs, quote.hit)

    def extend(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        new = self.kv.allocate_slots(self.theirs[request], tokens)
        assert new is not None, f"{request.request_id}: quoted {quote.blocks(tokens)} blocks, and vLLM has fewer"
        self.taken[request] = Taken(new)

    def grow(self, requests: Collection[EngineRequest]) -> None:
        for request in requests:
            new = self.kv.allocate_slots(self.theirs[request], 1)
            assert new is not None, f"{request.request_id}: the step has counted a block for it, and vLLM has none"
            self.taken[request] = Taken(new)

    def withdraw(self, request: EngineRequest) -> PreemptMode:
        theirs = self.theirs[request]
        self._unlist(request)
        self.kv.free(theirs)
        del self.taken[request], self.admitted[request]
        self.hits.stop_computing(request)
        self.hits.watch(request, theirs)
        return "recompute"

    def preempt(self, request: EngineRequest, mode: PreemptMode) -> PreemptMode:
        theirs = self.theirs[request]
        self._unlist(request)
        self._leave_running(request)
        self.taken.pop(request, None)
        self.scheduler.running.remove(theirs)
        self.scheduler._preempt_request(theirs, time.monotonic())
        self._note_preemption(request, theirs)
        self.swaps_refused += mode == "swap"
        return "recompute"

    def _note_preemption(self, request: EngineRequest, theirs: Any) -> None:
        request.lost_tokens = request.num_computed_tokens
        request._num_preemptions += 1
        request.mirror("preempted", theirs.num_tokens, 0)
        self.victims.append(request)

    def _unlist(self, request: EngineRequest) -> None:
        """What this step promised to compute of `request` will not be computed: nobody may find it."""
        block_ids = self.index.of_this_step(self.kv.get_block_ids(self.theirs[request].request_id)[0])
        if block_ids:
            self.kv.evict_blocks(block_ids)

    def give_back(self) -> None:
        """Undo what the open step took, but for its preemptions."""
        for request in list(self.admitted):
            self.withdraw(request)
        for request, taken in self.taken.items():
            new = taken.blocks.blocks[0]
            self._unlist(request)
            if new:
                del self.kv.get_blocks(self.theirs[request].request_id).blocks[0][-len(new) :]
                self.pool.free_blocks(reversed(new))
        self.taken = {}

    # -- after vLLM has scheduled what a step decided --

    def prefills_of(self, decision: Decision) -> dict[str, tuple[int, Taken]]:
        """By vLLM's request id: the tokens granted and what was taken, for every grant that took something."""
        tokens = {prefill.request: prefill.tokens for prefill in decision.prefills}
        return {self.theirs[r].request_id: (tokens.get(r, 1), taken) for r, taken in self.taken.items()}

    def read_decision(self, out: Any, now_ns: int) -> Decision:
        """What vLLM's own scheduler decided, as a policy would have said it."""
        decision = Decision(now_ns)
        for request in [self.ours[i] for i in out.preempted_req_ids or () if i in self.ours]:
            if request in self.running or request in self.ending:
                self._follow_preemption(request)
            decision.preempted.append((request, "recompute", -1))
        for request_id, tokens in out.num_scheduled_tokens.items():
            self._read_grant(decision, self.ours[request_id], tokens)
        decision.decodes_all = bool(decision.decodes) and decision.decodes == self.decode_set.members
        return decision

    def _read_grant(self, decision: Decision, request: EngineRequest, tokens: int) -> None:
        start = self.theirs[request].num_computed_tokens - tokens
        if request not in self.running:
            decision.admitted[request] = start
            self.hits.start_computing(request, self.theirs[request], start // self.block_size)
        ended = bool(decision.decodes) and decision.decodes_at < len(decision.prefills)  # the batch's run of decodes
        if request._clock is self.decode_set and not ended:
            if not decision.decodes:
                decision.decodes_at = len(decision.prefills)
            decision.decodes.append(request)
        else:
            decision.prefills.append(Prefill(request, start, tokens))

    def requeue_victims(self) -> None:
        """The step's victims wait again; those of whom a token is still in flight, when it has arrived."""
        self.blocked |= dict.fromkeys(self.victims)
        self.victims = []
        self.admit_to_queue()

    def turn_away(self, request: EngineRequest, reason: str) -> None:
        """A waiting request will not be served: no policy sees it any more."""
        self._leave_waiting(request)
        request.reason = reason
        self.rejected[request] = None

    def enter_running(self, request: EngineRequest, start: int) -> None:
        """An admitted request leaves the queue; it has computed `start` tokens, which were found."""
        if request in self.blocked:  # vLLM has admitted it in the step in which it became ready
            del self.blocked[request]
        else:
            self._leave_waiting(request)
        request.admission = self._admissions
        self._admissions += 1
        request.mirror("running", request.num_tokens, start)
        self.running[request] = None
        self.prompts.add(request.admission, request)

    def advance(self, decision: Decision) -> None:
        """All that was granted counts as computed, and a token as emitted where a prompt came to its end."""
        members = self.decode_set
        split = [p.request for p in decision.prefills if p.request._clock is members]
        decoded = decision.decodes + split
        if decoded:
            if len(decoded) == len(members.members):
                members.advance(decision.now_ns)
            else:
                members.advance_only(decoded, decision.now_ns)
            self._list_full_blocks(decoded)
        for request, start, tokens in decision.prefills:
            if request not in split:
                self._compute(request, start + tokens)
        for request in members.take_finished():
            self._let_end(request)

    def _list_full_blocks(self, decoded: list[EngineRequest]) -> None:
        """Blocks that decoding fills can be reused, as vLLM has it; its asynchronous scheduler sees to it itself."""
        full = self.decode_set.needing_block() if self.lists_full_blocks else {}
        for request in full if len(decoded) == len(self.decode_set.members) else [r for r in decoded if r in full]:
            self.kv.cache_blocks(self.theirs[request], request.num_computed_tokens)

    def _compute(self, request: EngineRequest, computed: int) -> None:
        tokens = request.num_tokens
        tokens += computed == tokens
        request.mirror("running", tokens, computed)
        self.hits.computed(request, min(computed, request.num_prompt_tokens) // self.block_size)
        if tokens >= request.final_tokens and tokens > request.num_prompt_tokens:
            self._let_end(request)
        elif tokens - computed == 1 and tokens > request.num_prompt_tokens:
            self.prompts.remove(request.admission)
            self.decode_set.join(request)

    def _let_end(self, request: EngineRequest) -> None:
        """Nothing of `request` is left to schedule: it holds slot and blocks until its last token arrives."""
        self._leave_running(request)
        self.ending[request] = None

    # -- what happens beside a step --

    def take_late_token(self, request: EngineRequest) -> None:
        """A token arrived; if its request was preempted meanwhile, it has one more to compute."""
        if request._state == "preempted":
            request.mirror("preempted", self.theirs[request].num_tokens, 0)

    def follow_preemptions(self) -> None:
        """vLLM may have preempted requests between two steps: they wait again."""
        for request in [*self.running, *self.ending]:
            if self.theirs[request].status == RequestStatus.PREEMPTED:
                self._follow_preemption(request)
        self.requeue_victims()

    def _follow_preemption(self, request: EngineRequest) -> None:
        if request in self.ending:
            del self.ending[request]
        else:
            self._leave_running(request)
        self._note_preemption(request, self.theirs[request])

    @property
    def num_cached_blocks(self) -> int:
        """Cached blocks that nobody owns: those listed, less the full ones that are owned."""
        others = (*self.prompts.requests, *self.ending)
        whole = len(self.decode_set.needing_block()) + sum(r.num_computed_tokens % self.block_size == 0 for r in others)
        tails = len(self.running) + len(self.ending) - whole
        owned = self.pool.num_gpu_blocks - 1 - self.num_free_blocks
        return max(self.index.num_listed - (owned - tails), 0) if self.kv.enable_caching else 0
