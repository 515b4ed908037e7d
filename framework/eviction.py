"""Orders in which cached-unowned blocks are evicted, beside the least recently used that prefix_cache.py keeps itself.

A run may only go after all runs that continue it, or the index would not be closed under prefixes. Both orders here
keep to that: whoever uses a run uses all runs before it, from the last to the first, so that a run's rank is never
below that of one which continues it. Knows runs and how often they were used; knows nothing of pools or requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from schedlab.framework.prefix_cache import Run

Eviction = Literal["lru", "lfu", "fifo"]
Rank = tuple[int, int]
"""What counts first, then the place in time; the smallest is evicted first."""


class RankedEviction(OrderedDict["Run", None]):
    """Evictable runs, iterated in the order of eviction. Takes the place of the cache's plain OrderedDict.

    `rank_after_use(rank or None, place in time, renewed)` is what tells one order from another.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[Run, Rank] = {}
        self._line: list[tuple[Rank, Run]] = []
        self._uses = 0

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        """The rank of a run whose user leaves; `renewed`: a run that continues it was cached by that for the first
        time.
        """
        raise NotImplementedError

    def used(self, runs: Sequence[Run]) -> None:
        """A request that held all of `runs`, first to last, leaves them."""
        renewed = False
        for run in reversed(runs):
            self._uses += 1
            rank = self._ranks.get(run)
            renewed = renewed or rank is None
            self._place(run, self.rank_after_use(rank, self._uses, renewed))

    def _place(self, run: Run, rank: Rank) -> None:
        if run in self:
            self._drop(run)
            self._ranks[run] = rank
            insort(self._line, (rank, run), key=_rank_of)
        else:
            self._ranks[run] = rank

    def _drop(self, run: Run) -> None:
        at = bisect_left(self._line, self._ranks[run], key=_rank_of)
        assert self._line[at][1] is run
        del self._line[at]

    # -- what the cache does with its evictable runs --

    def __setitem__(self, run: Run, value: None) -> None:
        if run in self:
            return
        if run not in self._ranks:  # what a victim left behind in this step
            self._uses += 1
            self._ranks[run] = self.rank_after_use(None, self._uses, True)
        super().__setitem__(run, value)
        insort(self._line, (self._ranks[run], run), key=_rank_of)

    def __delitem__(self, run: Run) -> None:
        super().__delitem__(run)
        self._drop(run)
        if run.key is None or not run.blocks:
            del self._ranks[run]

    def pop(self, run: Run, default: None = None) -> None:  # type: ignore[override]
        if run in self:
            del self[run]

    def move_to_end(self, run: Run, last: bool = True) -> None:
        """Where a run stands is its rank's to say."""

    def __iter__(self) -> Iterator[Run]:
        return (run for _, run in self._line)


class LeastFrequentlyUsed(RankedEviction):
    """The run that the fewest requests have used, among equals the one whose last use is longest ago."""

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        return (rank[0] if rank is not None else 0) + 1, place


class FirstInFirstOut(RankedEviction):
    """The run that was cached first, however often it was used since; a run is as young as the youngest that
    continues it.
    """

    def rank_after_use(self, rank: Rank | None, place: int, renewed: bool) -> Rank:
        return rank if rank is not None and not renewed else (0, place)


EVICTIONS: dict[Eviction, Callable[[], OrderedDict[Run, None]]] = {
    "lru": OrderedDict,
    "lfu": LeastFrequentlyUsed,
    "fifo": FirstInFirstOut,
}


def _rank_of(entry: tuple[Rank, Run]) -> Rank:
    return entry[0]
