"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the cohort: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. Knows the engine; engine.py does not know how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from schedlab.framework.clock import VirtualClock
from schedlab.framework.policy import Progressed

if TYPE_CHECKING:
    from schedlab.framework.engine import Engine


def jumper(engine: Engine) -> Callable[[int], bool] | None:
    """A function that jumps from a boundary at `now` and says whether it did; None if this engine must be stepped.

    Jumping needs the virtual clock and an executor whose cost of a fixed decode set is `decode_cost(n)`, a function of the
    sum of contexts alone.
    """
    executor = engine.executor
    if not isinstance(engine.clock, VirtualClock) or not getattr(executor, "jumpable", False):
        return None
    decode_cost = executor.decode_cost  # type: ignore[attr-defined]
    return lambda now: _jump(engine, engine.clock, decode_cost, now)


def _jump(engine: Engine, clock: object, decode_cost: Callable[[int], Callable[[int], int]], now: int) -> bool:
    ledger, cohort = engine.ledger, engine.ledger.cohort
    cache, pool = ledger.cache, ledger.pool
    last = cohort.next_finish()
    assert last is not None and engine._standing_until is not None
    first_tick, first_now, first_context = cohort.tick, now, cohort.context + len(cohort.members)
    free, unowned = cache.num_free, cache.num_unowned
    stop = min(engine._standing_until, engine.next_event_ns())
    n = len(cohort.members)
    cost = decode_cost(n)
    context, buckets, block_size = first_context, cohort.buckets, cohort.block_size
    gap = engine.recorder.gap
    tick = first_tick
    while tick + 1 < last and now < stop:  # the step that finishes somebody is stepped
        needing = buckets[tick % block_size]
        if needing:
            need = len(needing)
            if need > len(pool.free) and (need > cache.num_free or cache.eviction_disturbs(need)):
                break
            for request in needing:
                request.block_table += cache.allocate(1)
        duration = cost(context)
        now += duration
        gap(duration, n)
        context += n
        tick += 1
    steps = tick - first_tick
    if not steps:
        return False
    cohort.tick = tick
    cohort.emitted_ns = now
    clock.idle_until(now)  # type: ignore[attr-defined]
    _record(engine, steps, first_now, now - first_now, first_context, free, unowned)
    return True


def _record(
    engine: Engine, steps: int, now: int, duration: int, context: int, free: int, unowned: int
) -> None:
    ledger, index = engine.ledger, engine.num_steps
    members = ledger.cohort.members
    engine.recorder.decode_all(index, now, steps)
    engine.recorder.step(
        index, steps, now, duration, 0, len(members), 0, len(members), context, len(ledger.running), len(ledger.waiting),
        free, unowned, 0, None, 0.0,
    )  # fmt: skip
    engine.num_steps += steps
    if engine._observe is not None:
        engine._observe(Progressed((), tuple(members), steps))
    if index // engine.config.audit_every != engine.num_steps // engine.config.audit_every:
        engine.audit()
