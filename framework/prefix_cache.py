"""Which KV blocks hold which content: lookup, adoption, publication at commit, eviction, and what changed for whom.

A `CachedSpan` is the live prefix of one identity group (see content.Chain): one block of tokens, or all whole blocks of
a trace id. The index is closed under prefixes: a span is present only if all before it in the chain are complete, so
the longest hit is found by bisection. Blocks are published when the step that computed them commits, never when it is
scheduled: another request of the same step could read them before they are written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from operator import sub

from schedlab.framework.block_pool import NOBODY, AdjacentPool, BlockPool
from schedlab.framework.content import Chain
from schedlab.framework.eviction import EVICTIONS, CachedSpan, Eviction
from schedlab.framework.request import EngineRequest


class PrefixCache:
    """Content-addressed blocks over a `BlockPool`. `num_unowned` blocks are cached and owned by nobody.

    Eviction is least recently used unless another order is given, and a chain's last block first in any. Recency is of
    spans, not of blocks: what one request held together goes together, and a span becomes evictable, as the youngest,
    when its last owner leaves.
    """

    def __init__(self, pool: BlockPool | AdjacentPool, block_size: int, eviction: Eviction = "lru") -> None:
        self.pool = pool
        self.block_size = block_size
        self.num_unowned = 0
        self.index: dict[bytes, CachedSpan] = {}
        self.lru = EVICTIONS[eviction]()
        self._used: Callable[[Sequence[CachedSpan]], None] | None = getattr(self.lru, "used", None)
        self.remains: list[tuple[EngineRequest, int, CachedSpan]] = []
        self.computing: dict[bytes, int] = {}
        self._watchers: dict[bytes, dict[EngineRequest, None]] = {}
        self._stale: dict[EngineRequest, None] = {}
        self._changed: dict[EngineRequest, None] = {}
        self.changed_keys: dict[bytes, None] | None = None  # of the index, since somebody looked; None: nobody does

    # -- blocks --

    @property
    def num_free(self) -> int:
        """Blocks that can be had now: free ones and cached-unowned ones."""
        return len(self.pool.free) + self.num_unowned

    def allocate(self, count: int, last: int = NOBODY) -> list[int]:
        """`count` blocks without content for a request whose last block is `last`, evicting what is unowned if too few
        are free.
        """
        self.make_free(count)
        return self.pool.take(count, last)

    def make_free(self, count: int) -> None:
        """Evict what is unowned until `count` blocks are free."""
        short = count - len(self.pool.free)
        if short > 0:
            self._evict(short)

    def _evict(self, count: int) -> None:
        for span, blocks in self._victims(count):
            del span.blocks[len(span.blocks) - len(blocks) :]
            span.num_unowned -= len(blocks)
            self.num_unowned -= len(blocks)
            self.pool.give_back(blocks)
            if not span.num_unowned:
                del self.lru[span]
            if span.key is not None:
                if not span.blocks:
                    del self.index[span.key]
                self._notify(span.key)

    def _victims(self, count: int) -> list[tuple[CachedSpan, list[int]]]:
        """The spans, with their last blocks, that evicting `count` blocks would take."""
        victims = []
        for span in self.lru:
            if count <= 0:
                break
            blocks = span.blocks[-min(count, span.num_unowned) :]
            count -= len(blocks)
            victims.append((span, blocks))
        assert count <= 0, "evicting more blocks than are unowned"
        return victims

    def would_evict_expected_hit(self, count: int) -> bool:
        """Whether allocating `count` blocks would evict one that is counted in a waiting request's hit."""
        short = count - len(self.pool.free)
        if short <= 0 or not self._watchers:
            return False
        self._refresh_stale()
        for span, blocks in self._victims(short):
            left = len(span.blocks) - len(blocks)
            key, watchers = span.key, self._watchers.get(span.key or b"", ())
            if key is not None and any(self._counted(key, request) > left for request in watchers):
                return True
        return False

    # -- lookup --

    def hit_blocks(self, request: EngineRequest) -> int:
        """Whole cached blocks that a grant to this waiting request would adopt now; the last token is never covered."""
        if request in self._stale:
            self._refresh(request)
        if request.watched is None:
            return 0
        return request.watched[0]

    def longest_hit(self, chain: Chain, limit: int) -> int:
        """How many leading blocks of `chain` are cached, at most `limit`."""
        keys, index = chain.keys, self.index
        low, high = 0, bisect_left(chain.ends, limit)  # groups before `high` end within the limit
        high = min(high + 1, len(keys))
        while low < high:  # the index is closed under prefixes: find the first absent key
            middle = (low + high) // 2
            if keys[middle] in index:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        start = chain.ends[low - 2] if low > 1 else 0
        return min(start + len(index[keys[low - 1]].blocks), limit)

    def pending_blocks(self, request: EngineRequest) -> int:
        """Whole blocks beyond the hit that running requests are computing and will publish."""
        if request.watched is None:
            return 0
        hit = self.hit_blocks(request)
        chain, reach = request.chain, hit
        for group in range(_group_of(chain, hit), len(chain.keys)):
            if chain.keys[group] not in self.computing:
                break
            reach = chain.ends[group]
        return max(min(reach, self._limit(request)) - hit, 0)

    def _limit(self, request: EngineRequest) -> int:
        return min((request.num_tokens - 1) // self.block_size, request.chain.num_blocks)

    # -- ownership --

    def unowned_in_hit(self, request: EngineRequest, hit: int) -> int:
        """How many of the first `hit` cached blocks nobody owns yet: adopting them makes `num_free` fall by as much."""
        unowned = 0
        for span, count in self._spans(request.chain, 0, hit):
            owned = len(span.blocks) - span.num_unowned
            if count > owned:
                unowned += count - owned
        return unowned

    def adopt(self, request: EngineRequest, hit: int) -> list[int]:
        """Take ownership of the first `hit` blocks of the request's chain; returns them in order."""
        table: list[int] = []
        for span, count in self._spans(request.chain, 0, hit):
            self._hold(span, 0, count)
            table.extend(span.blocks[:count])
        request.num_published = hit
        return table

    def release(self, request: EngineRequest) -> None:
        """Give up the request's published blocks; they stay cached, its last span being the first to be evicted."""
        spans = self._spans(request.chain, 0, request.num_published)
        if self._used is not None:
            self._used([span for span, _ in spans])
        for span, count in reversed(spans):
            del span.owner_lengths[bisect_left(span.owner_lengths, count)]
            self._note_unowned(span, touch=True)
        request.num_published = 0

    def publish(self, request: EngineRequest, whole: int) -> None:
        """The owner has computed its first `whole` blocks: make those with identity visible to others.

        A block that already exists is dropped for the published one, so that every chain has one set of blocks.
        """
        chain, table = request.chain, request.block_table
        whole = min(whole, chain.num_blocks)
        done = request.num_published
        group = _group_of(chain, done) if done < whole else 0
        start = chain.ends[group - 1] if group else 0
        while done < whole:
            key, stop = chain.keys[group], chain.ends[group]
            span = self._span_for(key)
            have, want = done - start, min(stop, whole) - start
            if len(span.blocks) > have:
                self._drop_duplicates(span, table, start, have, min(len(span.blocks), want))
            if len(span.blocks) < want:
                self._grow(span, table[start + len(span.blocks) : start + want])
            self._hold(span, have, want)
            done = start + want
            if done == stop and group < request.promised_groups:
                self._computed(key)
            start, group = stop, group + 1
        request.num_published = done

    def _drop_duplicates(self, span: CachedSpan, table: list[int], start: int, have: int, live: int) -> None:
        """The blocks `have .. live` of the group, which begins at `start` in the table, are in the cache already."""
        own = table[start + have : start + live]
        table[start + have : start + live] = span.blocks[have:live]
        self.pool.give_back(own)

    def _grow(self, span: CachedSpan, blocks: list[int]) -> None:
        """`span` has so many more blocks, unowned until their publisher holds them."""
        span.blocks.extend(blocks)
        span.num_unowned += len(blocks)
        self.num_unowned += len(blocks)
        assert span.key is not None
        self._notify(span.key)

    def _hold(self, span: CachedSpan, have: int, want: int) -> None:
        """An owner of `have` blocks of the span now owns `want`."""
        if have:
            del span.owner_lengths[bisect_left(span.owner_lengths, have)]
        insort(span.owner_lengths, want)
        self._note_unowned(span, touch=False)

    def _note_unowned(self, span: CachedSpan, *, touch: bool) -> None:
        """The owners of `span` changed."""
        unowned = len(span.blocks) - (span.owner_lengths[-1] if span.owner_lengths else 0)
        self.num_unowned += unowned - span.num_unowned
        span.num_unowned = unowned
        if not unowned:
            self.lru.pop(span, None)
        elif touch or span not in self.lru:
            self.lru[span] = None
            self.lru.move_to_end(span)

    def _span_for(self, key: bytes) -> CachedSpan:
        span = self.index.get(key)
        if span is None:
            span = self.index[key] = CachedSpan(key, [])
        return span

    def _spans(self, chain: Chain, start: int, stop: int) -> list[tuple[CachedSpan, int]]:
        """The spans of the chain's blocks `start .. stop`, each with how many of its blocks lie before `stop`."""
        if start >= stop:
            return []
        first, last = _group_of(chain, start), _group_of(chain, stop - 1)
        starts = [chain.ends[first - 1] if first else 0, *chain.ends[first:last]]
        counts = [*map(sub, chain.ends[first:last], starts), stop - starts[-1]]
        return list(zip(map(self.index.__getitem__, chain.keys[first : last + 1]), counts, strict=True))

    # -- preemption: what is left behind --

    def stash_preempted_blocks(self, request: EngineRequest, first: int, blocks: list[int]) -> None:
        """Computed blocks of a victim from index `first` on: free to take now, publishable when the step commits."""
        if blocks:
            span = CachedSpan(None, blocks)
            self.num_unowned += len(blocks)
            self.lru[span] = None
            self.remains.append((request, first, span))

    def commit(self) -> None:
        """Publish the remains that were not granted again."""
        for request, first, span in self.remains:
            if span in self.lru:
                del self.lru[span]
                self.num_unowned -= len(span.blocks)
                self._publish_unowned(request, first, span.blocks)
        self.remains.clear()

    def _publish_unowned(self, request: EngineRequest, first: int, blocks: list[int]) -> None:
        chain = request.chain
        if self.longest_hit(chain, first) < first:  # the prefix was evicted meanwhile: nobody could reach these
            self.pool.give_back(blocks)
            return
        last = first + len(blocks)
        touched = self._spans(chain, 0, first)
        while first < last:
            group = _group_of(chain, first)
            start, stop = _bounds(chain, group)
            span = self._span_for(chain.keys[group])
            count = min(stop, last) - first
            have = len(span.blocks) - (first - start)  # already published by somebody else
            mine, blocks = blocks[:count], blocks[count:]
            self.pool.give_back(mine[: max(have, 0)])
            if len(mine) > max(have, 0):
                self._grow(span, mine[max(have, 0) :])
            touched.append((span, 0))
            first += count
        if self._used is not None:
            self._used([span for span, _ in touched])
        for span, _ in reversed(touched):
            if span.num_unowned:
                self.lru[span] = None
                self.lru.move_to_end(span)

    # -- what running requests compute --

    def start_computing(self, request: EngineRequest) -> None:
        """A request was admitted: it will publish the groups of its chain beyond what it adopted."""
        for key in self._unpublished(request):
            self.computing[key] = self.computing.get(key, 0) + 1

    def stop_computing(self, request: EngineRequest) -> None:
        """The request left before it published all of its chain."""
        for key in self._unpublished(request):
            self._computed(key)

    def _unpublished(self, request: EngineRequest) -> list[bytes]:
        chain = request.chain
        return chain.keys[_group_of(chain, request.num_published) : request.promised_groups]

    def _computed(self, key: bytes) -> None:
        left = self.computing.get(key, 0) - 1
        if left > 0:
            self.computing[key] = left
        else:
            self.computing.pop(key, None)

    # -- waiting requests and their hits --

    def watch(self, request: EngineRequest) -> None:
        """A request waits from now on: keep its hit true and tell when it changes."""
        self._changed[request] = None
        if request.chain.keys:
            self._register(request, self.longest_hit(request.chain, self._limit(request)))

    def unwatch(self, request: EngineRequest) -> None:
        """The request waits no longer."""
        self._changed.pop(request, None)
        self._stale.pop(request, None)
        if request.watched is not None:
            self._unregister(request)
            request.watched = None

    def take_changed(self) -> list[EngineRequest]:
        """Waiting requests whose hit changed since the last call, new ones included, in arrival order."""
        self._refresh_stale()
        changed = sorted(self._changed, key=_by_order)
        self._changed.clear()
        return changed

    def _refresh_stale(self) -> None:
        for request in list(self._stale):
            self._refresh(request)

    def _refresh(self, request: EngineRequest) -> None:
        del self._stale[request]
        hit = self.longest_hit(request.chain, self._limit(request))
        assert request.watched is not None
        if hit != request.watched[0]:
            self._changed[request] = None
            self._unregister(request)
            self._register(request, hit)

    def _register(self, request: EngineRequest, hit: int) -> None:
        """Watch the last span in the hit, whose tail goes first, and the first span that could extend it."""
        chain = request.chain
        keys = []
        if hit:
            keys.append(chain.keys[_group_of(chain, hit - 1)])
        if hit < self._limit(request):
            following = chain.keys[_group_of(chain, hit)]
            if not keys or following != keys[0]:
                keys.append(following)
        request.watched = (hit, keys)
        for key in keys:
            self._watchers.setdefault(key, {})[request] = None

    def _unregister(self, request: EngineRequest) -> None:
        assert request.watched is not None
        for key in request.watched[1]:
            watchers = self._watchers[key]
            del watchers[request]
            if not watchers:
                del self._watchers[key]

    def _notify(self, key: bytes) -> None:
        if self.changed_keys is not None:
            self.changed_keys[key] = None
        watchers = self._watchers.get(key)
        if watchers:
            self._stale.update(watchers)

    def _counted(self, key: bytes, request: EngineRequest) -> int:
        """How many blocks of the span `key` the waiting request's hit counts."""
        hit = self.hit_blocks(request)
        if not hit:
            return 0
        group = _group_of(request.chain, hit - 1)
        return hit - _bounds(request.chain, group)[0] if request.chain.keys[group] == key else 0


def _by_order(request: EngineRequest) -> int:
    return request.order


def _group_of(chain: Chain, block: int) -> int:
    """Index of the group that holds the chain's block number `block` (the number of groups, if none does)."""
    ends = chain.ends
    if block < len(ends) and ends[block] == block + 1:
        return block  # ends rise by at least one, so up to here every group is one block
    return bisect_left(ends, block + 1)


def _bounds(chain: Chain, group: int) -> tuple[int, int]:
    return (chain.ends[group - 1] if group else 0), chain.ends[group]
