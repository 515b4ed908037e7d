"""The prefix cache as its contract describes it: one entry a block, every question answered by looking at all of them.

Knows names of blocks; knows no digests, runs or watchers.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from schedlab.framework.content import Content, IdContent, SessionContent, UniqueContent

Group = tuple
Block = tuple[Group, int]


@dataclass
class SlowRequest:
    """What the model knows of a request; `owned` of its blocks are published, `private` are its own alone."""

    name: str
    content: Content
    prompt: int
    size: int
    tokens: int = 0
    computed: int = 0
    owned: int = 0
    private: int = 0
    names: list[Block] = field(default_factory=list)

    def __post_init__(self):
        self.tokens = self.prompt

    def block(self, i: int) -> Block:
        """Name of block i, equal for equal content after equal content: (group, place within the group)."""
        while i >= len(self.names):
            self.names.append(self._name(len(self.names)))
        return self.names[i]

    def _name(self, i: int) -> Block:
        content = self.content
        if isinstance(content, SessionContent):
            return ("session", content.session, i), 0
        if isinstance(content, UniqueContent) or i >= self.prompt // self.size:
            return ("own", self.name, i), 0
        assert isinstance(content, IdContent)
        place = 0
        while place < i and self._id_of(i - place - 1) == self._id_of(i):
            place += 1
        last = self._id_of(i)
        return ("ids", tuple(content.ids[: last + 1]), min(content.width, self.prompt - last * content.width)), place

    def _id_of(self, i: int) -> int:
        """The id that holds the last token of block i."""
        return ((i + 1) * self.size - 1) // self.content.width

    def blocks(self, start: int, stop: int) -> list[Block]:
        return [self.block(i) for i in range(start, stop)]

    @property
    def promised(self) -> list[Block]:
        """Blocks that it will publish as it computes: those of its prompt, if that has an identity."""
        return self.blocks(0, self.prompt // self.size) if self.content.has_identity else []


@dataclass
class Remains:
    request: SlowRequest
    first: int
    blocks: list[Block]
    recency: int


@dataclass
class SlowCache:
    """`entries` maps each cached block to its owners; `free` counts blocks without content."""

    free: int
    entries: dict[Block, set[str]] = field(default_factory=dict)
    recency: dict[Group, int] = field(default_factory=dict)
    remains: list[Remains] = field(default_factory=list)
    clock: int = 0

    @property
    def num_free(self) -> int:
        unowned = sum(not owners for owners in self.entries.values())
        return self.free + unowned + sum(len(remains.blocks) for remains in self.remains)

    def hit(self, request: SlowRequest) -> int:
        """Leading blocks that are cached; the last token of the request is never covered."""
        count = 0
        while count < (request.tokens - 1) // request.size and request.block(count) in self.entries:
            count += 1
        return count

    def pending(self, request: SlowRequest, running: list[SlowRequest]) -> int:
        """Blocks behind the hit that somebody who runs is computing and will publish."""
        computing = {block for other in running for block in other.promised}
        first = count = self.hit(request)
        while count < (request.tokens - 1) // request.size and request.block(count) in computing:
            count += 1
        return count - first

    def need(self, request: SlowRequest, hit: int, blocks: int) -> int:
        """By how much `num_free` falls if the request adopts its hit and then has `blocks` in all."""
        return blocks - hit + sum(not self.entries[block] for block in request.blocks(0, hit))

    def allocate(self, request: SlowRequest, count: int) -> None:
        while self.free < count:
            self.evict()
        self.free -= count
        request.private += count

    def evict(self) -> None:
        """The last unowned block of the least recently used group; what a victim left behind is a group of its own."""
        groups = {group: self.recency[group] for (group, _), owners in self.entries.items() if not owners}
        oldest = min(groups, key=groups.__getitem__, default=None)
        left = min((r for r in self.remains if r.blocks), key=lambda r: r.recency, default=None)
        if left is not None and (oldest is None or left.recency < groups[oldest]):
            left.blocks.pop()
        else:
            place = max(i for group, i in self.entries if group == oldest)
            assert not self.entries.pop((oldest, place)), "evicted a block with an owner"
        self.free += 1

    def disturbs(self, count: int, waiting: list[SlowRequest]) -> bool:
        """Whether allocating `count` blocks shortens somebody's hit."""
        after = deepcopy(self)
        while after.free < count:
            after.evict()
        return any(after.hit(request) < self.hit(request) for request in waiting)

    def adopt(self, request: SlowRequest, hit: int) -> None:
        for block in request.blocks(0, hit):
            self.entries[block].add(request.name)
        request.owned = hit

    def publish(self, request: SlowRequest, whole: int) -> None:
        """What exists already is dropped for the published one."""
        for block in request.blocks(request.owned, whole):
            self.free += block in self.entries
            self.entries.setdefault(block, set()).add(request.name)
            request.private -= 1
        request.owned = max(request.owned, whole)

    def release(self, request: SlowRequest) -> None:
        """Its private blocks are free; its last group is the first to be evicted."""
        self.free += request.private
        for block in request.blocks(0, request.owned):
            self.entries[block].remove(request.name)
        self.touch(request.blocks(0, request.owned))
        request.owned = request.private = 0

    def touch(self, blocks: list[Block]) -> None:
        for group, _ in reversed(blocks):
            self.clock += 1
            self.recency[group] = self.clock

    def preempt(self, request: SlowRequest) -> None:
        """Whole computed blocks stay, evictable at once and visible when the step commits."""
        blocks = request.blocks(request.owned, max(request.computed // request.size, request.owned))
        self.clock += 1
        self.remains.append(Remains(request, request.owned, blocks, self.clock))
        request.private -= len(blocks)
        self.release(request)

    def commit(self) -> None:
        for left in self.remains:
            prefix = left.request.blocks(0, left.first)
            if not left.blocks or any(block not in self.entries for block in prefix):
                self.free += len(left.blocks)
                continue
            for block in left.blocks:
                self.free += block in self.entries
                self.entries.setdefault(block, set())
            self.touch(prefix + left.blocks)
        self.remains = []
