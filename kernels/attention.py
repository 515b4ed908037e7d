"""What every attention over paged keys and values is given besides its queries.

Shape letters: N sequences, B blocks of the widest table, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

Scale: TypeAlias = float | Tensor | None
"""What a cache's values are multiplied with when read: a number, or a tensor of one element."""


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """The keys and values of N sequences in a paged cache, and how queries weigh them.

    k_cache, v_cache : [num_blocks, block_size, K, D]
    block_tables_NB  : the blocks of each sequence in order; entries beyond its length are never read
    context_lens_N   : how many keys each sequence has
    scale            : scores are scale * q·k
    window           : a query sees the last `window` keys up to its own, itself included; None: all of them
    softcap          : scores become softcap * tanh(score / softcap); None: they stay
    k_scale, v_scale : of a quantised cache
    """

    k_cache: Tensor
    v_cache: Tensor
    block_tables_NB: Tensor
    context_lens_N: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    k_scale: Scale = None
    v_scale: Scale = None

    @property
    def block_size(self) -> int:
        return self.k_cache.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]
