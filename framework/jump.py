"""Jumps over standing decode decisions on the virtual clock, bit for bit what stepping would have done.

While a held decision stands, a step is one tick of the decode set: its cost is a constant plus a function of the sum of
contexts, blocks are needed by one bucket, and nothing else changes. So a jump only has to find where the standing ends,
and the whole stretch is one row of the log.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from schedlab.framework.chain import Chains
from schedlab.framework.clock import Clock, VirtualClock
from schedlab.framework.commit import Commit
from schedlab.framework.executor import Executor, check_duration
from schedlab.framework.journal import Journal, Stretch
from schedlab.framework.ledger import Ledger
from schedlab.framework.step import Decision

FAR = 1 << 62
"""What neither a run's nanoseconds nor a step's in fixed point reach: where the core is compiled, both are 64 bits."""


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


def can_jump(clock: Clock, executor: Executor) -> bool:
    """False where time is measured, and where a step of a fixed decode set costs more than a function of the sum of
    contexts: there every step must be executed.
    """
    return isinstance(clock, VirtualClock) and getattr(executor, "jumpable", False)


class Jump:
    """Executes standing steps, chain by chain; without chains every step is one of its own."""

    def __init__(
        self,
        ledger: Ledger,
        chains: Chains,
        commit: Commit,
        journal: Journal,
        decode_cost: Callable[[int], StandingCost],
    ) -> None:
        self._ledger = ledger
        self._chains = chains
        self._commit = commit
        self._journal = journal
        self._decode_cost = decode_cost

    def run(self, now: int, stop_ns: float, decision: Decision | None) -> int:
        """Executes standing steps, at least one, from `now` on; returns when the last of them ended.

        Stops at the first boundary at or after `stop_ns`, with the step in which a member reaches its final length,
        and before one whose blocks could be had only from what a waiting request counts on. The decision is the one
        just taken, whose blocks are given already, or None when it stands from before.
        """
        ledger, decode_set = self._ledger, self._ledger.decode_set
        if decision is None:
            ledger.grow(decode_set.needing_block())
        n = len(decode_set.members)
        steps = self._chains.take()
        cost, context = self._decode_cost(n), decode_set.context + n
        duration = cost.duration_ns(context) if steps == 1 else cost.chain_ns(context, n, steps)
        stretch = Stretch(
            now, n, context, duration, cost.bound(context), ledger.cache.num_free, ledger.cache.num_unowned
        )
        if decode_set.last_emitted_overrides:
            stretch.first_gaps = self._commit.gaps(stretch.end_ns)
            decode_set.last_emitted_overrides.clear()
        else:
            stretch.gaps.append(stretch.end_ns - decode_set.emitted_ns)
        stretch.follow(steps)
        decode_set.tick += steps
        if self._chains.limit() == 1:
            self._extend_by_steps(stretch, cost, stop_ns)
        else:
            self._extend_by_chains(stretch, cost, stop_ns)
        decode_set.emitted_ns = stretch.end_ns
        self._journal.stretch(decision, stretch)
        return stretch.end_ns

    def _extend_by_chains(self, stretch: Stretch, cost: StandingCost, stop_ns: float) -> None:
        """Further chains, as far as one row reaches."""
        ledger, decode_set, n = self._ledger, self._ledger.decode_set, stretch.decodes
        context, last = stretch.context + n * stretch.steps, decode_set.next_finish()
        while decode_set.tick != last and stretch.end_ns < stop_ns and cost.bound(context) == stretch.bound:
            if not ledger.next_tick_fits():
                break
            ledger.grow(decode_set.needing_block())
            steps = self._chains.take()
            stretch.extend(cost.chain_ns(context, n, steps), ledger.cache.num_free)
            stretch.follow(steps)
            context += n * steps
            decode_set.tick += steps

    def _extend_by_steps(self, stretch: Stretch, cost: StandingCost, stop_ns: float) -> None:
        """The same where no step is chained to the next: the hot loop of a replay, in locals."""
        ledger, decode_set = self._ledger, self._ledger.decode_set
        cache, buckets, size, n = ledger.cache, decode_set.buckets, decode_set.block_size, stretch.decodes
        pool, gaps, now, tick = cache.pool.free, stretch.gaps, stretch.end_ns, decode_set.tick
        assert isinstance(pool, list), "a jump takes blocks from the end of a list"
        context = stretch.context + n * stretch.steps
        first, last = tick, self._last_tick(cost, context, n, stretch.bound)
        check_duration(cost.duration_ns(context + n * (last - tick)))
        growth, shift, scaled = cost.slope * n, cost.shift, cost.base + cost.slope * context
        stop = FAR if stop_ns == math.inf else math.ceil(stop_ns)
        free, spare, since, free_block_ns = cache.num_free, len(pool), now, 0
        while tick < last and now < stop:
            needing = buckets[tick % size]
            if needing:
                need = len(needing)
                if need <= spare:  # the common case, in place: no call for a block
                    for request in needing:
                        request.block_table.append(pool.pop())
                    spare -= need
                elif need > free or cache.would_evict_expected_hit(need):
                    break
                else:
                    ledger.grow(needing)
                    spare = len(pool)
                elapsed, since = now - since, now
                free_block_ns += elapsed * free
                free -= need
            duration = scaled >> shift
            gaps.append(duration)
            now += duration
            scaled += growth
            tick += 1
        decode_set.tick = tick
        stretch.steps += tick - first
        stretch.end_ns, stretch.free_min = now, free
        elapsed = now - since
        stretch.free_block_ns += free_block_ns + elapsed * free

    def _last_tick(self, cost: StandingCost, context: int, growth: int, bound: str | None) -> int:
        """The tick at which a member finishes, or an earlier one from which on another resource than `bound` limits."""
        tick, finish = self._ledger.decode_set.tick, self._ledger.decode_set.next_finish()
        assert finish is not None
        if cost.bound(context + growth * (finish - tick)) == bound:
            return finish
        return tick + _alike(cost, context, growth, finish - tick, bound)


def _alike(cost: StandingCost, context: int, growth: int, steps: int, bound: str | None) -> int:
    """How many of `steps` steps `bound` limits, before another resource does."""
    return bisect_left(range(steps), 1, key=lambda k: cost.bound(context + growth * k) != bound)
