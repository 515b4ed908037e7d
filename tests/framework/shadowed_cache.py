"""A ledger driven at random, with the slow model of its prefix cache beside it; they must agree after every operation.

Within a step admissions, grants and preemptions add up until the commit, as they do under a policy.
"""

from __future__ import annotations

import random

from slow_cache import SlowCache, SlowRequest

from schedlab.framework import invariants
from schedlab.framework.block_pool import BlockPool
from schedlab.framework.content import IdContent, SessionContent, UniqueContent
from schedlab.framework.ledger import Ledger
from schedlab.framework.request import EngineRequest


class ShadowedCache:
    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.size, self.width = dice.choice([1, 2, 3, 4]), dice.choice([1, 2, 3, 5, 8])
        blocks = -(-dice.randint(26, 60) // self.size)
        self.ledger = Ledger(BlockPool(blocks), self.size, dice.choice([0, 6, 20]), 5)
        self.model = SlowCache(blocks)
        self.pairs: list[tuple[EngineRequest, SlowRequest]] = []  # the living, each with its model
        self.granted: dict[EngineRequest, int] = {}  # tokens given in this step
        self.start: dict[EngineRequest, int] = {}  # start of those admitted in this step
        self.out: list[EngineRequest] = []  # victims of this step
        self.known_hits: dict[EngineRequest, int] = {}
        self.new: list[EngineRequest] = []
        self.moved: set[EngineRequest] = set()  # whose hit changed at some time since changes were last read

    def drive(self, steps: int) -> None:
        within = [self.admit, self.admit, self.admit, self.grow, self.grow, self.preempt, self.take_back, self.look_up]
        between = [self.arrive, self.arrive, self.finish, self.withdraw, self.read_changes, self.foresee, self.audit]
        for _ in range(steps):
            for operation in self.dice.choices(within, k=self.dice.randint(0, 4)):
                operation()
                self.compare()
            self.commit()
            self.compare()
            for operation in self.dice.choices(between, k=self.dice.randint(0, 3)):
                operation()
                self.compare()

    # -- who is where -------------------------------------------------------------------------------------------------

    def pick(self, pairs):
        return self.dice.choice(pairs) if pairs else (None, None)

    def untouched(self, running: bool):
        touched = [*self.granted, *self.out]
        return [p for p in self.pairs if (p[0].state == "running") == running and p[0] not in touched]

    def waiting(self):
        return [p for p in self.pairs if p[0] in self.ledger.waiting and p[0] not in self.start]

    def running(self):
        return [slow for request, slow in self.pairs if request.state == "running" or request in self.start]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # -- within a step ------------------------------------------------------------------------------------------------

    def admit(self):
        request, slow = self.pick(self.untouched(running=False))
        if request is None or not self.ledger.free_slots:
            return
        hit = self.model.hit(slow)
        start = max(hit * self.size, slow.computed)
        assert self.ledger.start_of(request) == start
        tokens = min(self.dice.randint(1, 12), slow.tokens - start)
        need = self.model.need(slow, hit, self.blocks_for(start + tokens))
        quote = self.ledger.quote(request)
        assert (quote.start, quote.hit, quote.blocks(tokens)) == (start, hit, need)
        if need <= self.model.num_free:
            self.ledger.admit(request, quote, tokens)
            self.model.adopt(slow, hit)
            self.model.allocate(slow, self.blocks_for(start + tokens) - hit)
            self.granted[request], self.start[request] = tokens, start

    def grow(self):
        request, slow = self.pick(self.untouched(running=True))
        if request is None:
            return
        tokens = min(self.dice.randint(1, 12), slow.tokens - slow.computed)
        need = max(self.blocks_for(slow.computed + tokens) - slow.owned - slow.private, 0)
        quote = self.ledger.quote(request)
        assert max(quote.blocks(tokens), 0) == need
        if need <= self.model.num_free:
            self.ledger.extend(request, quote, tokens)
            self.model.allocate(slow, need)
            self.granted[request] = tokens

    def preempt(self):
        request, slow = self.pick([p for p in self.pairs if p[0].state == "running"])
        if request is None:
            return
        self.granted.pop(request, None)
        mode = self.ledger.preempt(request, self.dice.choice(["recompute", "swap"]))
        self.model.preempt(slow)
        slow.computed = slow.computed if mode == "swap" else 0
        self.out.append(request)

    def take_back(self):
        request, slow = self.pick([p for p in self.pairs if p[0] in self.start])
        if request is None:
            return
        del self.start[request], self.granted[request]
        self.ledger.withdraw(request)
        self.model.release(slow)
        self.out.append(request)
        self.moved.add(request)

    def look_up(self):
        """Reading a hit is right at any time, and changes nothing."""
        request, slow = self.pick(self.waiting())
        if request is not None:
            assert self.ledger.cache.hit_blocks(request) == self.model.hit(slow)
            assert self.ledger.cache.pending_blocks(request) == self.model.pending(slow, self.running())

    def commit(self):
        self.ledger.commit()
        self.model.commit()
        for request in self.out:
            if request not in self.ledger.waiting:
                self.ledger.enter_waiting(request)
                self.new.append(request)
        for request in self.start:
            self.ledger.enter_running(request)
        models = dict(self.pairs)
        for request, tokens in self.granted.items():
            slow = models[request]
            slow.computed = request._base_computed = self.start.get(request, slow.computed) + tokens
            self.ledger.publish(request)
            if request.content.has_identity:
                self.model.publish(slow, min(slow.computed, slow.prompt) // self.size)
            if slow.computed == slow.tokens:
                slow.tokens = request._base_tokens = slow.tokens + 1
        self.granted, self.start, self.out = {}, {}, []

    # -- between steps ------------------------------------------------------------------------------------------------

    def arrive(self):
        if len(self.pairs) >= 9:
            return
        name, branch = f"r{self.ledger._arrivals}", self.dice.randint(1, 2)
        prompt = self.dice.choice([self.dice.randint(1, 24), 6, 12, 24, self.width * self.dice.randint(1, 4)])
        shared = self.dice.randint(0, 6)
        ids = tuple(i if i < shared else 100 * branch + i for i in range(-(-prompt // self.width)))
        kinds = [IdContent(ids, self.width)] * 5 + [UniqueContent(0), SessionContent(f"s{branch}")]
        content = self.dice.choice(kinds)
        request = EngineRequest(name, 0, min(prompt, 24), content)
        self.ledger.arrive(request)
        self.pairs.append((request, SlowRequest(name, content, min(prompt, 24), self.size)))
        self.new.append(request)

    def finish(self):
        """Whoever runs may end, with a session's output published."""
        request, slow = self.pick([p for p in self.pairs if p[0].state == "running"])
        if request is None:
            return
        if request.content.shares_output:
            self.model.publish(slow, slow.computed // self.size)
        self.model.release(slow)
        self._leave(request)

    def withdraw(self):
        request, _ = self.pick(self.waiting())
        if request is not None and self.dice.random() < 0.3:
            self._leave(request)

    def _leave(self, request):
        self.ledger.leave(request)
        self.pairs = [p for p in self.pairs if p[0] is not request]
        request._state = "finished"

    def read_changes(self):
        hits = {request: self.model.hit(slow) for request, slow in self.waiting()}
        must = [r for r in hits if r in self.new or hits[r] != self.known_hits.get(r)]
        got = self.ledger.cache.take_changed()
        assert got == sorted(got, key=lambda r: r.order)
        assert [r for r in got if r in must] == sorted(must, key=lambda r: r.order), "a change was missed"
        assert all(r in must or r in self.moved for r in got), "reported as changed, and was not"
        self.known_hits, self.new, self.moved = hits, [], set()

    def foresee(self):
        """Whether growing by so many blocks would shorten a hit that somebody counts on."""
        count = self.dice.randint(0, self.model.num_free)
        expected = self.model.disturbs(count, [slow for _, slow in self.waiting()])
        assert self.ledger.cache.would_evict_expected_hit(count) == expected

    def audit(self):
        invariants.audit(self.ledger)

    # -- always -------------------------------------------------------------------------------------------------------

    def compare(self):
        cache, entries = self.ledger.cache, self.model.entries
        assert cache.num_free == self.model.num_free
        assert sum(len(run.blocks) for run in cache.index.values()) == len(entries)
        for request, slow in self.pairs:
            cached = [slow.block(i) in entries for i in range(request.chain.num_blocks)]
            assert cached == sorted(cached, reverse=True), "a cached block lacks its prefix"
            assert cache.longest_hit(request.chain, request.chain.num_blocks) == sum(cached)
            if self.known_hits.get(request) != self.model.hit(slow):
                self.moved.add(request)
