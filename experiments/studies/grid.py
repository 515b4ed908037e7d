"""Which steps a calibration measures: cells of scripted requests, and the policy that makes an engine run them.

A cell is a few requests that are prefilled, decoded together, mixed or swapped, step by step; every step of it is
measured, the ones that only build up a context included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schedlab.framework.content import IdContent
from schedlab.framework.cost.roofline import Work
from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.step import Step

DECODE_STEPS = 8
"""Decode-only steps of a cell: as in a run, most of them follow another of their kind."""
PAUSE = 2
"""Decode-only steps before a prompt's: in a run it mostly comes upon caches that decoding has left."""
SHORT_ENDS, MIXED = (8, 24, 60, 160), (127, 16, 50, 90, 200, 450)
"""Tokens of a prompt that a hit leaves to compute, alone and beside decodes."""
BATCHES = (1, 3, 6, 12, 24, 48, 96)
"""Sizes of batches beside those that double."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the grid reaches: sequences in a decode batch, tokens of a context, prompt tokens of one step.

    `max_cell_tokens` bounds the contexts of a batch together, and so the time that building them up takes.
    """

    max_batch: int = 32
    max_context: int = 2048
    max_prefill: int = 1024
    max_cell_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_context", "max_prefill", "max_cell_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"calibrate.{name}: expected at least 1, found {getattr(self, name)}")

    def check(self, config: EngineConfig) -> None:
        """ConfigError unless an engine of these limits can run the whole grid."""
        budget, further = config.max_num_batched_tokens, len(MIXED) + 3  # those that come to a batch go on decoding
        for name, found, limit in (
            ("max_batch", self.max_batch, config.max_num_seqs - further),
            ("max_context", self.max_context, config.max_model_len - 64),
            ("max_prefill", self.max_prefill, budget - self.max_batch - further),
            ("max_cell_tokens", self.max_cell_tokens, config.pool_tokens // 2),
        ):
            if found > limit:
                raise ConfigError(f"calibrate.{name}: the engine as it is set up admits {limit} at most, found {found}")


class Move(NamedTuple):
    """One step: swap out, then one token to each of decoding, then `grants` of (request, tokens)."""

    grants: tuple[tuple[int, int], ...]
    decode: bool
    swapped: tuple[int, ...]


@dataclass
class Cell:
    """Requests and the steps they go through, written down as if it had already happened.

    `works` are what the steps compute, in units of `Work` but for copies, which `copies` counts in blocks. With a
    prefix cache, whole blocks that are swapped out are still in it when they are wanted again; `leaders` are the
    requests whose prompts others begin with.
    """

    name: str
    block_size: int
    prefix_caching: bool = False
    prompts: list[int] = field(default_factory=list)
    leaders: dict[int, int] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    _computed: list[int] = field(default_factory=list)
    _emitted: list[int] = field(default_factory=list)
    _away: set[int] = field(default_factory=set)

    def add(self, *prompts: int) -> list[int]:
        """Requests with prompts of these lengths, by index."""
        first = len(self.prompts)
        self.prompts += prompts
        self._computed += [0] * len(prompts)
        self._emitted += [0] * len(prompts)
        return list(range(first, len(self.prompts)))

    def add_after(self, leader: int, tokens: int) -> int:
        """A request whose prompt is that of `leader`, whole blocks that are in the cache, and `tokens` more."""
        assert self.prefix_caching and not self.prompts[leader] % self.block_size
        (request,) = self.add(self.prompts[leader] + tokens)
        self._computed[request] = self.prompts[leader]
        self.leaders[request] = leader
        return request

    def step(self, *grants: tuple[int, int], decode: bool = False, swap: Sequence[int] = ()) -> None:
        """The next step. A request whose last token this emits is done."""
        copies = sum(self._blocks(i) for i in swap)
        self._away |= set(swap)
        decoding = [i for i in range(len(self.prompts)) if self._decodes(i)] if decode else []
        work = Work.total(Work.decode(self._computed[i] + 1) for i in decoding)
        for i, tokens in grants:
            copies += self._lost(i) if i in self._away else 0
            self._away.discard(i)
            work += Work.prefill(self._computed[i], tokens, self._advance(i, tokens))
        for i in decoding:
            self._advance(i, 1)
        self.moves.append(Move(grants, decode, tuple(swap)))
        self.works.append(work)
        self.copies.append(copies)

    def companion(self) -> None:
        """A request that decodes in the pauses."""
        (request,) = self.add(64)
        self.step((request, 64))

    def pause(self) -> None:
        for _ in range(PAUSE):
            self.step(decode=True)

    def build_up(self, requests: Sequence[int], step_tokens: int) -> None:
        """Prefill whole prompts, as many to a step as fit into `step_tokens`; a longer prompt goes in chunks."""
        grants: list[tuple[int, int]] = []
        room = step_tokens
        for i in requests:
            left = self.prompts[i]
            if grants and left > room:
                self.step(*grants)
                grants, room = [], step_tokens
            while left > room:
                self.step((i, room))
                left -= room
            grants.append((i, left))
            room -= left
        self.step(*grants)

    def requests(self, names: Iterator[int]) -> list[EngineRequest]:
        """Fresh requests that end with the tokens that this cell lets them emit.

        Their prompts are known by ids, as those of most traces are, since an engine's step makes tokens of them and
        looks for them in the cache.
        """
        rows = [str(next(names)) for _ in self.prompts]
        return [
            EngineRequest(
                row, 0, prompt, IdContent(self._ids(i), self.block_size, rows[0]), recorded_output_tokens=emitted
            )
            for i, (row, prompt, emitted) in enumerate(zip(rows, self.prompts, self._emitted, strict=True))
        ]

    def _ids(self, i: int) -> list[int]:
        """One for each block of the prompt, a leader's first."""
        shared = self._ids(self.leaders[i]) if i in self.leaders else []
        blocks = -(-self.prompts[i] // self.block_size)
        return shared + [i << 32 | block for block in range(len(shared), blocks)]

    def _decodes(self, i: int) -> bool:
        return self._emitted[i] > 0 and i not in self._away

    def _blocks(self, i: int) -> int:
        return -(-self._computed[i] // self.block_size)

    def _lost(self, i: int) -> int:
        """Blocks that must be copied back."""
        return self._blocks(i) - (self._computed[i] // self.block_size if self.prefix_caching else 0)

    def _advance(self, i: int, tokens: int) -> bool:
        """Whether these `tokens` make the request emit one."""
        self._computed[i] += tokens
        emits = self._computed[i] == self.prompts[i] + self._emitted[i]
        self._emitted[i] += emits
        return emits


class Script(Policy):
    """Does what the cells say, move by move."""

    def __init__(self) -> None:
        self._moves: Iterator[Move] = iter(())
        self._requests: Sequence[EngineRequest] = ()

    def follow(self, cell: Cell, requests: Sequence[EngineRequest]) -> None:
        """From now on run `cell`, with its `requests`, which the engine has."""
        self._moves, self._requests = iter(cell.moves), requests

    def schedule(self, step: Step) -> None:
        move, requests = next(self._moves), self._requests
        for i in move.swapped:
            mode = step.preempt(requests[i], "swap")
            assert mode == "swap", "a calibration has host memory for all that it swaps"
        if move.decode:
            step.grant_decodes()
        for i, tokens in move.grants:
            granted = step.grant(requests[i], tokens).tokens
            assert granted == tokens, f"granted {granted} of {tokens} tokens"


# ---- the grid ----


def make_cells(extent: Extent, block_size: int, prefix_caching: bool = False) -> list[Cell]:
    """All cells: prefills alone and together, long contexts and short ends of them, decode batches, mixtures, swaps."""
    new = _Maker(extent, block_size, prefix_caching)
    return [
        *new.prompts(), *new.long_prompts(), *new.short_ends(), *new.several_prompts(), *new.decodes(), *new.ragged(),
        *new.mixtures(), *new.swaps(),
    ]  # fmt: skip


def swapped_blocks(cells: Sequence[Cell]) -> int:
    """Blocks that the largest step of `cells` copies."""
    return max((copies for cell in cells for copies in cell.copies), default=0)


def up_to(limit: int, factor: int, start: int = 1) -> list[int]:
    """`start`, `start * factor`, … and `limit`."""
    sizes = []
    while start < limit:
        sizes.append(start)
        start *= factor
    return [*sizes, limit]


class _Maker:
    """Cells within an extent."""

    def __init__(self, extent: Extent, block_size: int, prefix_caching: bool) -> None:
        self.extent = extent
        self.block_size = block_size
        self.prefix_caching = prefix_caching

    def cell(self, name: str) -> Cell:
        return Cell(name, self.block_size, self.prefix_caching)

    def prompts(self) -> Iterator[Cell]:
        """One whole prompt a step, from one token to the longest step."""
        longest = min(self.extent.max_prefill, self.extent.max_context)
        for tokens in sorted({*up_to(longest, 4), *up_to(longest, 2, 48)}):
            cell = self.cell("prefill")
            cell.companion()
            cell.pause()
            cell.build_up(cell.add(tokens), tokens)
            yield cell

    def long_prompts(self) -> Iterator[Cell]:
        """Chunks of one size, and of falling sizes, over a context that grows to its longest."""
        for share in (4, 2):
            chunk = max(self.extent.max_prefill // share, 1)
            cell = self.cell("long context")
            cell.build_up(cell.add(self.extent.max_context), chunk)
            yield cell
        cell = self.cell("long context")
        (prompt,) = cell.add(self.extent.max_context)
        left = self.extent.max_context
        while left:
            tokens = min(max(left // 2, 1), self.extent.max_prefill) if left > 8 else left
            cell.step((prompt, tokens))
            left -= tokens
        yield cell

    def short_ends(self) -> Iterator[Cell]:
        """Few tokens after a context: of prompts whose beginning is in the cache, or else of one long prompt."""
        extent, size = self.extent, self.block_size
        ends = [tokens for tokens in SHORT_ENDS if tokens <= extent.max_prefill]
        for context in up_to(extent.max_context - sum(ends), 3, 64) if sum(ends) < extent.max_context else []:
            cell = self.cell("short end")
            cell.companion()
            found = self.prefix_caching and context >= size
            context = context // size * size if found else context
            (prompt,) = cell.add(context + (0 if found else sum(ends)))
            for start in range(0, context, extent.max_prefill):
                cell.step((prompt, min(extent.max_prefill, context - start)))
            for tokens in ends:
                cell.pause()
                cell.step((cell.add_after(prompt, tokens) if found else prompt, tokens))
            yield cell

    def several_prompts(self) -> Iterator[Cell]:
        """Several whole prompts in one step."""
        extent = self.extent
        for count, tokens in ((2, 16), (8, 16), (4, 64), (3, 200), (8, 100)):
            if count <= extent.max_batch and count * tokens <= min(extent.max_prefill, extent.max_context):
                cell = self.cell("prefill")
                cell.companion()
                cell.pause()
                cell.build_up(cell.add(*[tokens] * count), count * tokens)
                yield cell

    def decodes(self) -> Iterator[Cell]:
        """Batches of every size at every context that can be built up in time."""
        extent = self.extent
        for batch in up_to(extent.max_batch, 2):
            for context in up_to(extent.max_context, 4, 32):
                if batch * context > extent.max_cell_tokens:
                    continue
                cell = self.cell("decode")
                cell.build_up(cell.add(*[context] * batch), extent.max_prefill)
                for _ in range(DECODE_STEPS):
                    cell.step(decode=True)
                yield cell

    def ragged(self) -> Iterator[Cell]:
        """Batches of which each request has a context of its own, as in a run."""
        extent = self.extent
        for batch in BATCHES:
            longest = min(extent.max_context, 2 * extent.max_cell_tokens // (batch + 1))
            if 1 < batch <= extent.max_batch and longest >= batch:
                cell = self.cell("decode")
                cell.build_up(cell.add(*(longest * (i + 1) // batch for i in range(batch))), extent.max_prefill)
                for _ in range(DECODE_STEPS):
                    cell.step(decode=True)
                yield cell

    def mixtures(self) -> Iterator[Cell]:
        """What is left of prompts, then two prompts at once and the rest of one, beside batches that decode."""
        extent, size = self.extent, self.block_size
        for batch in (n for n in BATCHES if n <= min(extent.max_batch, extent.max_cell_tokens)):
            context = min(256, extent.max_context, extent.max_cell_tokens // batch)
            found = self.prefix_caching and context >= size
            context = context // size * size if found else context
            cell = self.cell("mixed")
            cell.build_up(members := cell.add(*[context] * batch), extent.max_prefill)
            chunks = [1]
            for tokens in MIXED:
                seen = context + tokens if found else sum(chunks) + tokens
                if tokens <= extent.max_prefill and seen <= extent.max_context:
                    chunks.append(tokens)
            (prompt,) = (members[0],) if found else cell.add(sum(chunks))
            for tokens in chunks:
                cell.pause()
                cell.step((cell.add_after(prompt, tokens) if found else prompt, tokens), decode=True)
            if extent.max_prefill >= 88 and extent.max_context >= 104:
                whole, cut = cell.add(24, 104)
                cell.step((whole, 24), (cut, 64), decode=True)
                cell.step((cut, 40), decode=True)
            yield cell

    def swaps(self) -> Iterator[Cell]:
        """Part of a batch swapped out and back while the rest decodes."""
        extent = self.extent
        for context in up_to(min(extent.max_context, max(extent.max_cell_tokens // 4, 1)), 4, 64):
            for away in (1, 3):
                cell = self.cell("swap")
                batch = cell.add(*[context] * 4)
                cell.build_up(batch, extent.max_prefill)
                cell.step(decode=True, swap=batch[:away])
                cell.step(*[(i, 1) for i in batch[:away]], decode=True)
                yield cell
