"""vLLM's index of cached blocks, in which a block appears when the step that computes it has run.

vLLM lists a block as soon as it is scheduled; a policy that admits a request in the same step would adopt what nobody
has computed, and a grant that is taken back would leave it listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import BlockHashToBlockMap


class Listing(NamedTuple):
    """A block that is listed under `key` by step `step`, which has not finished."""

    step: int
    key: bytes
    block: Any


class BlockIndex(BlockHashToBlockMap):  # type: ignore[misc]
    """What vLLM's pool looks blocks up in. `changed(key)` is called when a block of that key appears or goes.

    While `step` is a number, a step of that number is being decided: what is inserted meanwhile is hidden until
    `publish` is called with it or, where `hides` is false, listed at once, as vLLM does.
    """

    def __init__(self, changed: Callable[[bytes], None], hides: bool) -> None:
        super().__init__()
        self.step: int | None = None
        self.num_listed = 0  # blocks, hidden ones included
        self.changed = changed
        self.hides = hides
        self._unfinished: dict[int, Listing] = {}  # by block, in the order of the steps

    def insert(self, key: bytes, block: Any) -> None:
        self.num_listed += 1
        if self.step is not None:
            self._unfinished[block.block_id] = Listing(self.step, key, block)
            if self.hides:
                return
        super().insert(key, block)
        self.changed(key)

    def pop(self, key: bytes, block_id: int) -> Any:
        listing = self._unfinished.pop(block_id, None)
        hidden = listing is not None and self.hides
        block = listing.block if listing is not None and hidden else super().pop(key, block_id)
        if block is not None:
            self.num_listed -= 1
            if not hidden:
                self.changed(key)
        return block

    def contain(self, key: bytes, block_id: int) -> bool:
        listing = self._unfinished.get(block_id)
        if listing is not None and listing.key == key:
            return True
        return bool(super().contain(key, block_id))

    def publish(self, step: int) -> None:
        """Step `step` has run: so have all before it."""
        while self._unfinished:
            block_id, listing = next(iter(self._unfinished.items()))
            if listing.step > step:
                break
            del self._unfinished[block_id]
            if self.hides:
                super().insert(listing.key, listing.block)
                self.changed(listing.key)

    def of_this_step(self, block_ids: list[int]) -> set[int]:
        """Those of `block_ids` that the step being decided has inserted."""
        found = self._unfinished
        return {i for i in block_ids if i in found and found[i].step == self.step}
