"""Physical KV blocks on the device and on the host: which one is handed out, which is given back.

Knows block numbers and how many are left; knows nothing of requests, content or which block is equal to which. What a
cached block stands for, and which of them may be evicted, is prefix_cache.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

NOBODY = -2
"""A block that no block follows."""


class BlockPool:
    """Blocks `0 .. num_blocks - 1`; the free list is last in, first out, so that fresh requests get ascending blocks.

    `on_free` is told of every block whose contents are given up, before it can be handed out again.
    """

    __slots__ = ("free", "num_blocks", "on_free")

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.on_free = on_free

    def take(self, count: int, last: int = NOBODY) -> list[int]:
        """`count` free blocks for a request whose last block is `last`; the caller has made sure that they exist."""
        assert count <= len(self.free), "taking more blocks than are free"
        if not count:
            return []
        taken = self.free[-count:]
        del self.free[-count:]
        taken.reverse()
        return taken

    def grow(self, tables: Sequence[list[int]]) -> None:
        """One free block more to each of `tables`."""
        for _ in map(list.append, tables, self.take(len(tables))):  # hot: one loop in C
            pass

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks whose contents nobody needs any more."""
        if self.on_free is not None:
            self.on_free(blocks)
        self.free.extend(reversed(blocks))


class AdjacentPool:
    """A `BlockPool` for blocks that are memory, in which neighbours are read faster than blocks far apart.

    A request gets the block after its last one where that is free. Otherwise it begins in the middle of the widest free
    run, so that it can grow, and so can whoever lies before that run. Nothing is kept back for anybody: where cached
    blocks fill the pool, what eviction frees is taken as it lies.
    """

    __slots__ = ("_is_free", "free", "num_blocks", "on_free")

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.free = set(range(num_blocks))
        self.on_free = on_free
        self._is_free = np.ones(num_blocks + 2, dtype=bool)  # of block - 1 at each place; nothing lies beyond the ends
        self._is_free[[0, -1]] = False

    def take(self, count: int, last: int = NOBODY) -> list[int]:
        """`count` free blocks for a request whose last block is `last`; the caller has made sure that they exist."""
        assert count <= len(self.free), "taking more blocks than are free"
        stop = last + 1
        while stop - last <= count and stop in self.free:
            stop += 1
        taken = self._hand_out(last + 1, stop)
        for begin, stop in self._widest(count - len(taken)):
            taken += self._hand_out(begin, stop)
        return taken

    def _hand_out(self, begin: int, stop: int) -> list[int]:
        blocks = list(range(begin, stop))
        self.free.difference_update(blocks)
        self._is_free[begin + 1 : stop + 1] = False
        return blocks

    def _widest(self, count: int) -> Iterator[tuple[int, int]]:
        """The middle of the widest free run, then of the next, until `count` blocks are found."""
        if not count:
            return
        edges = np.flatnonzero(self._is_free[1:] != self._is_free[:-1])
        begins, lengths = edges[::2], edges[1::2] - edges[::2]
        widest = lengths.argmax()
        for run in [widest] if lengths[widest] >= count else np.argsort(-lengths, kind="stable"):
            length = min(count, int(lengths[run]))
            begin = int(begins[run]) + (int(lengths[run]) - length) // 2
            yield begin, begin + length
            count -= length
            if not count:
                return

    def grow(self, tables: Sequence[list[int]]) -> None:
        """One free block more to each of `tables`."""
        moved = []
        for table in tables:
            block = table[-1] + 1
            if block in self.free:
                self.free.remove(block)
                self._is_free[block + 1] = False
                table.append(block)
            else:
                moved.append(table)
        for table, block in zip(moved, self.take(len(moved)), strict=True):
            table.append(block)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks whose contents nobody needs any more."""
        if self.on_free is not None:
            self.on_free(blocks)
        assert self.free.isdisjoint(blocks), "a block is given back twice"
        self.free.update(blocks)
        self._is_free[np.asarray(blocks, dtype=np.int64) + 1] = True


class HostPool:
    """Blocks in host memory for swapped requests."""

    __slots__ = ("free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))

    def take(self, count: int) -> list[int] | None:
        """`count` host blocks, or None if there are not as many."""
        if count > len(self.free):
            return None
        taken = self.free[len(self.free) - count :]
        del self.free[len(self.free) - count :]
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks that no copy will read any more: those read in a step, only when it commits."""
        self.free.extend(reversed(blocks))
