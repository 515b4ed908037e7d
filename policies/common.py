"""What policies share: small functions over the step's verbs that an author can combine or replace.

They know only what a policy may see. None of them idles or holds: that is the policy's to say.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import takewhile
from typing import Any, NamedTuple

from schedlab.framework.request import Request
from schedlab.framework.step import Grant, Step
from schedlab.policies.preemption import Mode, preempt
from schedlab.policies.ranking import may_be_admitted
from schedlab.policies.victims import Rank, Victims, newest, running_now

_RENAMED = {"make_room": "grant_with_preemption", "make_way": "preempt_to_admit", "admits": "can_admit"}


def __getattr__(name: str) -> Any:
    """Names of the last version, for policies that still use them."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is called {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]


def check_chunk(tokens: int) -> None:
    """ValueError unless a step may compute `tokens`."""
    if tokens < 1:
        raise ValueError(f"policy.chunk_size: expected at least 1 token, found {tokens}")


def grant_with_preemption(
    step: Step,
    request: Request,
    victims: Iterable[Request],
    max_tokens: int | None = None,
    mode: Mode = "recompute",
) -> Grant:
    """Grant `request`; while blocks are short, preempt the next of `victims` and try again."""
    grant = step.grant(request, max_tokens)
    if grant or grant.refusal != "memory":
        return grant  # before anybody is looked for
    for victim in victims:
        preempt(step, victim, mode)
        grant = step.grant(request, max_tokens)
        if grant or grant.refusal != "memory":
            break
    return grant


def decode_all(step: Step, mode: Mode = "recompute", limit: int | None = None, victims: Victims = newest) -> bool:
    """One token to each of `decoding` (the oldest `limit` of them); where blocks are short, `victims` make room.

    Returns whether all that were decoding at the start of the step decode: nobody was preempted, refused or left out.
    """
    limited = limit is not None and len(step.decoding) > limit
    refused = step.grant_decodes([r for r in step.decoding if r.state == "running"][:limit] if limited else None)
    for request in refused:
        if request.state != "running" or step.token_budget == 0:
            continue
        if not grant_with_preemption(step, request, victims(step, request), mode=mode):
            preempt(step, request, mode)
    return not refused and not limited


Decodes = Callable[[Step, Mode, int | None, Victims], bool]
"""How a step decodes: `decode_all`, `decode_with_spare`, or what takes and returns the same."""


def decode_with_spare(
    step: Step,
    mode: Mode = "recompute",
    limit: int | None = None,
    victims: Victims = newest,
    set_aside: Callable[[Step], int] = lambda step: 0,
) -> bool:
    """As `decode_all`, in order, but each needs a free block beyond those `set_aside`, whether it starts one or not: a
    rule of vLLM V0. Who runs alone needs none.
    """
    undisturbed, aside = limit is None or len(step.decoding) <= limit, set_aside(step)
    for request in step.decoding[:limit]:
        if request.state != "running" or not step.token_budget:
            continue
        if step.free_blocks <= aside and len(running_now(step)) > 1:
            undisturbed = False
            for victim in victims(step, request):
                preempt(step, victim, mode)
                aside = set_aside(step)
                if step.free_blocks > aside or len(running_now(step)) == 1:
                    break
            else:
                preempt(step, request, mode)
                aside = set_aside(step)
                continue
        undisturbed &= bool(step.grant(request))
    return undisturbed


def never_short(step: Step) -> bool:
    """Whether a decision to decode may stand although decodes need spare blocks: if all that decode generate
    `max_tokens`, a block is left.
    """
    return sum(step.blocks_needed(request, _worst_case(request)) for request in step.decoding) < step.free_blocks


def remaining(step: Step, request: Request) -> int:
    """Tokens that `request` still has to compute, its cached prefix left out."""
    return request.num_tokens - step.cached_tokens(request)


def fits_whole(step: Step, request: Request, spare_blocks: int = 0) -> bool:
    """Whether blocks for all that `request` has to compute are free now, and `spare_blocks` beyond them.

    Admission asks this of the whole context, not of the first chunk: what is admitted chunk by chunk into a full pool
    is preempted again before it is done. With nothing running, `spare_blocks` is waived. The engine's own watermark
    counts as well.
    """
    needed = step.blocks_needed(request, remaining(step, request))
    spare = step.watermark_blocks
    if spare_blocks and step.running:
        spare = max(spare, spare_blocks)
    return needed + spare <= step.free_blocks


class PromptLimits(NamedTuple):
    """How prompts share a step: `chunk` tokens of one of them at most, and `partial` of them partly computed at a time.

    With a limit of `partial`, what can be computed whole in the step overtakes a prompt that would be one too many.
    """

    chunk: int | None = None
    partial: int | None = None

    def chunk_of(self, room: int) -> int:
        return room if self.chunk is None else min(room, self.chunk)


NO_LIMITS = PromptLimits()


def continue_prefills(
    step: Step, room: int, mode: Mode = "recompute", victims: Victims = newest, limits: PromptLimits = NO_LIMITS
) -> int:
    """Up to `room` tokens to the running prompts, oldest first; `victims` make room. Returns the tokens granted."""
    granted = 0
    for request in step.prefilling:
        if granted >= room:
            break
        if request.state == "running":
            granted += continue_prefill(step, request, limits.chunk_of(room - granted), mode, victims)
    return granted


def continue_prefill(step: Step, request: Request, room: int, mode: Mode, victims: Victims) -> int:
    """Up to `room` tokens to one running prompt: what fits or, if nothing does, what `victims` make room for."""
    fits = min(step.fits(request), room) or room
    return grant_with_preemption(step, request, _when_needed(victims, step, request), fits, mode).tokens


def _when_needed(victims: Victims, step: Step, request: Request) -> Iterator[Request]:
    """`victims` for `request`, looked for among all that run only if somebody must go."""
    yield from victims(step, request)


def admit(step: Step, order: Iterable[Request], room: int, spare_blocks: int = 0) -> int:
    """Up to `room` tokens to waiting requests in `order`; the first that does not fit ends it. Returns the tokens
    granted. Requests that were preempted in this step are passed over.
    """
    granted = 0
    for request in order:
        if not may_be_admitted(step, request):
            continue
        if granted >= room or not step.free_slots or not fits_whole(step, request, spare_blocks):
            break
        grant = step.grant(request, room - granted)
        if not grant:
            break
        granted += grant.tokens
    return granted


def admit_limited(step: Step, order: Iterable[Request], room: int, limits: PromptLimits) -> int:
    """As `admit`, under `limits`: who would be one partly computed prompt too many is passed over."""
    granted, partial = 0, sum(request.state == "running" for request in step.prefilling)  # this step's last ones too
    for request in order:
        if not may_be_admitted(step, request):
            continue
        if granted >= room or not step.free_slots or not fits_whole(step, request):
            break
        chunk = limits.chunk_of(room - granted)
        whole = remaining(step, request) <= chunk
        if not whole and limits.partial is not None and partial >= limits.partial:
            continue
        grant = step.grant(request, chunk)
        if not grant:
            break
        granted += grant.tokens
        partial += not whole
    return granted


def can_admit(step: Step, request: Request) -> bool:
    """Whether the waiting `request` could be admitted now, budget aside."""
    return bool(step.free_slots) and fits_whole(step, request)


def nobody_fits(step: Step) -> bool:
    """Whether no waiting request could be admitted now, in whatever order they are asked.

    Then a decision to decode may stand, although ranks move with time: until somebody finishes, memory only gets less.
    """
    return not any(can_admit(step, request) for request in step.waiting)


def chunked_step(
    step: Step,
    order: Callable[[Step], Iterable[Request]],
    chunk_size: int,
    mode: Mode = "recompute",
    victims: Victims = newest,
    limits: PromptLimits = NO_LIMITS,
    decodes: Decodes = decode_all,
) -> bool:
    """Stall-free mix: `decodes`, then running prompts, then waiting ones in `order`; `chunk_size` tokens in all.

    `order` is asked after the decodes, whose blocks may have evicted what a waiting request counted on, and only if
    somebody can be admitted. Returns whether the step decodes all and does nothing else.
    """
    before = step.token_budget
    undisturbed = decodes(step, mode, chunk_size, victims)
    room = min(chunk_size, before) - (before - step.token_budget)
    chunks = continue_prefills(step, room, mode, victims, limits)
    if undisturbed and chunks < room and step.waiting and step.free_slots:
        left = room - chunks
        limited = limits != NO_LIMITS
        chunks += admit_limited(step, order(step), left, limits) if limited else admit(step, order(step), left)
    return undisturbed and not chunks


def ranked_step(
    step: Step,
    waiting: Iterable[Request],
    rank: Rank,
    chunk_size: int,
    mode: Mode = "recompute",
    victims: Victims = newest,
) -> bool:
    """As `chunked_step`, but running prompts and the `waiting`, which are in the order of `rank`, take turns by it. The
    first waiting one that does not fit ends admission, and so does a running one that finds no block free.
    """
    before = step.token_budget
    admitting = undisturbed = decode_all(step, mode, chunk_size, victims)
    left = room = min(chunk_size, before) - (before - step.token_budget)
    prompts = sorted(step.prefilling, key=rank)
    for request in merge(prompts, takewhile(lambda _: admitting, waiting), key=rank):  # noqa: B023 - asked anew each time
        if not left:
            break
        if request.state == "running":
            admitting = admitting and bool(step.fits(request))
            left -= continue_prefill(step, request, left, mode, victims)
        elif admitting and may_be_admitted(step, request):
            admitting = can_admit(step, request)
            if admitting:
                left -= step.grant(request, left).tokens
    return undisturbed and left == room


def reserve(step: Step, order: Iterable[Request]) -> Iterator[Request]:
    """Waiting requests in `order` as long as blocks for prompt + `max_tokens` of all that run and of all that were
    yielded can be had together. With nobody running the first is yielded in any case.
    """
    left = step.free_blocks - sum(step.blocks_needed(r, _worst_case(r)) for r in step.running if r.state == "running")
    alone = not step.running
    for request in order:
        needed = step.blocks_needed(request, _worst_case(request))
        if needed > left and not alone:
            break
        yield request
        left -= needed
        alone = False


def _worst_case(request: Request) -> int:
    """Tokens still to compute if `request` generates `max_tokens`, the last of which is never computed."""
    return request.num_prompt_tokens + request.max_tokens - 1 - request.num_computed_tokens


def preempt_to_admit(step: Step, head: Request, victims: Victims, mode: Mode = "recompute") -> bool:
    """While `head` cannot be admitted, preempt the next of `victims`, running requests that it may displace.

    To be called before anything is granted. Returns whether anybody was preempted.
    """
    if can_admit(step, head):
        return False
    preempted = False
    for victim in victims(step, head):
        preempt(step, victim, mode)
        preempted = True
        if can_admit(step, head):
            break
    return preempted
