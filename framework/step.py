"""The step transaction: what a policy sees of one engine iteration, and the verbs by which it decides it.

Every verb checks the contract at once and names policy, request and rule when it is broken. Knows the ledger and the
step's limits; knows nothing of executors, sources or records. Dead after `schedule` returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from schedlab.framework.batch import Prefill
from schedlab.framework.errors import PolicyError
from schedlab.framework.ledger import Ledger, PreemptMode
from schedlab.framework.request import NS, EngineRequest, Request, to_ns

__all__ = ["Decision", "Grant", "PreemptMode", "Refusal", "Step"]

Refusal = Literal["budget", "slots", "memory"]


class Grant(NamedTuple):
    """What a grant gave: `tokens`, or 0 and why not. Falsy when refused; a refusal leaves no trace."""

    tokens: int
    refusal: Refusal | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


ONE = Grant(1)
SERVABLE = ("running", "waiting", "preempted", "swapped")
NO_BUDGET = Grant(0, "budget")
NO_SLOT = Grant(0, "slots")
NO_MEMORY = Grant(0, "memory")


class Decision:
    """What a step decides, as the engine executes it. `prefills[:decodes_at]`, `decodes`, the other prefills: batch
    order.

    `preempted` has the slot that each victim held; `admitted` the start of each new request. Times are ns or infinite.
    """

    __slots__ = (
        "admitted", "decodes", "decodes_at", "hold_until_ns", "idle_until_ns", "now_ns", "preempted", "prefills",
        "refusals",
    )  # fmt: skip

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.prefills: list[Prefill] = []
        self.decodes: list[EngineRequest] = []
        self.decodes_at = 0
        self.admitted: dict[EngineRequest, int] = {}
        self.preempted: list[tuple[EngineRequest, PreemptMode, int]] = []
        self.refusals: list[tuple[str, str]] = []
        self.idle_until_ns: float | None = None
        self.hold_until_ns: float | None = None


class Step:
    """One engine iteration, while it is being decided."""

    __slots__ = (
        "_budget", "_changed", "_cohort", "_decision", "_decoding", "_index", "_ledger", "_open", "_policy",
        "_prefilling", "_running", "_waiting",
    )  # fmt: skip

    def __init__(self, ledger: Ledger, policy: str, index: int, now_ns: int, token_budget: int) -> None:
        self._ledger = ledger
        self._cohort = ledger.cohort
        self._policy = policy
        self._index = index
        self._budget = token_budget
        self._decision = Decision(now_ns)
        self._open = True  # further decodes may still join the one run of decodes of the batch
        self._running: tuple[Request, ...] | None = None
        self._waiting: Sequence[Request] = ledger.waiting_view if ledger.waiting else ()
        self._prefilling: Sequence[Request] = ledger.prompts.snapshot() if ledger.prefilling else ()
        self._decoding = self._cohort.lineup.snapshot()
        self._changed: tuple[Request, ...] | None = None

    # -- what there is --

    @property
    def now(self) -> float:
        """Seconds on the engine's clock, a policy's only source of time."""
        return self._decision.now_ns / NS

    if TYPE_CHECKING:

        @property
        def waiting(self) -> Sequence[Request]: ...
        @property
        def prefilling(self) -> Sequence[Request]: ...
        @property
        def decoding(self) -> Sequence[Request]: ...
        @property
        def token_budget(self) -> int: ...

    else:  # attrgetter properties run at C speed, and every policy reads these in every step
        waiting = property(
            attrgetter("_waiting"), doc="Those that do not run, in arrival order, preempted ones included."
        )
        prefilling = property(attrgetter("_prefilling"), doc="Those of `running` that are not in `decoding`.")
        decoding = property(
            attrgetter("_decoding"), doc="Those of `running` that need exactly one token and have emitted one."
        )
        token_budget = property(attrgetter("_budget"), doc="Tokens that this step may still grant.")

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a slot, in admission order, as of the start of the step."""
        if self._running is None:
            self._running = tuple(self._ledger.running)
        return self._running

    @property
    def free_slots(self) -> int:
        """Sequences that may still be admitted."""
        return len(self._ledger.free_slots)

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be had now: free and cached-unowned ones."""
        return self._ledger.cache.num_free

    @property
    def cache_changed(self) -> Sequence[Request]:
        """Waiting requests whose `cached_tokens` changed since this was last read, new ones included, in arrival
        order.
        """
        if self._changed is None:
            self._changed = tuple(self._ledger.cache.take_changed())
        return self._changed

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free, as long as anybody runs (`engine.watermark`)."""
        ledger = self._ledger
        return ledger.watermark_blocks if ledger.running else 0

    def cached_tokens(self, request: Request) -> int:
        """The position from which a grant would compute now; true when read, a later grant may evict it."""
        ledger = self._ledger
        req: EngineRequest = request  # type: ignore[assignment]
        granted = self._decision.admitted.get(req)
        return ledger.start_of(req) if granted is None else granted

    def pending_tokens(self, request: Request) -> int:
        """Tokens beyond `cached_tokens` that running or just granted requests are computing and will publish."""
        ledger, req = self._ledger, _own(request)
        return ledger.cache.pending_blocks(req) * ledger.block_size

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """By how much `free_blocks` would fall if `request` were granted `tokens`."""
        ledger, req = self._ledger, _own(request)
        if req._state == "running":
            return max(ledger.blocks_to_continue(req, tokens), 0)
        return ledger.blocks_to_admit(req, tokens)

    def fits(self, request: Request) -> int:
        """The largest grant possible now, in tokens; 0 when none is."""
        ledger, req = self._ledger, _own(request)
        if req.step == self._index or self._decodes_all(req) or req._state not in SERVABLE:
            return 0
        if req._state != "running" and not ledger.free_slots:
            return 0
        start = ledger.start_of(req)
        spare = ledger.cache.num_free - self.blocks_needed(req, 0)
        if ledger.watermark_blocks and req._state != "running":
            spare -= self.watermark_blocks
        if spare < 0:
            return 0
        have = max(ledger.blocks_for(start), len(req.block_table))
        room = (have + spare) * ledger.block_size - start
        return max(min(req.num_tokens - start, self._budget, room), 0)

    # -- verbs --

    def grant(self, request: Request, max_tokens: int | None = None) -> Grant:
        """Give `request` tokens: what remains, clamped to the budget and `max_tokens`, then all or nothing on blocks.

        A waiting request is admitted and adopts its cached prefix. Raises PolicyError for a second grant, a request
        that was preempted in this step, or one that is neither waiting nor running.
        """
        req: EngineRequest = request  # type: ignore[assignment]
        index = self._index
        if req.step == index:
            self._refuse_again(req)
        cohort = self._cohort
        if req._cadence is cohort and self._open and (max_tokens is None or max_tokens > 0):
            if self._budget <= 0:
                return self._refused(req, NO_BUDGET)
            if (req._computed + cohort.tick) % cohort.block_size == 0 and not self._give_block(req):
                return self._refused(req, NO_MEMORY)
            decision = self._decision
            if not decision.decodes:
                decision.decodes_at = len(decision.prefills)
            self._budget -= 1
            req.step = index
            decision.decodes.append(req)
            return ONE
        return self._grant_prefill(req, max_tokens)

    def grant_decodes(self, requests: Iterable[Request] | None = None) -> list[Request]:
        """One token to each of `decoding` (or of `requests`, which must be decoding); returns those refused.

        Never preempts. If budget or blocks do not suffice for all, they are given in order, one by one. Who was granted
        in this step already, alone or in bulk, would be granted again: a PolicyError, as with `grant`.
        """
        if requests is not None:
            return [request for request in requests if not self.grant(self._decoding_only(request))]
        ledger, cohort, decision = self._ledger, self._cohort, self._decision
        members = cohort.members
        if not members:
            return []
        needing = cohort.buckets[cohort.tick % cohort.block_size]
        short = needing and len(needing) > ledger.cache.num_free
        if short or decision.decodes or not self._open or len(members) > self._budget:
            return [r for r in tuple(members) if not self.grant(r)]
        if needing:
            ledger.grow(needing)
        decision.decodes_at = len(decision.prefills)
        decision.decodes = members
        self._open = False
        self._budget -= len(members)
        return []

    def preempt(self, request: Request, mode: PreemptMode = "recompute") -> PreemptMode:
        """Free a running request's slot, budget and blocks at once; returns the mode done.

        `swap` keeps its keys and values on the host; if the host pool is full, it becomes a counted `recompute`.
        """
        req, ledger = _own(request), self._ledger
        if mode not in ("recompute", "swap"):
            self._fail(f"preempt takes recompute or swap, found {mode!r}", req)
        self._freeze()
        if req in self._decision.admitted:
            self._take_back(req)
            ledger.withdraw(req)
            return "recompute" if not req.host_blocks else "swap"
        if req._state != "running":
            self._fail("only a running request can be preempted", req)
        self._take_back(req)
        slot = req.slot
        done = ledger.preempt(req, mode)
        req.step = self._index
        self._decision.preempted.append((req, done, slot))
        return done

    def idle_until(self, t: float = math.inf) -> None:
        """Grant nothing until `t` seconds, the next arrival or the next abort, whichever comes first."""
        self._decision.idle_until_ns = t if math.isinf(t) else to_ns(t)

    def hold(self, until: float | None = None) -> None:
        """This decision stands: decode all, step after step, until an arrival, a finish, an abort, the first boundary
        at or after `until` seconds, or a step that would lack a block or evict one that a waiting request counts on.

        Legal only if this step grants one token to all of `decoding` and does nothing else.
        """
        self._decision.hold_until_ns = math.inf if until is None or math.isinf(until) else to_ns(until)

    def close(self) -> Decision:
        """The engine calls this when `schedule` returned: the step is dead, every further use is a PolicyError."""
        decision = self._decision
        self.__class__ = DeadStep
        return decision

    # -- how the verbs do it --

    def _grant_prefill(self, req: EngineRequest, max_tokens: int | None) -> Grant:
        ledger = self._ledger
        admission = req._state != "running"
        if req._state not in SERVABLE:
            self._fail(f"cannot be granted: it is {req._state}", req)
        if admission and not ledger.free_slots:
            return self._refused(req, NO_SLOT)
        if not admission and self._decodes_all(req):
            self._refuse_again(req)
        start = ledger.start_of(req)
        tokens = req._tokens + req._cadence.tick - start
        if tokens > self._budget:
            tokens = self._budget
        if max_tokens is not None and max_tokens < tokens:
            tokens = max_tokens
        if tokens <= 0:
            return self._refused(req, NO_BUDGET)
        need = ledger.blocks_to_admit(req, tokens) if admission else ledger.blocks_to_continue(req, tokens)
        if need > ledger.cache.num_free:
            return self._refused(req, NO_MEMORY)
        if admission:
            if ledger.watermark_blocks and need > ledger.cache.num_free - self.watermark_blocks:
                return self._refused(req, NO_MEMORY)
            self._decision.admitted[req] = start
            ledger.admit(req, tokens)
        else:
            ledger.extend(req, tokens)
        return self._record(req, start, tokens)

    def _record(self, req: EngineRequest, start: int, tokens: int) -> Grant:
        if self._decision.decodes:
            self._open = False  # a decode after this would break the batch's one run of decodes
        self._budget -= tokens
        req.step = self._index
        self._decision.prefills.append(Prefill(req, start, tokens))
        return Grant(tokens)

    def _give_block(self, req: EngineRequest) -> bool:
        ledger = self._ledger
        if not ledger.cache.num_free:
            return False
        req.block_table += ledger.cache.allocate(1, req.block_table[-1])
        return True

    def _take_back(self, req: EngineRequest) -> None:
        """Refund this step's grant to `req`, if any."""
        if req.step != self._index:
            return
        if req in self._decision.decodes:
            self._decision.decodes.remove(req)
            self._budget += 1
            return
        for i, prefill in enumerate(self._decision.prefills):
            if prefill.request is req:
                self._budget += prefill.tokens
                self._decision.decodes_at -= i < self._decision.decodes_at
                del self._decision.prefills[i]
                self._decision.admitted.pop(req, None)
                return

    def _freeze(self) -> None:
        """Before anything leaves the engine's lists, keep what the policy sees as it was at the start of the step."""
        decision = self._decision
        if decision.decodes is self._cohort.members and decision.decodes:
            # a bulk grant refers to the cohort's own list
            decision.decodes = list(decision.decodes)
            for request in decision.decodes:
                request.step = self._index
        if self._running is None:
            self._running = tuple(self._ledger.running)

    def _decodes_all(self, req: EngineRequest) -> bool:
        """Whether a bulk grant gave `req` its token."""
        return req._cadence is self._cohort and self._decision.decodes is self._cohort.members

    def _decoding_only(self, request: Request) -> Request:
        if request._cadence is not self._cohort:
            self._fail("grant_decodes takes decoding requests only", request)
        return request

    def _refused(self, req: EngineRequest, grant: Grant) -> Grant:
        self._decision.refusals.append((req._request_id, str(grant.refusal)))
        return grant

    def _refuse_again(self, req: EngineRequest) -> None:
        granted = (
            self._decodes_all(req)
            or req in self._decision.decodes
            or any(req is p.request for p in self._decision.prefills)
        )
        rule = "a second grant in one step" if granted else "was preempted in this step and cannot be granted in it"
        self._fail(rule, req)

    def _fail(self, rule: str, request: Request | None = None) -> None:
        raise PolicyError(self._policy, rule, request.request_id if request is not None else None)


class DeadStep(Step):
    """What a step turns into when `schedule` has returned, so that a live step need not ask whether it lives."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> object:
        if name in ("__class__", "__repr__"):
            return object.__getattribute__(self, name)
        policy: str = object.__getattribute__(self, "_policy")
        raise PolicyError(policy, f"used step.{name} after its schedule returned")


def _own(request: Request) -> EngineRequest:
    """Every request that a policy meets is the engine's."""
    return request  # type: ignore[return-value]
