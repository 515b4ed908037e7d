"""Ragged batches over a paged cache, to check attention with: how to state one, build it, and what the reference says.

Every slot that no sequence owns is NaN, in tails of blocks and in free blocks alike, and table entries past a
sequence's length name no block: whatever reads them shows. The reference implementation is the only one used here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from schedlab.kernels.attention import PagedKeys
from schedlab.kernels.dispatch import Kernels, kernels

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
    """The tensors of a case; `starts` is None in decode."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    contexts: Tensor
    starts: Tensor | None
    options: dict[str, Any]
    counts: tuple[int, ...]

    def run(self, ops: Kernels, **extra: Any) -> Any:
        """The attention of this batch by one implementation."""
        paged = PagedKeys(self.k_cache, self.v_cache, self.tables, self.contexts, **self.options)
        if self.starts is None:
            return ops.decode_attention(self.q, paged, **extra)
        return ops.prefill_attention(self.q, self.starts, paged, **extra)

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out, lse) in float64; without values where there is no data."""
        if self.q.is_meta:
            return self.q.double(), self.q.new_empty(self.q.shape[:2])
        out, lse = self._replace(q=self.q.double()).run(kernels("cpu", "reference"), return_lse=True)
        return out, lse

    def select(self, rows: list[int]) -> Batch:
        """The sequences `rows`, in this order, over the same cache."""
        if self.starts is None:
            return self._replace(q=self.q[rows], tables=self.tables[rows], contexts=self.contexts[rows])
        spans = [torch.split(self.q, list(self.counts))[n] for n in rows]
        starts = torch.tensor([0, *map(len, spans)]).cumsum(0).to(self.starts)
        return self._replace(q=torch.cat(spans), tables=self.tables[rows], contexts=self.contexts[rows], starts=starts)


def build(case: Case, device: str = "cpu") -> Batch:
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(case.seed)
    tables, num_blocks = _tables(case, generator)
    caches = [_cache(case, num_blocks, _owned_slots(case, tables), generator).to(device) for _ in range(2)]
    counts = (1,) * len(case.contexts) if case.queries is None else case.queries
    q = torch.randn(sum(counts), case.heads + 2 * case.packed, case.head_dim, generator=generator).to(case.dtype)
    starts = None if case.queries is None else torch.tensor([0, *counts]).cumsum(0).to(device, case.index_dtype)
    options = {name: getattr(case, name) for name in ("window", "softcap", "k_scale", "v_scale")}
    return Batch(
        q.to(device)[:, case.packed : case.heads + case.packed],
        caches[0],
        caches[1],
        tables.to(device, case.index_dtype),
        torch.tensor(case.contexts, dtype=case.index_dtype, device=device),
        starts,
        options | {"scale": case.scale or case.head_dim**-0.5},
        counts,
    )


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


def _cache(case: Case, num_blocks: int, slots: Tensor, generator: torch.Generator) -> Tensor:
    heads = case.kv_heads, case.head_dim
    cache = torch.full((num_blocks, case.block_size, *heads), torch.nan)
    cache.view(-1, *heads)[slots] = torch.randn(len(slots), *heads, generator=generator)
    cache = cache.to(case.cache_dtype or case.dtype)
    return cache.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "HND" else cache


def error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; NaN anywhere makes it NaN, which no bound admits, and so does
    the lack of data."""
    if actual.is_meta:
        return float("nan")
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm()) / (float(expected.norm()) or 1.0)
