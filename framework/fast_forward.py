"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the cohort: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. Knows the engine; engine.py does not know how.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from schedlab.framework.journal import log_decision
from schedlab.framework.limits import ending
from schedlab.framework.results.rows import StepRow
from schedlab.framework.step import Decision

if TYPE_CHECKING:
    from schedlab.framework.engine import Engine


class StandingCost(Protocol):
    """What one step of a fixed number of decodes costs: `base + slope * context` in fixed point, shifted right.

    `duration_ns` is that expression; a jump evaluates it in place, tick by tick.
    """

    base: int
    slope: int
    shift: int

    def duration_ns(self, context_sum: int) -> int:
        """Nanoseconds of a step after which the contexts sum to `context_sum`."""

    def chain_ns(self, context_sum: int, growth: int, num_steps: int) -> int:
        """Nanoseconds of a chain of steps, after which the contexts sum to `context_sum`, `context_sum + growth`, …"""

    def bound(self, context_sum: int) -> str | None:
        """What limits such a step."""


Jump = Callable[[int, Decision | None], None]
"""Executes standing steps, at least one, from a boundary at the given time. The decision is the one just taken, whose
blocks are given already, or None when it stands from before."""


class Jumper:
    """Jumps one step after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cost: Callable[[int], StandingCost] = engine.executor.decode_cost  # type: ignore[attr-defined]

    def __call__(self, now: int, decision: Decision | None) -> None:
        engine = self._engine
        ledger, recorder = engine.ledger, engine.recorder
        cohort, cache = ledger.cohort, ledger.cache
        if decision is None:
            ledger.grow(cohort.needing_block())
        n = len(cohort.members)
        cost, context = self._cost(n), cohort.total_base + n * (cohort.tick + 1)
        free, unowned = cache.num_free, cache.num_unowned
        first = now + cost.duration_ns(context)
        shared = cohort.emitted_ns == now and not cohort.stragglers  # then the first gap is the first duration
        first_gaps = [] if shared else engine.commit.gaps(first)
        cohort.stragglers.clear()
        cohort.tick += 1
        bound = cost.bound(context)
        steps, end, free_min, free_block_ns = _extend(engine, cost, context + n, now, first, bound)
        cohort.emitted_ns = end
        engine.clock.idle_until(end)
        index = engine.num_steps
        if decision is not None and decision.refusals:
            log_decision(engine, decision)
            if steps > 1:
                recorder.decode_all(index + 1, first, steps - 1)
        else:
            recorder.decode_all(index, now, steps)
        row = StepRow(
            index, steps, now, end - now, 0, n, 0, n, context, len(ledger.running), len(ledger.waiting), free, unowned,
            0, bound, engine.modelled_us * steps,
        )  # fmt: skip
        recorder.step(row, free * (first - now) + free_block_ns, free_min)
        for gap_ns, count in first_gaps:
            recorder.gap(gap_ns, count)
        if shared:
            recorder.even_gaps(n, cost, context, steps)
        elif steps > 1:
            recorder.even_gaps(n, cost, context + n, steps - 1)
        engine.num_steps = index + steps
        engine.tell_progress(steps)
        for request in cohort.take_finished():
            engine.finish(request, ending(request, engine.config), end)


def _extend(
    engine: Engine, cost: StandingCost, context: int, begin: int, now: int, bound: str | None
) -> tuple[int, int, int, int]:
    """Further steps until somebody finishes, arrives or aborts, the hold's time is up, or the next does not fit.

    One step, since `begin`, is done, it is `now`, and after the next the contexts sum to `context`. A stretch is one
    row, so it also ends where another bound begins, or the measured window does. Returns its steps, the first one
    included, its end, the fewest free blocks, and the sum of free blocks times duration without the first step's.
    """
    ledger = engine.ledger
    cohort, cache = ledger.cohort, ledger.cache
    buckets, size, pool, n = cohort.buckets, cohort.block_size, cache.pool.free, len(cohort.members)
    growth, shift, scaled = cost.slope * n, cost.shift, cost.base + cost.slope * context
    first = tick = cohort.tick
    finish = cohort.next_finish()
    assert finish is not None
    last = finish
    if cost.bound(context + n * (finish - tick)) != bound:
        last = tick + _alike(cost, context, n, finish - tick, bound)
    stop = stop_ns(engine, begin)
    free, spare, free_block_ns = cache.num_free, len(pool), 0
    while tick < last and now < stop:
        needing = buckets[tick % size]
        if needing:
            need = len(needing)
            if need <= spare:
                for request in needing:
                    request.block_table.append(pool.pop())
                spare -= need
            elif need > free or cache.eviction_disturbs(need):
                break
            else:
                ledger.grow(needing)
                spare = len(pool)
            free -= need
        duration = scaled >> shift
        now += duration
        free_block_ns += duration * free
        scaled += growth
        tick += 1
    cohort.tick = tick
    return tick - first + 1, now, free, free_block_ns


def _alike(cost: StandingCost, context: int, growth: int, steps: int, bound: str | None) -> int:
    """How many of `steps` steps `bound` limits, before another resource does."""
    return bisect_left(range(steps), 1, key=lambda k: cost.bound(context + growth * k) != bound)


def stop_ns(engine: Engine, begin_ns: int) -> float:
    """When a stretch since `begin_ns` must end: at the hold's own time, an arrival, an abort, the horizon, or the
    window's edge.
    """
    assert engine.standing_until is not None
    edge = engine.recorder.next_edge_ns(begin_ns)
    return min(engine.standing_until, engine.next_event_ns(), engine.horizon_ns, edge)
