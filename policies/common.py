"""What policies share: small functions over the step's verbs that an author can combine or replace.

They know only what a policy may see. None of them idles or holds: that is the policy's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from schedlab.framework.request import Request
from schedlab.framework.step import Grant, PreemptMode, Step


def check_mode(mode: str) -> None:
    """ValueError unless `mode` is a way to preempt."""
    if mode not in ("recompute", "swap"):
        raise ValueError(f"policy.preempt_mode: expected recompute or swap, found {mode}")


def make_room(
    step: Step,
    request: Request,
    victims: Iterable[Request],
    max_tokens: int | None = None,
    mode: PreemptMode = "recompute",
) -> Grant:
    """Grant `request`; while blocks are short, preempt the next of `victims` and try again."""
    grant = step.grant(request, max_tokens)
    for victim in victims:
        if grant or grant.refusal != "memory":
            break
        step.preempt(victim, mode)
        grant = step.grant(request, max_tokens)
    return grant


def newer_than(step: Step, request: Request) -> list[Request]:
    """Running requests that were admitted after `request` and still run, newest first."""
    running = list(step.running)
    return [r for r in reversed(running[running.index(request) + 1 :]) if r.state == "running"]


def decode_all(step: Step, mode: PreemptMode = "recompute", limit: int | None = None) -> bool:
    """One token to each of `decoding` (the oldest `limit` of them); where blocks are short, the newest make room.

    Returns whether all that were decoding at the start of the step decode: nobody was preempted, refused or left out.
    """
    limited = limit is not None and len(step.decoding) > limit
    refused = step.grant_decodes(step.decoding[:limit] if limited else None)
    for request in refused:
        if request.state != "running" or step.token_budget == 0:
            continue
        if not make_room(step, request, newer_than(step, request), mode=mode):
            step.preempt(request, mode)
    return not refused and not limited


def remaining(step: Step, request: Request) -> int:
    """Tokens that `request` still has to compute, its cached prefix left out."""
    return request.num_tokens - step.cached_tokens(request)


def fits_whole(step: Step, request: Request, spare_blocks: int = 0) -> bool:
    """Whether blocks for all that `request` has to compute are free now, and `spare_blocks` beyond them.

    Admission asks this of the whole context, not of the first chunk: what is admitted chunk by chunk into a full pool
    is preempted again before it is done. With nothing running, `spare_blocks` is waived.
    """
    needed = step.blocks_needed(request, request.num_tokens - step.cached_tokens(request))
    return needed + (spare_blocks if spare_blocks and step.running else 0) <= step.free_blocks


def continue_prefills(step: Step, room: int, mode: PreemptMode = "recompute") -> int:
    """Up to `room` tokens to the running prompts, oldest first; newer requests make room. Returns the tokens
    granted.
    """
    granted = 0
    for request in step.prefilling:
        if granted >= room:
            break
        if request.state == "running":
            fits = min(step.fits(request), room - granted) or room - granted
            granted += make_room(step, request, newer_than(step, request), fits, mode).tokens
    return granted


def admit(step: Step, order: Iterable[Request], room: int, spare_blocks: int = 0) -> int:
    """Up to `room` tokens to waiting requests in `order`; the first that does not fit ends it. Returns the tokens
    granted.
    """
    granted = 0
    for request in order:
        if granted >= room or not step.free_slots or not fits_whole(step, request, spare_blocks):
            break
        grant = step.grant(request, room - granted)
        if not grant:
            break
        granted += grant.tokens
    return granted
