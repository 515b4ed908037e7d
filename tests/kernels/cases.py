"""Ragged batches over a paged cache for tests of attention: how to state one, build it, and what the reference says.

Every slot that no sequence owns is NaN, in tails of blocks and in free blocks alike, and table entries past a sequence's
length name no block: whatever reads them shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from schedlab.kernels import reference
from schedlab.kernels.dispatch import Kernels
from torch import Tensor

NO_BLOCK = 2**30
FREE_BLOCKS = 3
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """`queries` tokens of each sequence are computed, the last of its `contexts`; None is decode, one token each.

    `layout` HND keeps the tokens of a block and head together; `packed` takes q as a view of a packed product.
    """

    contexts: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int32
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    layout: str = "NHD"
    packed: bool = False
    spare_columns: int = 1
    seed: int = 0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


class Batch(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    contexts: Tensor
    starts: Tensor | None
    options: dict[str, Any]

    def run(self, ops: Kernels, **extra: Any) -> Any:
        """The attention of this batch by one implementation."""
        arguments = (self.q, self.k_cache, self.v_cache, self.tables, self.contexts)
        if self.starts is None:
            return ops.decode_attention(*arguments, **self.options, **extra)
        return ops.prefill_attention(*arguments, self.starts, **self.options, **extra)

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64."""
        return self._replace(q=self.q.double()).run(REFERENCE, return_lse=True)

    def select(self, rows: list[int]) -> Batch:
        """The sequences `rows`, in this order, over the same cache."""
        if self.starts is None:
            return self._replace(q=self.q[rows], tables=self.tables[rows], contexts=self.contexts[rows])
        spans = [self.q[self.starts[n] : self.starts[n + 1]] for n in rows]
        starts = torch.tensor([0, *map(len, spans)]).cumsum(0).to(self.starts.dtype)
        return self._replace(q=torch.cat(spans), tables=self.tables[rows], contexts=self.contexts[rows], starts=starts)


REFERENCE = Kernels(
    "reference",
    reference.rms_norm,
    reference.rope_kv_write,
    reference.silu_mul,
    reference.prefill_attention,
    reference.decode_attention,
    reference.sample,
)


def build(case: Case) -> Batch:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tables, num_blocks = _tables(case, generator)
    slots = _owned_slots(case, tables)
    caches = []
    for _ in range(2):
        cache = torch.full((num_blocks, case.block_size, case.kv_heads, case.head_dim), torch.nan)
        cache.view(-1, case.kv_heads, case.head_dim)[slots] = normal(len(slots), case.kv_heads, case.head_dim)
        cache = cache.to(case.cache_dtype or case.dtype)
        caches.append(cache.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "HND" else cache)
    counts = (1,) * len(case.contexts) if case.queries is None else case.queries
    q = normal(sum(counts), case.heads + 2 * case.packed, case.head_dim).to(case.dtype)[:, case.packed : case.heads + case.packed]
    starts = None if case.queries is None else torch.tensor([0, *counts]).cumsum(0).to(case.index_dtype)
    options = dict(scale=case.scale or case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    options |= dict(k_scale=case.k_scale, v_scale=case.v_scale)
    contexts = torch.tensor(case.contexts, dtype=case.index_dtype)
    return Batch(q, *caches, tables.to(case.index_dtype), contexts, starts, options)


def _blocks_of(case: Case) -> list[int]:
    return [-(-context // case.block_size) for context in case.contexts]


def _tables(case: Case, generator: torch.Generator) -> tuple[Tensor, int]:
    blocks = _blocks_of(case)
    num_blocks = sum(blocks) + FREE_BLOCKS
    shuffled = torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(blocks), max(blocks, default=0) + case.spare_columns), NO_BLOCK)
    for n, count in enumerate(blocks):
        tables[n, :count], shuffled = shuffled[:count], shuffled[count:]
    return tables, num_blocks


def _owned_slots(case: Case, tables: Tensor) -> Tensor:
    offsets = torch.arange(case.block_size)
    slots = [
        (tables[n, :count, None] * case.block_size + offsets).flatten()[:context]
        for n, (count, context) in enumerate(zip(_blocks_of(case), case.contexts, strict=True))
    ]
    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64)


def error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN anywhere makes it NaN, which no bound admits."""
    actual, expected = actual.double(), expected.double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm or 1.0)


TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of `error` against float64. The interpreter truncates bfloat16 where a GPU rounds: with rounding, 5e-3 would do."""


def check(ops: Kernels, case: Case) -> None:
    """The output of `ops` is that of the reference, within the type's tolerance."""
    batch = build(case)
    actual, (expected, _) = batch.run(ops), batch.expected()
    assert actual.dtype == case.dtype
    assert error(actual, expected) <= TOLERANCE[case.dtype], case
