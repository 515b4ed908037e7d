"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the cohort: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. Knows the engine; engine.py does not know how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from schedlab.framework.clock import VirtualClock
from schedlab.framework.journal import log_decision
from schedlab.framework.limits import ending
from schedlab.framework.step import Decision

if TYPE_CHECKING:
    from schedlab.framework.engine import Engine


class StandingCost(Protocol):
    """What one step of a fixed number of decodes costs."""

    def duration_ns(self, context_sum: int) -> int:
        """Nanoseconds of a step after which the contexts sum to `context_sum`."""

    def bound(self, context_sum: int) -> str | None:
        """What limits such a step."""


def jumper(engine: Engine) -> Callable[[int, Decision | None], None] | None:
    """A function that executes standing steps from a boundary at `now`; None if this engine must be stepped.

    Its second argument is the step just decided, whose blocks are given already, or None when the decision stands from
    before. It takes at least one step. Jumping needs the virtual clock and an executor whose cost of a fixed decode set
    is a function of the sum of contexts alone.
    """
    clock, executor = engine.clock, engine.executor
    if not isinstance(clock, VirtualClock) or not getattr(executor, "jumpable", False):
        return None
    decode_cost: Callable[[int], StandingCost] = executor.decode_cost  # type: ignore[attr-defined]
    return lambda now, decision: _jump(engine, clock, decode_cost, now, decision)


def _jump(
    engine: Engine, clock: VirtualClock, decode_cost: Callable[[int], StandingCost], now: int, decision: Decision | None
) -> None:
    ledger, cohort = engine.ledger, engine.ledger.cohort
    n, tick, begun = len(cohort.members), cohort.tick, now
    context = first_context = cohort.context + n
    if decision is None:
        for request in cohort.needing_block():
            request.block_table += ledger.cache.allocate(1)
    free, unowned = ledger.cache.num_free, ledger.cache.num_unowned
    cost = decode_cost(n)
    now += cost.duration_ns(context)
    engine.note_gaps(now)
    cohort.advance(now)
    ticks, now = _ticks(engine, cost, context + n, now)
    cohort.tick += ticks
    cohort.emitted_ns = now
    clock.idle_until(now)
    _record(engine, decision, cohort.tick - tick, (begun, now - begun, first_context, free, unowned, cost.bound(context)))
    for request in cohort.take_finished():
        engine.finish(request, ending(request, engine.config), now)


def _ticks(engine: Engine, cost: StandingCost, context: int, now: int) -> tuple[int, int]:
    """Ticks from the boundary at `now` on until the decision ends; returns how many, and the time after them."""
    cohort, cache = engine.ledger.cohort, engine.ledger.cache
    free, buckets, size = cache.pool.free, cohort.buckets, cohort.block_size
    gap, duration_ns, n = engine.recorder.gap, cost.duration_ns, len(cohort.members)
    last = cohort.next_finish()
    assert last is not None and engine.standing_until is not None
    stop = min(engine.standing_until, engine.next_event_ns())
    tick = first = cohort.tick
    while tick < last and now < stop:
        needing = buckets[tick % size]
        if needing:
            need = len(needing)
            if need > len(free) and (need > cache.num_free or cache.eviction_disturbs(need)):
                break
            for request in needing:
                request.block_table += (free.pop(),) if free else cache.allocate(1)
        duration = duration_ns(context)
        now += duration
        gap(duration, n)
        context += n
        tick += 1
    return tick - first, now


def _record(engine: Engine, decision: Decision | None, steps: int, row: tuple[int, int, int, int, int, str | None]) -> None:
    """The rows of `steps` equal steps: the cost inputs of the first, and the total duration."""
    now, duration, context, free, unowned, bound = row
    recorder, ledger, index = engine.recorder, engine.ledger, engine.num_steps
    members = ledger.cohort.members
    left = steps
    if decision is not None:
        log_decision(engine, decision, members)
        left -= 1
    if left:
        recorder.decode_all(index + steps - left, now, left)
    recorder.step(
        index, steps, now, duration, 0, len(members), 0, len(members), context, len(ledger.running), len(ledger.waiting),
        free, unowned, 0, bound, 0.0,
    )  # fmt: skip
    engine.num_steps += steps
    engine.tell_progress(steps)
