"""The tile table: how large a tile each attention kernel takes on which architecture. Frozen, no tuning at run time.

A tile fixes the order of additions, so results are bitwise the same whatever the batch, as long as the tile depends on
nothing of the batch. Knows nothing of kernels beyond these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """BLOCK_M query rows against BLOCK_N keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Splits of `split` keys, BLOCK_N a step; rows are the heads of one group, padded to `decode_rows`."""

    block_n: int
    split: int
    num_warps: int
    num_stages: int


# (architecture, padded head size, bits of an element of Q)
_PREFILL = {
    ("sm_90", 64, 16): PrefillTile(128, 128, 8, 2),
    ("sm_90", 128, 16): PrefillTile(128, 64, 8, 3),
    ("sm_90", 256, 16): PrefillTile(64, 32, 4, 2),
    ("sm_80", 64, 16): PrefillTile(128, 64, 4, 3),
    ("sm_80", 128, 16): PrefillTile(128, 64, 8, 3),
    ("sm_80", 256, 16): PrefillTile(64, 32, 4, 2),
}
_PREFILL_32_BITS = {64: PrefillTile(64, 32, 4, 2), 128: PrefillTile(64, 32, 8, 2), 256: PrefillTile(32, 32, 8, 1)}
_DECODE = {64: DecodeTile(64, 512, 4, 3), 128: DecodeTile(64, 512, 4, 3), 256: DecodeTile(32, 512, 4, 3)}
_DECODE_32_BITS = {64: DecodeTile(64, 512, 4, 2), 128: DecodeTile(32, 512, 4, 2), 256: DecodeTile(32, 512, 4, 1)}

ARCHITECTURES = ("sm_80", "sm_90", "gfx942")


def padded(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`: tiles come in no other size."""
    return max(least, 1 << (size - 1).bit_length())


def prefill_tile(architecture: str, head_dim: int, dtype: torch.dtype) -> PrefillTile:
    block_d = padded(head_dim, 64)
    if dtype.itemsize == 4:
        return _PREFILL_32_BITS[block_d]
    return _PREFILL["sm_90" if architecture == "sm_90" else "sm_80", block_d, 16]


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    return (_DECODE_32_BITS if dtype.itemsize == 4 else _DECODE)[padded(head_dim, 64)]


def decode_rows(group: int) -> int:
    """Rows of a decode tile: the query heads of a group, at least the 16 that a tensor core takes."""
    return padded(group, 16)


@cache
def architecture() -> str:
    """The table's name for the current device; the interpreter takes the newest one's tiles."""
    if triton.knobs.runtime.interpret:
        return "sm_90"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda":
        return str(target.arch)
    return "sm_90" if target.arch >= 90 else "sm_80"
