"""Physical KV blocks on the device and on the host: who gets one, who gives one back.

Knows block numbers and how many are left; knows nothing of requests, content or which block is equal to which. What a
cached block stands for, and which of them may be evicted, is prefix_cache.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class BlockPool:
    """Blocks `0 .. num_blocks - 1`; the free list is last in, first out, so that fresh requests get ascending blocks.

    `on_free` is told of every block whose contents are given up, before it can be handed out again.
    """

    __slots__ = ("free", "num_blocks", "on_free")

    def __init__(self, num_blocks: int, on_free: Callable[[Sequence[int]], None] | None = None) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.on_free = on_free

    def take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has made sure that they exist."""
        assert count <= len(self.free), "taking more blocks than are free"
        if not count:
            return []
        taken = self.free[-count:]
        del self.free[-count:]
        taken.reverse()
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks whose contents nobody needs any more."""
        if self.on_free is not None:
            self.on_free(blocks)
        self.free.extend(reversed(blocks))


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
