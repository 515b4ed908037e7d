"""Jumps over standing decisions whose steps run in chains: nothing else can happen but at the end of a chain.

Knows what fast_forward.py knows, and how a chain is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab.framework.chain import chain_limit, take_chain
from schedlab.framework.fast_forward import Jumper, StandingCost, stop_ns
from schedlab.framework.journal import log_decision
from schedlab.framework.limits import ending
from schedlab.framework.results.rows import StepRow
from schedlab.framework.step import Decision

if TYPE_CHECKING:
    from schedlab.framework.engine import Engine


class ChainedJumper(Jumper):
    """Jumps chain by chain: up to `engine.max_chained_steps` steps are one boundary."""

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
        last = _extend(stretch, engine, cost, limit)
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


def _extend(stretch: Stretch, engine: Engine, cost: StandingCost, limit: int) -> int:
    """Further chains of up to `limit` steps, as far as one row reaches; returns the tick at which the next finishes."""
    ledger, cohort = engine.ledger, engine.ledger.cohort
    n, last, stop = len(cohort.members), cohort.next_finish(), stop_ns(engine, stretch.begin_ns)
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


def _record(engine: Engine, decision: Decision | None, stretch: Stretch) -> None:
    """One row for the stretch: the cost inputs of its first step, and the total duration."""
    recorder, ledger, index = engine.recorder, engine.ledger, engine.num_steps
    steps = left = stretch.steps
    n, since = len(ledger.cohort.members), stretch.begin_ns
    if decision is not None and decision.refusals:
        log_decision(engine, decision)
        left, since = left - 1, stretch.second_ns
    if left:
        recorder.decode_all(index + steps - left, since, left)
    row = StepRow(
        index, steps, stretch.begin_ns, stretch.end_ns - stretch.begin_ns, 0, n, 0, n, stretch.context,
        len(ledger.running), len(ledger.waiting), stretch.free, stretch.unowned, 0, stretch.bound,
        engine.modelled_us * (steps - stretch.followers),
    )  # fmt: skip
    recorder.step(row, stretch.free_block_ns, stretch.free_min)
    for gap_ns, count in stretch.first_gaps:
        recorder.gap(gap_ns, count)
    recorder.gaps(stretch.gaps, n)
    engine.num_steps += steps
    engine.tell_progress(steps)
