"""How many blocks of each waiting request vLLM's cache holds now, and which of them are being computed.

A hit is looked up again only after a block that ends or could extend it has come or gone: vLLM evicts a chain's tail
before its head, so that the keys of a chain are present from the first one on.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from schedlab.framework.request import EngineRequest


class Watched:
    """A waiting request: its hit in blocks (None: to be looked up again), and the keys whose change may change it."""

    __slots__ = ("hit", "keys", "theirs")

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        self.hit: int | None = None
        self.keys: list[bytes] = []


class Hits:
    """Hits of waiting requests, what changed of them, and what running requests will publish of their prompts."""

    def __init__(self, kv: Any, block_size: int) -> None:
        self._kv = kv
        self._block_size = block_size
        self._watched: dict[EngineRequest, Watched] = {}
        self._watchers: dict[bytes, dict[EngineRequest, None]] = {}
        self._changed: dict[EngineRequest, int] = {}  # with the hit that was last told, -1 for none
        self._promised: dict[EngineRequest, list[bytes]] = {}  # hashes still to be computed, the last one first
        self._computing: dict[bytes, int] = {}

    # -- waiting requests --

    def watch(self, request: EngineRequest, theirs: Any) -> None:
        """`request` waits from now on."""
        self._watched[request] = Watched(theirs)
        self._changed[request] = -1

    def unwatch(self, request: EngineRequest) -> None:
        """`request` waits no longer."""
        watched = self._watched.pop(request, None)
        if watched is not None:
            self._forget(request, watched)
        self._changed.pop(request, None)

    def of(self, request: EngineRequest) -> int:
        """Whole cached blocks that a grant to the waiting `request` would adopt now."""
        watched = self._watched.get(request)
        if watched is None:
            return 0
        if watched.hit is None:
            self._look_up(request, watched)
        assert watched.hit is not None
        return watched.hit

    def _look_up(self, request: EngineRequest, watched: Watched) -> None:
        theirs = watched.theirs
        hit = watched.hit = self._kv.get_computed_blocks(theirs)[1] // self._block_size
        around = theirs.block_hashes[max(hit - 1, 0) : min(hit + 1, self._most(theirs))]
        watched.keys = [make_block_hash_with_group_id(block_hash, 0) for block_hash in around]
        for key in watched.keys:
            self._watchers.setdefault(key, {})[request] = None

    def _most(self, theirs: Any) -> int:
        """Blocks that a hit has at most: the last token is computed in any case."""
        if not self._kv.prefix_cache_lookup_enabled(theirs):
            return 0
        return int(min((theirs.num_tokens - 1) // self._block_size, len(theirs.block_hashes)))

    def _forget(self, request: EngineRequest, watched: Watched) -> None:
        for key in watched.keys:
            watchers = self._watchers[key]
            del watchers[request]
            if not watchers:
                del self._watchers[key]
        watched.keys = []

    def stale(self, key: bytes) -> None:
        """A block of `key` has come or gone."""
        for request in list(self._watchers.get(key, ())):
            self._doubt(request, self._watched[request])

    def all_stale(self) -> None:
        """Any block may have come or gone."""
        for request, watched in self._watched.items():
            self._doubt(request, watched)

    def _doubt(self, request: EngineRequest, watched: Watched) -> None:
        if watched.hit is not None:
            self._changed.setdefault(request, watched.hit)
        watched.hit = None
        self._forget(request, watched)

    def take_changed(self) -> list[EngineRequest]:
        """Waiting requests whose hit changed since the last call, new ones included, in arrival order."""
        told, self._changed = self._changed, {}
        changed = [request for request, before in told.items() if self.of(request) != before]
        return sorted(changed, key=lambda request: request.order)

    # -- what running requests compute --

    def start_computing(self, request: EngineRequest, theirs: Any, hit: int) -> None:
        """An admitted request will publish the blocks of its prompt beyond its `hit`."""
        if not self._kv.enable_caching:
            return
        hashes = theirs.block_hashes[hit : request.num_prompt_tokens // self._block_size]
        self._promised[request] = hashes[::-1]
        for block_hash in hashes:
            self._computing[block_hash] = self._computing.get(block_hash, 0) + 1

    def computed(self, request: EngineRequest, whole: int) -> None:
        """The first `whole` blocks of its prompt are computed."""
        promised = self._promised.get(request)
        left = request.num_prompt_tokens // self._block_size - whole
        while promised and len(promised) > left:
            self._done(promised.pop())

    def stop_computing(self, request: EngineRequest) -> None:
        """`request` leaves, whatever it had promised."""
        for block_hash in self._promised.pop(request, ()):
            self._done(block_hash)

    def _done(self, block_hash: bytes) -> None:
        left = self._computing[block_hash] - 1
        if left:
            self._computing[block_hash] = left
        else:
            del self._computing[block_hash]

    def pending(self, request: EngineRequest) -> int:
        """Whole blocks beyond the waiting request's hit that running requests are computing and will publish."""
        watched = self._watched.get(request)
        if watched is None:
            return 0
        hit = self.of(request)
        hashes, most, reach = watched.theirs.block_hashes, self._most(watched.theirs), hit
        while reach < most and hashes[reach] in self._computing:
            reach += 1
        return reach - hit
