"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the cohort: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. Knows the engine; engine.py does not know how.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from schedlab.framework.clock import VirtualClock
from schedlab.framework.journal import log_decision
from schedlab.framework.limits import ending
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

    def bound(self, context_sum: int) -> str | None:
        """What limits such a step."""


def jumper(engine: Engine) -> Callable[[int, Decision | None], None] | None:
    """A function that executes standing steps from a boundary at `now`; None if this engine must be stepped.

    Its second argument is the step just decided, whose blocks are given already, or None when the decision stands from
    before. It takes at least one step. Jumping needs the virtual clock and an executor whose cost of a fixed decode set
    is a function of the sum of contexts alone.
    """
    if isinstance(engine.clock, VirtualClock) and getattr(engine.executor, "jumpable", False):
        return Jumper(engine)
    return None


class Jumper:
    """See `jumper`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cost: Callable[[int], StandingCost] = engine.executor.decode_cost  # type: ignore[attr-defined]

    def __call__(self, now: int, decision: Decision | None) -> None:
        engine = self._engine
        cohort = engine.ledger.cohort
        if decision is None:
            engine.ledger.grow(cohort.needing_block())
        n = len(cohort.members)
        cost, context = self._cost(n), cohort.context + n
        stretch = Stretch(engine, now, context, cost)
        if cohort.stragglers:
            stretch.first_gaps = engine.commit.gaps(stretch.second_ns)
            cohort.stragglers.clear()
        else:
            stretch.gaps.append(stretch.second_ns - cohort.emitted_ns)
        cohort.tick += 1
        last = _extend(stretch, engine, cost)
        cohort.emitted_ns = stretch.end_ns
        engine.clock.idle_until(stretch.end_ns)
        _record(engine, decision, stretch)
        if cohort.tick == last:
            for request in cohort.take_finished():
                engine.finish(request, ending(request, engine.config), stretch.end_ns)


class Stretch:
    """Equal steps in a row: the inputs and the bound of the first, when the first and the last ended, and the gaps
    between tokens.

    `gaps` are those that all of decoding share; of the first step too unless their last tokens are of several times,
    which `first_gaps` then counts.
    """

    __slots__ = (
        "begin_ns", "bound", "context", "end_ns", "first_gaps", "free", "free_block_ns", "free_min", "gaps", "second_ns",
        "steps", "unowned",
    )  # fmt: skip

    def __init__(self, engine: Engine, now: int, context: int, cost: StandingCost) -> None:
        duration = (cost.base + cost.slope * context) >> cost.shift
        self.begin_ns = now
        self.context = context
        self.bound = cost.bound(context)
        self.free = self.free_min = engine.ledger.cache.num_free
        self.unowned = engine.ledger.cache.num_unowned
        self.free_block_ns = self.free * duration
        self.end_ns = self.second_ns = now + duration
        self.first_gaps: list[tuple[int, int]] = []
        self.gaps: list[int] = []
        self.steps = 1


def _bound_holds_to(last: int, tick: int, cost: StandingCost, context: int, growth: int, bound: str | None) -> int:
    """The first tick from `tick` to `last` whose step another resource bounds; `last` if none is."""
    if cost.bound(context + growth * (last - tick)) == bound:
        return last
    return tick + bisect_left(range(last - tick), 1, key=lambda k: cost.bound(context + growth * k) != bound)


def _extend(stretch: Stretch, engine: Engine, cost: StandingCost) -> int:
    """Further steps until somebody finishes, arrives or aborts, the hold's time is up, or the next does not fit.

    A stretch is one row, so it also ends where another bound begins, or the measured window does. Returns the tick at
    which the next of decoding finishes.
    """
    cohort, cache = engine.ledger.cohort, engine.ledger.cache
    pool, buckets, size, n = cache.pool.free, cohort.buckets, cohort.block_size, len(cohort.members)
    note, base, slope, shift = stretch.gaps.append, cost.base, cost.slope, cost.shift
    finish, context = cohort.next_finish(), stretch.context + n
    assert finish is not None and engine.standing_until is not None
    last = _bound_holds_to(finish, cohort.tick, cost, context, n, stretch.bound)
    stop = min(engine.standing_until, engine.next_event_ns(), engine.recorder.next_edge_ns(stretch.begin_ns))
    first = tick = cohort.tick
    now, free, area, spare = stretch.end_ns, stretch.free, stretch.free_block_ns, len(pool)
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
                engine.ledger.grow(needing)
                spare = len(pool)
            free -= need
        duration = (base + slope * context) >> shift
        note(duration)
        now += duration
        area += duration * free
        context += n
        tick += 1
    stretch.steps += tick - first
    cohort.tick = tick
    stretch.end_ns, stretch.free_min, stretch.free_block_ns = now, free, area
    return finish


def _record(engine: Engine, decision: Decision | None, stretch: Stretch) -> None:
    """One row for the stretch: the cost inputs of its first step, and the total duration."""
    recorder, ledger, index = engine.recorder, engine.ledger, engine.num_steps
    members, steps = ledger.cohort.members, stretch.steps
    n, left, since = len(members), steps, stretch.begin_ns
    if decision is not None and decision.refusals:
        log_decision(engine, decision, members)
        left, since = left - 1, stretch.second_ns
    if left:
        recorder.decode_all(index + steps - left, since, left)
    recorder.step(
        index, steps, stretch.begin_ns, stretch.end_ns - stretch.begin_ns, 0, n, 0, n, stretch.context,
        len(ledger.running), len(ledger.waiting), stretch.free, stretch.unowned, 0, stretch.bound,
        engine.modelled_us * steps, stretch.free_block_ns, stretch.free_min,
    )  # fmt: skip
    for gap_ns, count in stretch.first_gaps:
        recorder.gap(gap_ns, count)
    recorder.gaps(stretch.gaps, n)
    engine.num_steps += steps
    engine.tell_progress(steps)
