"""SGLang's default scheduler: longest cached prefix first, whole steps of prompts, and a share of outputs reserved.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, as
`schedule_policy.py` and `schedule_batch.py` of SGLang 0.5 have it.

Differs from the source: a prefix that waiting requests share is seen once the first of them is granted
(`step.pending_tokens`), not by their tokens, and one that runs counts too. Memory is counted in blocks, and a request
that runs alone is admitted if its input fits. Decodes have room made for one token, not for twenty. The order
`dfs-weight`, mixed chunks, priorities and the hierarchical cache are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from schedlab.framework.policy import Event, Progressed
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import can_admit, check_chunk, continue_prefills, decode_all, remaining
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import RankedQueue, may_be_admitted
from schedlab.policies.victims import running_now, worst_of

INITIAL_RATIO, LEAST_SHARE, DECAY_STEPS = 0.7, 0.14, 600
"""The share of outputs that is reserved: at first, its least part of that, and decode steps from one to the other."""
AHEAD = 20
"""Tokens of each request that the share allows for after a preemption."""


@dataclass
class SGLangLPM(Preempting):
    """Prompts first, in steps of `chunk_size` tokens (null: the token budget) without decodes; waiting ones by their
    cached prefix, the longest first, and in arrival order while more than `fcfs_above` wait. One of at most
    `shared_threshold` cached tokens goes last while at least as many more are being computed for another.

    Admission leaves room for a share of what running requests may still generate, `clip_max_new_tokens` each at most:
    0.7 * `conservativeness` at first, down to 0.14 of that over 600 decode steps, and anew from what was generated when
    somebody was preempted: who has generated least, of equals the longest prompt.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {
        "waiting": "longer cached prefixes may keep coming",
        "inter_token_latency": "prompts come first, for as long as they keep arriving",
    }

    chunk_size: int | None = None
    conservativeness: float = 1.0
    fcfs_above: int = 128
    shared_threshold: int = 32
    clip_max_new_tokens: int = 4096
    _ratio: float = field(init=False, repr=False)
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size is not None:
            check_chunk(self.chunk_size)
        if not 0 <= self.conservativeness < math.inf:
            raise ValueError(f"policy.conservativeness: expected at least 0, found {self.conservativeness}")
        for key in ("fcfs_above", "shared_threshold", "clip_max_new_tokens"):
            if getattr(self, key) < 0:
                raise ValueError(f"policy.{key}: expected at least 0, found {getattr(self, key)}")
        self._ratio = self._initial
        self._queue = RankedQueue(_longest_prefix)

    @property
    def _initial(self) -> float:
        return min(INITIAL_RATIO * self.conservativeness, 1.0)

    def observe(self, event: Event) -> None:
        if isinstance(event, Progressed) and event.decodes:
            least = self._initial * LEAST_SHARE
            self._ratio = max(self._ratio - event.steps * (self._initial - least) / DECAY_STEPS, least)

    def schedule(self, step: Step) -> None:
        if not step.running:
            self._ratio = self._initial
        if self._prefill(step):
            return
        undisturbed = decode_all(step, self.mode, victims=worst_of(_least_generated))
        if not undisturbed:
            self._ratio = self._after_preemption(step)
        elif step.decoding and self._nobody_until_a_finish(step):
            step.hold()

    def _prefill(self, step: Step) -> int:
        """A step of prompts; returns its tokens."""
        before = room = step.token_budget
        if self.chunk_size is not None:
            room = min(self.chunk_size, before)
        room -= continue_prefills(step, room, self.mode, worst_of(_least_generated))
        if room and step.waiting and step.free_slots and all(r.state == "running" for r in step.running):
            self._admit(step, room)
        return before - step.token_budget

    def _admit(self, step: Step, room: int) -> None:
        alone, reserved = not step.running, sum(self._reserved(step, request) for request in running_now(step))
        for request in self._order(step):
            if not room or not step.free_slots or not may_be_admitted(step, request):
                break
            needed = step.blocks_needed(request, remaining(step, request) + self._left(request))
            if not can_admit(step, request) or (needed + reserved > step.free_blocks and not alone):
                break
            free = step.free_blocks
            room -= step.grant(request, room).tokens
            reserved += needed - (free - step.free_blocks)
            alone = False

    def _order(self, step: Step) -> Iterator[Request]:
        if len(step.waiting) > self.fcfs_above:
            yield from step.waiting
            return
        shared = []
        for request in self._queue.best_first(step):
            if step.cached_tokens(request) <= self.shared_threshold <= step.pending_tokens(request):
                shared.append(request)
            else:
                yield request
        yield from shared

    def _left(self, request: Request) -> int:
        return min(max(request.max_tokens - request.num_output_tokens, 0), self.clip_max_new_tokens)

    def _reserved(self, step: Step, request: Request) -> int:
        """Blocks kept for what a running request may still generate, and for what is left of its prompt."""
        return step.blocks_needed(request, request.num_uncomputed_tokens + int(self._left(request) * self._ratio))

    def _after_preemption(self, step: Step) -> float:
        running = running_now(step)
        generated = sum(request.num_output_tokens for request in running)
        allowed = sum(self._left(request) + request.num_output_tokens for request in running)
        return min((generated + AHEAD * len(running)) / (allowed + 1), 1.0)

    def _nobody_until_a_finish(self, step: Step) -> bool:
        """Whether no waiting request could be admitted, whatever the share falls to."""
        head = next(self._order(step), None)
        return head is None or not can_admit(step, head)


def _longest_prefix(step: Step, request: Request) -> int:
    return -step.cached_tokens(request)


def _least_generated(request: Request) -> tuple[int, int]:
    """The largest is preempted first."""
    return -request.num_output_tokens, request.num_prompt_tokens
