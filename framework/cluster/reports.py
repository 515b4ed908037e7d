"""What a replica tells its router beside first tokens and ends: gauges that are scraped, and news of its cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from schedlab.framework.content import Chain
from schedlab.framework.engine import Engine


@dataclass(frozen=True, slots=True)
class Gauges:
    """Counts of one instant: requests that wait and that run, and KV blocks that could be had."""

    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    as_of_ns: int = 0

    @classmethod
    def of(cls, engine: Engine, now_ns: int) -> Gauges:
        ledger = engine.ledger
        return cls(len(ledger.waiting), len(ledger.running), ledger.num_free_blocks, now_ns)


class CacheIndex:
    """How many leading blocks of a prompt a replica's cache holds, as of the news that have come of it.

    `collect` takes what a step changed, stamped with its end; `hear` lets it become known.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._changed: dict[bytes, None] = {}
        engine.ledger.cache.changed_keys = self._changed
        self._news: deque[tuple[int, list[tuple[bytes, int]]]] = deque()
        self._blocks: dict[bytes, int] = {}

    def collect(self) -> None:
        if not self._changed:
            return
        index = self._engine.ledger.cache.index
        changes = [(key, len(index[key].blocks) if key in index else 0) for key in self._changed]
        self._news.append((self._engine.now_ns, changes))
        self._changed.clear()

    def hear(self, until_ns: float) -> None:
        while self._news and self._news[0][0] <= until_ns:
            for key, blocks in self._news.popleft()[1]:
                if blocks:
                    self._blocks[key] = blocks
                else:
                    self._blocks.pop(key, None)

    def cached_blocks(self, chain: Chain, limit: int) -> int:
        """At most `limit` of the chain; the index is closed under prefixes."""
        keys, known = chain.keys, self._blocks
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in known:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        start = chain.ends[low - 2] if low > 1 else 0
        return min(start + known[keys[low - 1]], limit)
