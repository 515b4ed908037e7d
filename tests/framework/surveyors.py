"""Policies that decide at random and check, while they do, that each step says what it must."""

from __future__ import annotations

import random
from functools import lru_cache

from scripted import books

from schedlab.framework.policy import Admitted, Arrived, Policy, Preempted, Progressed
from schedlab.framework.step import Grant


class Watching(Policy):
    """Decides at random through another policy; checks at the start of each step what the views must be."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._arrived, self._admitted, self._emitted = [], [], set()
        self.steps = 0

    def observe(self, event):
        if isinstance(event, Arrived):
            self._arrived.append(event.request)
        elif isinstance(event, Admitted):
            self._admitted.append(event.request)
        elif isinstance(event, Preempted):
            self._admitted.remove(event.request)
        elif isinstance(event, Progressed):
            self._emitted.update(r.request_id for r in event.decodes)

    def schedule(self, step):
        self.steps += 1
        alive = [r for r in self._arrived if r.state in ("waiting", "preempted", "swapped", "running")]
        running = [r for r in self._admitted if r.state == "running"]
        assert list(step.waiting) == [r for r in alive if r.state != "running"], "waiting: arrival order"
        assert list(step.running) == running, "running: admission order"
        decoding = [r for r in running if r.num_tokens - r.num_computed_tokens == 1 and r.num_output_tokens >= 1]
        assert list(step.decoding) == decoding
        assert list(step.prefilling) == [r for r in running if r not in decoding]
        assert all((r.first_token_s is not None) == (r.num_output_tokens > 0) for r in alive)
        assert all(r.num_tokens == r.num_prompt_tokens + r.num_output_tokens for r in alive)
        assert all(r.num_uncomputed_tokens == r.num_tokens - r.num_computed_tokens for r in alive)
        self._decide(step)

    def _decide(self, step):
        before, dice = step.token_budget, self._random
        for request in dice.sample(list(step.running), len(step.running)):
            if dice.random() < 0.15 and len(step.running) > 1:
                step.preempt(request, dice.choice(["recompute", "swap"]))
        for request in dice.sample([*step.running, *step.waiting], len(step.running) + len(step.waiting)):
            if dice.random() < 0.7 and (fits := step.fits(request)):
                assert step.grant(request, dice.choice([fits, dice.randint(1, fits)]))
        if step.token_budget == before:
            step.idle_until(step.now + 0.001)


class Surveyor(Policy):
    """At random moments compares every number that a step offers with what a grant then does to the books."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self.engine = None
        self._started = {}

    def observe(self, event):
        if isinstance(event, Admitted):
            assert event.cached_tokens == self._started.pop(event.request.request_id)

    def schedule(self, step):
        dice, before = self._random, step.token_budget
        self._touched = set()
        self._computing = {r: r for r in step.running}
        if dice.random() < 0.3:
            for request in step.grant_decodes():
                assert step.fits(request) == 0, "refused although it fits"
            self._touched.update(step.decoding)
        for _ in range(dice.randint(1, 6)):
            self._preempt(step) if dice.random() < 0.2 else self._survey(step)
        if step.token_budget == before:
            step.idle_until(step.now + 0.001)

    def _survey(self, step):
        requests = [r for r in [*step.waiting, *step.running] if r not in self._touched]
        if not requests:
            return
        request = self._random.choice(requests)
        waits = request.state != "running"
        fits, start = step.fits(request), step.cached_tokens(request)
        left = request.num_tokens - start
        assert 0 <= start <= request.num_tokens - 1
        assert request.state not in ("running", "swapped") or start >= request.num_computed_tokens
        assert 0 <= fits <= min(left, step.token_budget)
        if waits:
            assert step.pending_tokens(request) == self._pending(step, request, start)
        self._one_more(step, request, fits)
        tokens = self._random.randint(1, fits) if fits and self._random.random() < 0.5 else fits
        if tokens and request not in self._touched:
            self._grant(step, request, tokens, waits, start)

    def _one_more(self, step, request, fits):
        """One token more than fits is clamped by the budget or by what is left, or refused for want of blocks."""
        if self._random.random() < 0.5:
            return
        before, budget = books(self.engine), step.token_budget
        limited = fits in (request.num_tokens - step.cached_tokens(request), step.token_budget)
        if fits and limited:
            return  # the clamped grant is what `_grant` makes
        result = step.grant(request, fits + 1)
        assert not result and result.tokens == 0
        reasons = {"slots": step.free_slots == 0, "budget": step.token_budget == 0, "memory": True}
        assert reasons[result.refusal], f"refused for {result.refusal}"
        assert step.token_budget == budget and books(self.engine) == before, "a refusal left a trace"

    def _grant(self, step, request, tokens, waits, start):
        limited = tokens in (request.num_tokens - start, step.token_budget)
        need = step.blocks_needed(request, tokens)
        budget, slots, blocks = step.token_budget, step.free_slots, step.free_blocks
        asked = tokens + 1 if limited else tokens
        assert step.grant(request, asked) == Grant(tokens)
        assert step.token_budget == budget - tokens
        assert step.free_slots == slots - waits
        assert step.free_blocks == blocks - need
        assert step.cached_tokens(request) == start, "the start of a grant moved"
        self._touched.add(request)
        self._computing[request] = request
        if waits:
            self._started[request.request_id] = start

    def _preempt(self, step):
        victims = [r for r in step.running if r.state == "running"]
        if not victims:
            return
        victim = self._random.choice(victims)
        slots, blocks = step.free_slots, step.free_blocks
        mode = step.preempt(victim, self._random.choice(["recompute", "swap"]))
        assert step.free_slots == slots + 1 and step.free_blocks >= blocks
        assert victim.state == ("swapped" if mode == "swap" else "preempted")
        assert victim.num_computed_tokens == 0 or mode == "swap"
        self._touched.add(victim)
        self._computing.pop(victim, None)

    def _pending(self, step, request, start):
        """Whole blocks that follow the hit and are blocks of the prompt of somebody who runs."""
        size, caching = self.engine.config.block_size, self.engine.config.enable_prefix_caching
        if not caching:
            return 0
        hit = self.engine.ledger.cache.hit_blocks(request)
        mine = prompt_blocks(request, size)
        others = [prompt_blocks(other, size) for other in self._computing]
        reach, limit = hit, min(len(mine), (request.num_tokens - 1) // size)
        while reach < limit and any(mine[reach : reach + 1] == other[reach : reach + 1] for other in others):
            reach += 1
        return (reach - hit) * size


@lru_cache(maxsize=4096)
def prompt_blocks(request, size):
    """A name for each whole block of the prompt, equal for equal content after equal content."""
    content = request.content
    if not content.has_identity:
        return []
    count = request.num_prompt_tokens
    names = []
    for block in range(count // size):
        last = ((block + 1) * size - 1) // content.width  # the id that holds the block's last token
        width = min(content.width, count - last * content.width)
        names.append((tuple(content.ids[: last + 1]), width, block))
    return names


class ChangeReader(Watching):
    """Reads `cache_changed` first in each step and compares it with a full comparison of all hits."""

    def __init__(self, seed):
        super().__init__(seed)
        self._hits, self._asked, self._fresh = {}, set(), set()

    def observe(self, event):
        super().observe(event)
        if isinstance(event, (Arrived, Preempted)):
            self._fresh.add(event.request)

    def schedule(self, step):
        if self._random.random() < 0.3:
            return self._decide(step)  # changes add up until they are read
        changed = list(step.cache_changed)
        now = {request: step.cached_tokens(request) for request in step.waiting}
        must = [r for r in step.waiting if r in self._fresh or self._hits.get(r) != now[r]]
        assert [r for r in changed if r in must] == must, "missed a change, or out of arrival order"
        assert all(r in must or r in self._asked for r in changed), "reported a hit that never changed"
        assert list(step.cache_changed) == changed, "a second reading in one step differs"
        self._hits, self._asked, self._fresh = now, set(), set()
        self._decide(step)

    def _decide(self, step):
        self._asked.update(step.waiting)  # a hit may change twice between two readings
        super()._decide(step)


class StillReader(ChangeReader):
    """The same, but grants without asking first, so that what is reported must be exactly what differs."""

    def _decide(self, step):
        before, dice = step.token_budget, self._random
        step.grant_decodes()
        for request in list(step.prefilling) + dice.sample(list(step.waiting), min(2, len(step.waiting))):
            if not step.grant(request, dice.randint(1, 8)):
                self._asked.add(request)
        if step.token_budget == before:
            for request in reversed(step.running[1:]):
                step.preempt(request)
            step.idle_until(step.now + 0.001)
