"""What a step asks of an engine's bookkeeping, and the verbs by which it changes it.

`Step` has the rules, the refusals and their texts; `Books` has who is where and owns what. The engine's own books are
`Ledger`; another engine's scheduler can serve a policy by answering the same questions from its own queues and pool.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from schedlab.framework.decode_set import DecodeSet
from schedlab.framework.request import EngineRequest, Request

PreemptMode = Literal["recompute", "swap"]


class Quote:
    """What a grant to one request would rest on now; it holds until something is granted or preempted.

    start : position from which it would compute
    hit   : cached blocks that it would adopt
    held  : blocks that it has, or that come with the hit, without a free block being taken for them
    """

    __slots__ = ("block_size", "held", "hit", "start")

    def __init__(self, start: int, hit: int, held: int, block_size: int) -> None:
        self.start = start
        self.hit = hit
        self.held = held
        self.block_size = block_size

    def blocks(self, tokens: int) -> int:
        """By how much the free blocks fall with a grant of `tokens`."""
        return -(-(self.start + tokens) // self.block_size) - self.held

    def most(self, free_blocks: int) -> int:
        """The largest grant for which `free_blocks` suffice; not above 0 if none is."""
        return (self.held + free_blocks) * self.block_size - self.start


class Books:
    """Waiting and running requests, slots and blocks, as one step sees and changes them.

    An implementation answers from what is true now: a grant takes its blocks at once, so the next question sees fewer.
    It keeps `state`, `num_tokens` and `num_computed_tokens` of each request true (`EngineRequest.mirror`, where they
    are another engine's to count), sets the state of a victim before `preempt` returns, and leaves requests that were
    admitted in the state in which they waited until the step has run. It does *not* check the contract, count the
    token budget or refuse anything: the step does, before it calls a verb.

    `decode_set` counts requests that decode in step with one shared tick. Books whose engine counts each request by
    itself leave it empty: every grant then comes through `quote` and `admit` or `extend`, decodes included.
    """

    def __init__(self, block_size: int, watermark_blocks: int = 0) -> None:
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.decode_set = DecodeSet(block_size)

    # -- who is where, as a step begins --

    def views(self) -> tuple[Sequence[Request], Sequence[Request], Sequence[Request]]:
        """Waiting in arrival order, prefilling and decoding in admission order; none changes while the step is open."""
        raise NotImplementedError

    def running_view(self) -> tuple[Request, ...]:
        """Those that hold a slot now, in admission order; asked at most once a step, before anything leaves."""
        raise NotImplementedError

    def decodes(self, request: EngineRequest) -> bool:
        """Whether `request` runs, has emitted a token and needs exactly one more computed."""
        return request._state == "running" and request.num_output_tokens > 0 and request.num_uncomputed_tokens == 1

    # -- what is left --

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still be admitted."""
        raise NotImplementedError

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had now, cached ones that nobody owns included."""
        raise NotImplementedError

    @property
    def reserved_blocks(self) -> int:
        """Blocks that an admission leaves free now."""
        raise NotImplementedError

    # -- what a grant would mean --

    def quote(self, request: EngineRequest) -> Quote:
        """What a grant to `request`, waiting or running, would rest on now."""
        raise NotImplementedError

    def start_of(self, request: EngineRequest) -> int:
        """`quote(request).start`, for those who ask it of every waiting request."""
        return self.quote(request).start

    def pending_blocks(self, request: EngineRequest) -> int:
        """Whole blocks beyond the waiting request's hit that running requests are computing and will publish."""
        return 0

    def take_changed(self) -> Sequence[Request]:
        """Waiting requests whose `start_of` changed since the last call, new ones included, in arrival order."""
        raise NotImplementedError

    # -- verbs --

    def admit(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        """Take a slot, the hit, and blocks for `tokens` from `quote.start` on; the step has checked that they fit."""
        raise NotImplementedError

    def extend(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        """Take the blocks for `tokens` more of a running request; the step has checked that they fit."""
        raise NotImplementedError

    def grow(self, requests: Collection[EngineRequest]) -> None:
        """One more block to each of `requests`, members of the decode set that have none for their next token."""
        raise NotImplementedError

    def withdraw(self, request: EngineRequest) -> PreemptMode:
        """Undo an admission of this step: the request waits as before; returns where what it had computed lies."""
        raise NotImplementedError

    def preempt(self, request: EngineRequest, mode: PreemptMode) -> PreemptMode:
        """Free a running request's slot and blocks at once; returns the mode done, which may be `recompute` always."""
        raise NotImplementedError
