"""Orders in which cached-unowned blocks are evicted, beside the least recently used that prefix_cache.py keeps itself.

A span may only go after all spans that continue it, or the index would not be closed under prefixes. Both orders here
keep to that: whoever uses a span uses all spans before it, from the last to the first, so that a span's rank is never
below that of one which continues it. Knows spans and how often they were used; knows nothing of pools or requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Eviction = Literal["lru", "lfu", "fifo"]
Rank = tuple[int, int]
"""What counts first, then the place in time; the smallest is evicted first."""


class CachedSpan:
    """The cached blocks of one identity group, first to last. `owner_lengths`: how many each owner owns, sorted.

    Owners hold prefixes, so the `num_unowned` blocks beyond the largest entry may be evicted, last one first. `key` is
    None for the remains of a preempted request, which become publishable when the step commits.
    """

    __slots__ = ("blocks", "owner_lengths", "key", "num_unowned")

    def __init__(self, key: bytes | None, blocks: list[int]) -> None:
        self.key = key
        self.blocks = blocks
        self.owner_lengths: list[int] = []
        self.num_unowned = len(blocks)


class RankedEviction(OrderedDict[CachedSpan, None]):
    """Evictable spans, iterated in the order of eviction. Takes the place of the cache's plain OrderedDict.

    `rank_after_use(rank or None, place in time, renewed)` is what tells one order from another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[CachedSpan, Rank] = {}
        self._line: list[tuple[Rank, CachedSpan]] = []
        self._uses = 0

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        """The rank of a span whose user leaves; `renewed`: a span that continues it was cached by that for the first
        time.
        """
        raise NotImplementedError

    def used(self, spans: Sequence[CachedSpan]) -> None:
        """A request that held all of `spans`, first to last, leaves them."""
        renewed = False
        for span in reversed(spans):
            self._uses += 1
            rank = self._ranks.get(span)
            renewed = renewed or rank is None
            self._place(span, self.rank_after_use(rank, self._uses, renewed))

    def _place(self, span: CachedSpan, rank: Rank) -> None:
        if span in self:
            self._drop(span)
            self._ranks[span] = rank
            insort(self._line, (rank, span), key=_rank_of)
        else:
            self._ranks[span] = rank

    def _drop(self, span: CachedSpan) -> None:
        at = bisect_left(self._line, self._ranks[span], key=_rank_of)
        assert self._line[at][1] is span
        del self._line[at]

    # -- what the cache does with its evictable spans --

    def __setitem__(self, span: CachedSpan, value: None) -> None:
        if span in self:
            return
        if span not in self._ranks:  # what a victim left behind in this step
            self._uses += 1
            self._ranks[span] = self.rank_after_use(None, self._uses, True)
        super().__setitem__(span, value)
        insort(self._line, (self._ranks[span], span), key=_rank_of)

    def __delitem__(self, span: CachedSpan) -> None:
        super().__delitem__(span)
        self._drop(span)
        if span.key is None or not span.blocks:
            del self._ranks[span]

    def pop(self, span: CachedSpan, default: None = None) -> None:  # type: ignore[override]
        if span in self:
            del self[span]

    def move_to_end(self, span: CachedSpan, last: bool = True) -> None:
        """Where a span stands is its rank's to say."""

    def __iter__(self) -> Iterator[CachedSpan]:
        return (span for _, span in self._line)


class LeastFrequentlyUsed(RankedEviction):
    """The span that the fewest requests have used, among equals the one whose last use is longest ago."""

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        return (rank[0] if rank is not None else 0) + 1, place


class FirstInFirstOut(RankedEviction):
    """The span that was cached first, however often it was used since; a span is as young as the youngest that
    continues it.
    """

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        return rank if rank is not None and not renewed else (0, place)


EVICTIONS: dict[Eviction, Callable[[], OrderedDict[CachedSpan, None]]] = {
    "lru": OrderedDict,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}


def _rank_of(entry: tuple[Rank, CachedSpan]) -> Rank:
    return entry[0]
