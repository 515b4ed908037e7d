"""Who is where and owns what: waiting and running requests, slots, and their device and host blocks.

The only place that changes ownership; step.py calls it for a policy, engine.py for commits, finishes and aborts. Knows
nothing of policies, time or executors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from schedlab.framework.block_pool import NOBODY, AdjacentPool, BlockPool, HostPool
from schedlab.framework.books import Books, PreemptMode, Quote
from schedlab.framework.content import NO_IDENTITY, Chain, digest, extend_key
from schedlab.framework.eviction import Eviction
from schedlab.framework.ordered_requests import OrderedRequests, QueueView
from schedlab.framework.prefix_cache import PrefixCache
from schedlab.framework.request import NOT_DECODING, EngineRequest, Request


class Ledger(Books):
    """The engine's own books. `waiting` is in arrival order, `running` and `prefilling` in admission order.

    `held` own blocks and neither wait nor run: their keys and values are on their way to another engine, or from one.
    An admission beside running requests leaves `watermark_blocks` free.
    """

    def __init__(
        self,
        pool: BlockPool | AdjacentPool,
        block_size: int,
        num_host_blocks: int,
        max_num_seqs: int,
        *,
        prefix_caching: bool = True,
        eviction: Eviction = "lru",
        watermark_blocks: int = 0,
    ) -> None:
        super().__init__(block_size, watermark_blocks)
        self.prefix_caching = prefix_caching
        self.pool = pool
        self.cache = PrefixCache(pool, block_size, eviction)
        self.host = HostPool(num_host_blocks)
        self.queue = OrderedRequests()
        self.waiting = self.queue.requests
        self.waiting_view = QueueView(self.waiting)
        self.running: dict[EngineRequest, None] = {}
        self.prompts = OrderedRequests()
        self.prefilling = self.prompts.requests
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.copies_out: list[tuple[int, int]] = []
        self.copies_in: list[tuple[int, int]] = []
        self.held: dict[EngineRequest, None] = {}
        self._admissions = 0
        self._arrivals = 0

    # -- lengths in blocks --

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    # -- what a step asks --

    def views(self) -> tuple[Sequence[Request], Sequence[Request], Sequence[Request]]:
        return (
            self.waiting_view if self.waiting else (),
            self.prompts.snapshot() if self.prefilling else (),
            self.decode_set.ordered.snapshot(),
        )

    def running_view(self) -> tuple[Request, ...]:
        return tuple(self.running)

    def decodes(self, request: EngineRequest) -> bool:
        return request._clock is self.decode_set

    @property
    def num_free_slots(self) -> int:
        return len(self.free_slots)

    @property
    def num_free_blocks(self) -> int:
        return self.cache.num_free

    @property
    def reserved_blocks(self) -> int:
        """The watermark, as long as anybody runs."""
        return self.watermark_blocks if self.running else 0

    def quote(self, request: EngineRequest) -> Quote:
        computed = request._base_computed + request._clock.tick
        if request.watched is None:  # it runs, or has no identity by which anything of it could be found
            return Quote(computed, 0, len(request.block_table), self.block_size)
        hit = self.cache.hit_blocks(request)
        held = hit - self.cache.unowned_in_hit(request, hit) if hit else 0
        return Quote(max(hit * self.block_size, computed), hit, held, self.block_size)

    def start_of(self, request: EngineRequest) -> int:
        computed = request._base_computed + request._clock.tick
        return computed if request.watched is None else max(self.cache.hit_blocks(request) * self.block_size, computed)

    def pending_blocks(self, request: EngineRequest) -> int:
        return self.cache.pending_blocks(request)

    def take_changed(self) -> list[EngineRequest]:
        return self.cache.take_changed()

    def next_tick_fits(self) -> bool:
        """Whether all of decoding can go on: blocks suffice, and none is evicted that a waiting request counts on."""
        need = len(self.decode_set.needing_block())
        return not need or (need <= self.cache.num_free and not self.cache.would_evict_expected_hit(need))

    # -- arrivals --

    def arrive(self, request: EngineRequest) -> None:
        """`request` waits for the first time."""
        request.order = self._arrivals
        self._arrivals += 1
        if request in self.held:
            del self.held[request]
            request._state = "waiting"
        elif self.prefix_caching:
            request.chain = request.content.chain(request._num_prompt_tokens, self.block_size)
            request.promised_groups = len(request.chain.keys)
        self.queue.add(request.order, request)
        self.cache.watch(request)

    # -- within a step: verbs of a policy --

    def admit(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        start, hit = quote.start, quote.hit
        self.cache.unwatch(request)
        table = request.block_table = self.cache.adopt(request, hit) if hit else request.block_table
        table += self.cache.allocate(self.blocks_for(start + tokens) - len(table), table[-1] if table else NOBODY)
        if request.promised_groups:
            self.cache.start_computing(request)
        if request.host_blocks and start == request._base_computed:  # what the cache lost comes from the host
            swapped = self.blocks_for(start)
            self.copies_in += zip(request.host_blocks[hit:swapped], request.block_table[hit:swapped], strict=True)
        request.slot = self.free_slots.pop()

    def withdraw(self, request: EngineRequest) -> PreemptMode:
        if request.host_blocks:
            back = set(request.host_blocks)
            self.copies_in = [(host, block) for host, block in self.copies_in if host not in back]
        kept = request._state == "waiting" and request._base_computed > 0
        if kept:
            self._give_slot_back(request)
        else:
            self._vacate(request)
        self.cache.watch(request)
        return "swap" if request.host_blocks or kept else "recompute"

    def grow(self, requests: Collection[EngineRequest]) -> None:
        self.cache.make_free(len(requests))
        self.pool.grow([request.block_table for request in requests])

    def extend(self, request: EngineRequest, quote: Quote, tokens: int) -> None:
        need = quote.blocks(tokens)
        if need > 0:
            request.block_table += self.cache.allocate(need, request.block_table[-1])

    def preempt(self, request: EngineRequest, mode: PreemptMode) -> PreemptMode:
        """The victim moves to `waiting` at commit."""
        if request._clock is self.decode_set:
            self.decode_set.leave(request)
        else:
            self.prompts.remove(request.admission)
        del self.running[request]
        done = self._save(request, mode)
        self._stash_preempted(request)
        self._vacate(request)
        if done == "recompute":
            request.lost_tokens = request._base_computed
            request._base_computed = 0
        request._num_preemptions += 1
        request._state = "swapped" if done == "swap" else "preempted"
        return done

    def _save(self, request: EngineRequest, mode: PreemptMode) -> PreemptMode:
        if mode == "recompute" or not request._base_computed:
            return "recompute"
        saved = request.block_table[: self.blocks_for(request._base_computed)]
        host = self.host.take(len(saved))
        if host is None:
            return "recompute"
        request.host_blocks = host
        request.swaps += 1
        self.copies_out += zip(saved, host, strict=True)
        return "swap"

    def _stash_preempted(self, request: EngineRequest) -> None:
        """Hand computed blocks that are not published yet to the cache, and the rest to the free list."""
        table, published = request.block_table, request.num_published
        whole = max(self._identify_computed(request), published)
        self.pool.give_back(table[whole:])
        self.cache.stash_preempted_blocks(request, published, table[published:whole])
        del table[published:]

    def _identify_computed(self, request: EngineRequest) -> int:
        """Extend the request's chain over all that it has computed; returns how many blocks have identity.

        Generated blocks belong to (arrival, position), whatever requests are called, or to the session whose next
        prompt will contain them.
        """
        if not self.prefix_caching:
            return 0
        whole, chain = request._base_computed // self.block_size, request.chain
        if whole > chain.num_blocks and request.content.shares_output:
            request.chain = request.content.chain(whole * self.block_size, self.block_size)
        elif whole > chain.num_blocks:
            own = digest(b"request", b"%d" % request.order, b"".join(chain.keys[-1:]))
            added = range(chain.num_blocks, whole)
            keys, ends = [extend_key(own, b"%d" % i) for i in added], [i + 1 for i in added]
            request.chain = Chain(chain.keys + keys, chain.ends + ends)
        return whole

    def _vacate(self, request: EngineRequest) -> None:
        """Return slot and blocks: published ones stay cached, the others are free."""
        if request.promised_groups:
            self.cache.stop_computing(request)
        self.pool.give_back(request.block_table[request.num_published :])
        if request.num_published:
            self.cache.release(request)
        request.block_table = []
        self._give_slot_back(request)

    def _give_slot_back(self, request: EngineRequest) -> None:
        self.free_slots.append(request.slot)
        request.slot = -1

    # -- at commit --

    def enter_running(self, request: EngineRequest) -> None:
        """An admitted request leaves `waiting`."""
        self.queue.remove(request.order)
        request.admission = self._admissions
        self._admissions += 1
        request._state = "running"
        self.running[request] = None
        self.prompts.add(request.admission, request)
        if request.host_blocks:
            self.host.give_back(request.host_blocks)
            request.host_blocks = []

    def enter_waiting(self, request: EngineRequest) -> None:
        """A preempted request takes its place among the waiting again."""
        self.queue.add(request.order, request)
        self.cache.watch(request)

    def enter_decoding(self, request: EngineRequest) -> None:
        """A prefilling request needs exactly one token now and has emitted one."""
        self.prompts.remove(request.admission)
        self.decode_set.join(request)

    def publish(self, request: EngineRequest) -> None:
        """Make what the request has computed of its prompt visible to others."""
        if request.promised_groups:
            computed = min(request._base_computed, request._num_prompt_tokens)
            self.cache.publish(request, computed // self.block_size)

    def leave(self, request: EngineRequest, *, keep: bool = True, hold: bool = False) -> None:
        """`request` reached a terminal state, wherever it was. `keep=False`: what it computed must not be reused;
        `hold=True`: it ran, and keeps its blocks until `release`."""
        if request in self.running:
            self._leave_running(request, keep, hold)
        else:
            self.queue.remove(request.order)
            self.cache.unwatch(request)
            self.host.give_back(request.host_blocks)
            request.host_blocks = []
            self._drop_received(request)
        if not hold:
            request.chain = NO_IDENTITY

    def _leave_running(self, request: EngineRequest, keep: bool, hold: bool) -> None:
        if request._clock is not NOT_DECODING:
            self.decode_set.leave(request)
        else:
            self.prompts.remove(request.admission)
        del self.running[request]
        if keep and request.content.shares_output:
            self.cache.publish(request, self._identify_computed(request))
        if hold:
            self._hold(request)
        else:
            self._vacate(request)

    # -- keys and values that move between engines --

    def _hold(self, request: EngineRequest) -> None:
        if request.promised_groups:
            self.cache.stop_computing(request)
            request.promised_groups = 0
        self._give_slot_back(request)
        self.held[request] = None

    def release(self, request: EngineRequest) -> None:
        """What `request` held has been read: published blocks stay cached, the others are free."""
        del self.held[request]
        self.pool.give_back(request.block_table[request.num_published :])
        if request.num_published:
            self.cache.release(request)
        request.block_table = []
        request.chain = NO_IDENTITY

    def reserve(self, request: EngineRequest) -> bool:
        """Take blocks for all tokens of `request`, whose keys and values come from elsewhere; it holds them from now on
        until it runs. False if there are too few, or if a request waits that has none of its own."""
        need = self.blocks_for(request.num_tokens)
        if need + self.reserved_blocks > self.cache.num_free:
            return False
        for other in self.waiting:
            if not other.block_table:
                return False
        request.block_table = self.cache.allocate(need)
        request._state = "loading"
        self.held[request] = None
        return True

    def take_back_received(self) -> bool:
        """The last waiting request that holds blocks loses them, and computes again; False if none does."""
        for request in reversed(self.waiting):
            if request.block_table:
                self._drop_received(request)
                request.lost_tokens, request._base_computed = request._base_computed, 0
                request._num_preemptions += 1
                request._state = "preempted"
                return True
        return False

    def _drop_received(self, request: EngineRequest) -> None:
        self.pool.give_back(request.block_table)
        request.block_table = []

    def commit(self) -> None:
        """The step has run: what victims left behind becomes visible."""
        if self.cache.remains:
            self.cache.commit()
        if self.copies_out or self.copies_in:
            self.copies_out, self.copies_in = [], []
