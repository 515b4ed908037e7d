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
    clock, executor = engine.clock, engine.executor
    if not isinstance(clock, VirtualClock) or not getattr(executor, "jumpable", False):
        return None
    decode_cost: Callable[[int], StandingCost] = executor.decode_cost  # type: ignore[attr-defined]
    return lambda now, decision: _jump(engine, clock, decode_cost, now, decision)


def _jump(
    engine: Engine,
    clock: VirtualClock,
    decode_cost: Callable[[int], StandingCost],
    now: int,
    decision: Decision | None,
) -> None:
    ledger, cohort = engine.ledger, engine.ledger.cohort
    n, context = len(cohort.members), cohort.context + len(cohort.members)
    if decision is None:
        ledger.grow(cohort.needing_block())
    cost = decode_cost(n)
    limit = chain_limit(cohort.members, engine.config.max_chained_steps)
    first = take_chain(ledger, limit) if limit > 1 else 1
    stretch = Stretch(now, context, ledger.cache.num_free, ledger.cache.num_unowned, cost.chain_ns(context, n, first))
    first_gaps = engine.commit.gaps(stretch.end_ns)
    cohort.advance(stretch.end_ns)
    bound = cost.bound(context)
    if limit > 1:
        stretch.follow(first)
        cohort.tick += first - 1
        _extend_by_chains(stretch, engine, cost, context + n * first, bound, limit)
    else:
        _extend(stretch, engine, cost, context + n, bound)
        cohort.tick += len(stretch.durations)
    cohort.emitted_ns = stretch.end_ns
    clock.idle_until(stretch.end_ns)
    _record(engine, decision, stretch, first_gaps, bound)
    for request in cohort.take_finished():
        engine.finish(request, ending(request, engine.config), stretch.end_ns)


class Stretch:
    """Equal steps in a row: the inputs of the first, when the last ended, and the durations of those after the
    first. A chain's duration is that of its first step; its `followers` take 0, as their tokens come with the chain's.
    """

    __slots__ = (
        "begin_ns", "context", "durations", "end_ns", "followers", "free", "free_block_ns", "free_min", "second_ns",
        "unowned",
    )  # fmt: skip

    def __init__(self, begin_ns: int, context: int, free: int, unowned: int, duration_ns: int) -> None:
        self.begin_ns = begin_ns
        self.context = context
        self.free = self.free_min = free
        self.unowned = unowned
        self.durations: list[int] = []
        self.end_ns = self.second_ns = begin_ns + duration_ns
        self.free_block_ns = free * duration_ns
        self.followers = 0

    def follow(self, steps: int) -> None:
        """What was last is a chain of `steps`."""
        if not self.durations and steps > 1:
            self.second_ns = self.begin_ns
        self.durations += [0] * (steps - 1)
        self.followers += steps - 1


def _extend(stretch: Stretch, engine: Engine, cost: StandingCost, context: int, bound: str | None) -> None:
    """Further steps until somebody finishes, arrives or aborts, the hold's time is up, or the next does not fit.

    A stretch is one row, so it also ends where another bound begins, or the measured window does.
    """
    cohort, cache = engine.ledger.cohort, engine.ledger.cache
    pool, buckets, size, n = cache.pool.free, cohort.buckets, cohort.block_size, len(cohort.members)
    note, base, slope, shift = stretch.durations.append, cost.base, cost.slope, cost.shift
    last = cohort.next_finish()
    assert last is not None and engine.standing_until is not None
    stop = min(engine.standing_until, engine.next_event_ns(), engine.recorder.next_edge_ns(stretch.begin_ns))
    if cost.bound(context + n * (last - cohort.tick)) != bound:
        last = cohort.tick + bisect_left(
            range(last - cohort.tick), 1, key=lambda k: cost.bound(context + n * k) != bound
        )
    tick, now, free, area = cohort.tick, stretch.end_ns, stretch.free, stretch.free_block_ns
    spare = len(pool)
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
    stretch.end_ns, stretch.free_min, stretch.free_block_ns = now, free, area


def _extend_by_chains(
    stretch: Stretch, engine: Engine, cost: StandingCost, context: int, bound: str | None, limit: int
) -> None:
    """`_extend` where up to `limit` steps are one boundary, at which alone anything else can happen."""
    ledger, cohort = engine.ledger, engine.ledger.cohort
    n = len(cohort.members)
    assert engine.standing_until is not None
    stop = min(engine.standing_until, engine.next_event_ns(), engine.recorder.next_edge_ns(stretch.begin_ns))
    last = cohort.next_finish()
    while cohort.tick != last and stretch.end_ns < stop and cost.bound(context) == bound and engine.next_tick_fits():
        ledger.grow(cohort.needing_block())
        steps = take_chain(ledger, limit)
        duration, free = cost.chain_ns(context, n, steps), ledger.cache.num_free
        stretch.durations.append(duration)
        stretch.follow(steps)
        stretch.end_ns += duration
        stretch.free_min = min(stretch.free_min, free)
        stretch.free_block_ns += duration * free
        context += n * steps
        cohort.tick += steps


def _record(
    engine: Engine,
    decision: Decision | None,
    stretch: Stretch,
    first_gaps: list[tuple[int, int]],
    bound: str | None,
) -> None:
    """One row for the stretch: the cost inputs of its first step, and the total duration."""
    recorder, ledger, index = engine.recorder, engine.ledger, engine.num_steps
    members = ledger.cohort.members
    steps = left = 1 + len(stretch.durations)
    since = stretch.begin_ns
    if decision is not None:
        log_decision(engine, decision, members)
        left, since = left - 1, stretch.second_ns
    if left:
        recorder.decode_all(index + steps - left, since, left)
    recorder.step(
        index, steps, stretch.begin_ns, stretch.end_ns - stretch.begin_ns, 0, len(members), 0, len(members),
        stretch.context, len(ledger.running), len(ledger.waiting), stretch.free, stretch.unowned, 0, bound,
        engine.modelled_us * (steps - stretch.followers), stretch.free_block_ns, stretch.free_min,
    )  # fmt: skip
    for gap_ns, count in first_gaps:
        recorder.gap(gap_ns, count)
    recorder.gaps(stretch.durations, len(members))
    engine.num_steps += steps
    engine.tell_progress(steps)
