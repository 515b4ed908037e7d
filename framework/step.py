"""The step transaction: what a policy sees of one engine iteration, and the verbs by which it decides it.

Every verb checks the contract at once and names policy, request and rule when it is broken. What it changes are some
engine's `Books`. A step is dead after `schedule` returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from schedlab.framework.batch import Prefill
from schedlab.framework.books import Books, PreemptMode, Quote
from schedlab.framework.errors import PolicyError
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
SHED = "shed"
"""Begins the reason of a request that a policy rejected."""
SERVABLE = ("running", "waiting", "preempted", "swapped")
NO_BUDGET = Grant(0, "budget")
NO_SLOT = Grant(0, "slots")
NO_MEMORY = Grant(0, "memory")


class Decision:
    """What a step decides, as the engine executes it. `prefills[:decodes_at]`, `decodes`, the other prefills: batch
    order.

    `decodes_all`: `decodes` are all that decode, in their order. `preempted` has the slot that each victim held;
    `admitted` the start of each new request, `rejected` why each is turned away. Times are ns or infinite.
    """

    __slots__ = (
        "admitted", "decodes", "decodes_all", "decodes_at", "hold_until_ns", "idle_until_ns", "now_ns", "preempted",
        "prefills", "refusals", "rejected",
    )  # fmt: skip

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.prefills: list[Prefill] = []
        self.decodes: list[EngineRequest] = []
        self.decodes_all = False
        self.decodes_at = 0
        self.admitted: dict[EngineRequest, int] = {}
        self.preempted: list[tuple[EngineRequest, PreemptMode, int]] = []
        self.refusals: list[tuple[str, str]] = []
        self.rejected: list[tuple[EngineRequest, str]] = []
        self.idle_until_ns: float | None = None
        self.hold_until_ns: float | None = None


class Step:
    """One engine iteration, while it is being decided."""

    __slots__ = (
        "_books", "_budget", "_changed", "_closed", "_decision", "_decode_set", "_decoding", "_index", "_open",
        "_policy", "_prefilling", "_quote", "_quoted", "_running", "_waiting",
    )  # fmt: skip

    def __init__(self, books: Books, policy: str, index: int, now_ns: int, token_budget: int) -> None:
        self._books = books
        self._decode_set = books.decode_set
        self._policy = policy
        self._index = index
        self._budget = token_budget
        self._decision = Decision(now_ns)
        self._closed = False
        self._open = True  # further decodes may still join the one run of decodes of the batch
        self._quoted: EngineRequest | None = None  # whose quote holds: policies ask, and then grant
        self._quote: Quote | None = None
        self._running: tuple[Request, ...] | None = None
        self._changed: tuple[Request, ...] | None = None
        self._waiting, self._prefilling, self._decoding = books.views()

    # -- what there is --

    @property
    def now(self) -> float:
        """Seconds on the engine's clock, a policy's only source of time."""
        if self._closed:
            self._is_over("now")
        return self._decision.now_ns / NS

    @property
    def waiting(self) -> Sequence[Request]:
        """Those that do not run, in arrival order, preempted ones included."""
        if self._closed:
            self._is_over("waiting")
        return self._waiting

    @property
    def prefilling(self) -> Sequence[Request]:
        """Those of `running` that are not in `decoding`."""
        if self._closed:
            self._is_over("prefilling")
        return self._prefilling

    @property
    def decoding(self) -> Sequence[Request]:
        """Those of `running` that need exactly one token and have emitted one."""
        if self._closed:
            self._is_over("decoding")
        return self._decoding

    @property
    def token_budget(self) -> int:
        """Tokens that this step may still grant."""
        if self._closed:
            self._is_over("token_budget")
        return self._budget

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold a slot, in admission order, as of the start of the step."""
        if self._closed:
            self._is_over("running")
        if self._running is None:
            self._running = self._books.running_view()
        return self._running

    @property
    def free_slots(self) -> int:
        """Sequences that may still be admitted."""
        if self._closed:
            self._is_over("free_slots")
        return self._books.num_free_slots

    @property
    def free_blocks(self) -> int:
        """KV blocks that can be had now: free and cached-unowned ones."""
        if self._closed:
            self._is_over("free_blocks")
        return self._books.num_free_blocks

    @property
    def cache_changed(self) -> Sequence[Request]:
        """Waiting requests whose `cached_tokens` changed since this was last read, new ones included, in arrival
        order.
        """
        if self._closed:
            self._is_over("cache_changed")
        if self._changed is None:
            self._changed = tuple(self._books.take_changed())
        return self._changed

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free, as long as anybody runs (`engine.watermark`)."""
        if self._closed:
            self._is_over("watermark_blocks")
        return self._books.reserved_blocks

    def cached_tokens(self, request: Request) -> int:
        """The position from which a grant would compute now; true when read, a later grant may evict it."""
        if self._closed:
            self._is_over("cached_tokens")
        req: EngineRequest = request  # type: ignore[assignment]
        granted = self._decision.admitted.get(req)
        return self._books.start_of(req) if granted is None else granted

    def pending_tokens(self, request: Request) -> int:
        """Tokens beyond `cached_tokens` that running or just granted requests are computing and will publish."""
        if self._closed:
            self._is_over("pending_tokens")
        return self._books.pending_blocks(_own(request)) * self._books.block_size

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """By how much `free_blocks` would fall if `request` were granted `tokens`."""
        if self._closed:
            self._is_over("blocks_needed")
        return max(self._quote_for(_own(request)).blocks(tokens), 0)

    def fits(self, request: Request) -> int:
        """The largest grant possible now, in tokens; 0 when none is."""
        if self._closed:
            self._is_over("fits")
        req, books = _own(request), self._books
        if req.step == self._index or self._granted_in_bulk(req) or req._state not in SERVABLE:
            return 0
        free = books.num_free_blocks
        if req._state != "running":
            if not books.num_free_slots:
                return 0
            free -= books.reserved_blocks
        quote = self._quote_for(req)
        return max(min(req.num_tokens - quote.start, self._budget, quote.most(free)), 0)

    # -- verbs --

    def grant(self, request: Request, max_tokens: int | None = None) -> Grant:
        """Give `request` tokens: what remains, clamped to the budget and `max_tokens`, then all or nothing on blocks.

        A waiting request is admitted and adopts its cached prefix. Raises PolicyError for a second grant, a request
        that was preempted in this step, or one that is neither waiting nor running.
        """
        if self._closed:
            self._is_over("grant")
        req: EngineRequest = request  # type: ignore[assignment]
        index = self._index
        if req.step == index:
            self._refuse_again(req)
        decode_set = self._decode_set
        if req._clock is decode_set and self._open and (max_tokens is None or max_tokens > 0):
            if self._budget <= 0:
                return self._refused(req, NO_BUDGET)
            if (req._base_computed + decode_set.tick) % decode_set.block_size == 0 and not self._give_block(req):
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
        if self._closed:
            self._is_over("grant_decodes")
        if requests is not None:
            return [request for request in requests if not self.grant(self._decoding_only(request))]
        decode_set, decision = self._decode_set, self._decision
        members = decode_set.members
        if not members:  # nobody is left, or each is counted by itself
            return [r for r in self._decoding if r.state == "running" and not self.grant(r)]
        needing = decode_set.needing_block()
        short = needing and len(needing) > self._books.num_free_blocks
        if short or decision.decodes or not self._open or len(members) > self._budget:
            return [r for r in tuple(members) if not self.grant(r)]
        if needing:
            self._books.grow(needing)
            self._quoted = None
        decision.decodes_at = len(decision.prefills)
        decision.decodes = members
        decision.decodes_all = True
        self._open = False
        self._budget -= len(members)
        return []

    def preempt(self, request: Request, mode: PreemptMode = "recompute") -> PreemptMode:
        """Free a running request's slot, budget and blocks at once; returns the mode done.

        `swap` keeps its keys and values on the host; if the host pool is full, it becomes a counted `recompute`.
        """
        if self._closed:
            self._is_over("preempt")
        req, books = _own(request), self._books
        if mode not in ("recompute", "swap"):
            self._fail(f"preempt takes recompute or swap, found {mode!r}", req)
        self._freeze()
        self._quoted = None
        if req in self._decision.admitted:
            self._take_back(req)
            return books.withdraw(req)
        if req._state != "running":
            self._fail("only a running request can be preempted", req)
        self._take_back(req)
        slot = req.slot
        done = books.preempt(req, mode)
        req.step = self._index
        self._decision.preempted.append((req, done, slot))
        return done

    def reject(self, request: Request, reason: str = "") -> None:
        """Turn away for good a request that waits, was preempted or is swapped, and was not granted or preempted in
        this step. It ends as `rejected` when the step has run, with `shed:` and `reason`; until then it is in
        `waiting`, and what it holds on the host is not free.

        A step may do nothing else: it then takes no time, and the policy is asked again. Not together with `hold`.
        """
        if self._closed:
            self._is_over("reject")
        req = _own(request)
        if req.step == self._index:
            self._fail("a request that this step granted, preempted or rejected cannot be rejected in it", req)
        if req._state not in SERVABLE or req._state == "running":
            self._fail(f"only a waiting request can be rejected: it is {req._state}", req)
        req.step = self._index
        self._decision.rejected.append((req, f"{SHED}:{reason}"))

    def idle_until(self, t: float = math.inf) -> None:
        """Grant nothing until `t` seconds, the next arrival or the next abort, whichever comes first."""
        if self._closed:
            self._is_over("idle_until")
        self._decision.idle_until_ns = t if math.isinf(t) else to_ns(t)

    def hold(self, until: float | None = None) -> None:
        """This decision stands: decode all, step after step, until an arrival, a finish, an abort, the first boundary
        at or after `until` seconds, or a step that would lack a block or evict one that a waiting request counts on.

        Legal only if this step grants one token to all of `decoding` and does nothing else.
        """
        if self._closed:
            self._is_over("hold")
        self._decision.hold_until_ns = math.inf if until is None or math.isinf(until) else to_ns(until)

    def close(self) -> Decision:
        """The engine calls this when `schedule` returned: the step is dead, every further use is a PolicyError."""
        decision, members = self._decision, self._decode_set.members
        if members and not decision.decodes_all:
            decision.decodes_all = decision.decodes == members
        self._closed = True
        return decision

    # -- how the verbs do it --

    def _grant_prefill(self, req: EngineRequest, max_tokens: int | None) -> Grant:
        books = self._books
        admission = req._state != "running"
        if req._state not in SERVABLE:
            self._fail(f"cannot be granted: it is {req._state}", req)
        if admission and not books.num_free_slots:
            return self._refused(req, NO_SLOT)
        if not admission and self._granted_in_bulk(req):
            self._refuse_again(req)
        quote = self._quote_for(req)
        tokens = min(req.num_tokens - quote.start, self._budget)
        if max_tokens is not None and max_tokens < tokens:
            tokens = max_tokens
        if tokens <= 0:
            return self._refused(req, NO_BUDGET)
        spare = books.num_free_blocks
        if admission:
            spare -= books.reserved_blocks
        if quote.blocks(tokens) > spare:
            return self._refused(req, NO_MEMORY)
        self._quoted = None
        if admission:
            self._decision.admitted[req] = quote.start
            books.admit(req, quote, tokens)
        else:
            books.extend(req, quote, tokens)
        return self._record(req, quote.start, tokens)

    def _quote_for(self, req: EngineRequest) -> Quote:
        """The books' quote, asked once for as long as no verb changes what it rests on."""
        quote = self._quote
        if quote is None or self._quoted is not req:
            quote = self._quote = self._books.quote(req)
            self._quoted = req
        return quote

    def _record(self, req: EngineRequest, start: int, tokens: int) -> Grant:
        if self._decision.decodes:
            self._open = False  # a decode after this would break the batch's one run of decodes
        self._budget -= tokens
        req.step = self._index
        self._decision.prefills.append(Prefill(req, start, tokens))
        return Grant(tokens)

    def _give_block(self, req: EngineRequest) -> bool:
        if not self._books.num_free_blocks:
            return False
        self._books.grow((req,))
        self._quoted = None
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
        """Before anything leaves the books' lists, keep what the policy sees as it was at the start of the step."""
        decision = self._decision
        if decision.decodes_all:  # a bulk grant refers to the decode set's own list
            decision.decodes = list(decision.decodes)
            decision.decodes_all = False
            for request in decision.decodes:
                request.step = self._index
        if self._running is None:
            self._running = self._books.running_view()

    def _granted_in_bulk(self, req: EngineRequest) -> bool:
        return self._decision.decodes_all and req._clock is self._decode_set

    def _decoding_only(self, request: Request) -> Request:
        if not self._books.decodes(_own(request)):
            self._fail("grant_decodes takes decoding requests only", request)
        return request

    def _refused(self, req: EngineRequest, grant: Grant) -> Grant:
        self._decision.refusals.append((req._request_id, str(grant.refusal)))
        return grant

    def _refuse_again(self, req: EngineRequest) -> None:
        granted = (
            self._granted_in_bulk(req)
            or req in self._decision.decodes
            or any(req is p.request for p in self._decision.prefills)
        )
        lost = "rejected" if any(req is other for other, _ in self._decision.rejected) else "preempted"
        rule = "a second grant in one step" if granted else f"was {lost} in this step and cannot be granted in it"
        self._fail(rule, req)

    def _is_over(self, name: str) -> None:
        raise PolicyError(self._policy, f"used step.{name} after its schedule returned")

    def _fail(self, rule: str, request: Request | None = None) -> None:
        raise PolicyError(self._policy, rule, request.request_id if request is not None else None)


def _own(request: Request) -> EngineRequest:
    """Every request that a policy meets is the engine's."""
    return request  # type: ignore[return-value]
