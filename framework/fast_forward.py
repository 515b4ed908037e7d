"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the cohort: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. Knows the engine; engine.py does not know how.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from schedlab.framework.chain import chain_limit, take_chain
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

    def chain_ns(self, context_sum: int, growth: int, num_steps: int) -> int:
        """Nanoseconds of a chain of steps, after which the contexts sum to `context_sum`, `context_sum + growth`, …"""

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
        ledger, cohort = engine.ledger, engine.ledger.cohort
        if decision is None:
            ledger.grow(cohort.needing_block())
        n = len(cohort.members)
        limit = chain_limit(cohort.members, engine.config.max_chained_steps)
        first = take_chain(ledger, limit) if limit > 1 else 1
        cost, context = self._cost(n), cohort.context + n
        duration = cost.duration_ns(context) if first == 1 else cost.chain_ns(context, n, first)
        stretch = Stretch(engine, now, context, duration, cost.bound(context))
        if cohort.stragglers:
            stretch.first_gaps = engine.commit.gaps(stretch.end_ns)
            cohort.stragglers.clear()
        else:
            stretch.gaps.append(stretch.end_ns - cohort.emitted_ns)
        stretch.follow(first)
        cohort.tick += first
        last = _extend(stretch, engine, cost) if limit == 1 else _extend_by_chains(stretch, engine, cost, limit)
        cohort.emitted_ns = stretch.end_ns
        engine.clock.idle_until(stretch.end_ns)
        _record(engine, decision, stretch)
        if cohort.tick == last:
            for request in cohort.take_finished():
                engine.finish(request, ending(request, engine.config), stretch.end_ns)


class Stretch:
    """Equal steps in a row: the inputs and the bound of the first, when it and the last of them ended, and the gaps
    between tokens.

    `gaps` are those that all of decoding share, of the first step too, unless its last tokens are of several times,
    which `first_gaps` then counts. A chain's duration is that of its first step; its `followers` take 0, as their
    tokens come with the chain's.
    """

    __slots__ = (
        "begin_ns", "bound", "context", "end_ns", "first_gaps", "followers", "free", "free_block_ns", "free_min",
        "gaps", "second_ns", "steps", "unowned",
    )  # fmt: skip

    def __init__(self, engine: Engine, now: int, context: int, duration_ns: int, bound: str | None) -> None:
        self.begin_ns = now
        self.context = context
        self.bound = bound
        self.free = self.free_min = engine.ledger.cache.num_free
        self.unowned = engine.ledger.cache.num_unowned
        self.free_block_ns = self.free * duration_ns
        self.end_ns = self.second_ns = now + duration_ns
        self.first_gaps: list[tuple[int, int]] = []
        self.gaps: list[int] = []
        self.steps = self.followers = 0

    def follow(self, steps: int) -> None:
        """What was last is a chain of `steps`, or one step."""
        if steps > 1:
            if not self.steps:
                self.second_ns = self.begin_ns
            self.gaps += [0] * (steps - 1)
            self.followers += steps - 1
        self.steps += steps


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
    assert finish is not None
    last, stop = _bound_holds_to(finish, cohort.tick, cost, context, n, stretch.bound), _stop_ns(engine, stretch)
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


def _extend_by_chains(stretch: Stretch, engine: Engine, cost: StandingCost, limit: int) -> int:
    """`_extend` where up to `limit` steps are one boundary, at which alone anything else can happen."""
    ledger, cohort = engine.ledger, engine.ledger.cohort
    n, last, stop = len(cohort.members), cohort.next_finish(), _stop_ns(engine, stretch)
    context = stretch.context + n * stretch.steps
    assert last is not None
    while cohort.tick != last and stretch.end_ns < stop and cost.bound(context) == stretch.bound:
        if not engine.next_tick_fits():
            break
        ledger.grow(cohort.needing_block())
        steps = take_chain(ledger, limit)
        duration, free = cost.chain_ns(context, n, steps), ledger.cache.num_free
        stretch.gaps.append(duration)
        stretch.follow(steps)
        stretch.end_ns += duration
        stretch.free_min = min(stretch.free_min, free)
        stretch.free_block_ns += duration * free
        context += n * steps
        cohort.tick += steps
    return last


def _stop_ns(engine: Engine, stretch: Stretch) -> float:
    """When the stretch must end: by the hold's own time, an arrival, an abort, or an edge of the measured window."""
    assert engine.standing_until is not None
    return min(engine.standing_until, engine.next_event_ns(), engine.recorder.next_edge_ns(stretch.begin_ns))


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
        engine.modelled_us * (steps - stretch.followers), stretch.free_block_ns, stretch.free_min,
    )  # fmt: skip
    for gap_ns, count in stretch.first_gaps:
        recorder.gap(gap_ns, count)
    recorder.gaps(stretch.gaps, n)
    engine.num_steps += steps
    engine.tell_progress(steps)
