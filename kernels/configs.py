"""The tile table: how large a tile each kernel of attention and of quantised products takes. No tuning at run time.

A tile fixes the order of additions, so results are bitwise the same whatever the batch, as long as the tile depends on
nothing of the batch. Those of attention depend on the head size and the type of the queries alone, and on the maker of
the device; those of products also on how many rows there are, in three classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import triton

Tile = TypeVar("Tile")


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """BLOCK_M query rows against BLOCK_N keys a step."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Splits of `split` keys, BLOCK_N a step; the rows are the heads of one group, see `decode_rows`."""

    block_n: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class LinearTile:
    """BLOCK_O columns of a product for BLOCK_T rows; its depth is split where it makes fewer than `programs` tiles."""

    block_o: int
    block_t: int
    num_warps: int
    num_stages: int
    programs: int = 0

    def splits(self, columns: int, depth: int) -> int:
        """Parts of at least LEAST_DEPTH, as many as occupy the device: by the matrix alone, whatever the rows."""
        blocks = -(-columns // self.block_o)
        return max(1, min(-(-self.programs // blocks), depth // LEAST_DEPTH))


LEAST_DEPTH = 1024
"""Of a part of a split product: enough steps to fill the pipeline of loads several times."""

# By the padded head size. Keys are reached through the block table, two loads a step: 5 stages keep two steps of keys
# in flight, 3 keep one. 64 rows and more let an sm_90 multiply by warp groups.
_PREFILL_16_BIT = {64: PrefillTile(128, 64, 8, 5), 128: PrefillTile(128, 64, 8, 5), 256: PrefillTile(64, 32, 8, 5)}
_DECODE_16_BIT = {64: DecodeTile(64, 512, 4, 5), 128: DecodeTile(64, 512, 4, 5), 256: DecodeTile(32, 512, 4, 5)}
# float32 takes three tensor-core products for one, and so many registers that larger heads would not fit.
_PREFILL_32_BIT = {64: PrefillTile(32, 32, 4, 2), 128: PrefillTile(32, 16, 4, 2)}
_DECODE_32_BIT = {64: DecodeTile(32, 512, 4, 5), 128: DecodeTile(32, 512, 4, 3)}
# 64 KiB of shared memory
_PREFILL_HIP = PrefillTile(128, 32, 4, 1)
_DECODE_HIP = DecodeTile(32, 512, 4, 1)
# By the rows of a product, the last for any number. Weights are the left operand, 64 of them the least that an sm_90
# multiplies by a warp group; two programs for each of some 130 processors.
_LINEAR_16_BIT = (LinearTile(64, 16, 4, 5, 256), LinearTile(128, 64, 8, 4, 256), LinearTile(128, 128, 8, 3))
_LINEAR_32_BIT = (LinearTile(64, 16, 4, 3),)  # for exactness: larger ones do not fit into the registers
_LINEAR_HIP = (LinearTile(64, 16, 4, 1, 256), LinearTile(64, 64, 4, 1, 256), LinearTile(128, 128, 8, 1))


def padded(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`: tiles come in no other size."""
    return max(least, 1 << (size - 1).bit_length())


def prefill_tile(head_dim: int, dtype: torch.dtype) -> PrefillTile:
    """Raises ValueError for a head size that has no tile."""
    if device_backend() == "hip":
        return _PREFILL_HIP
    return _entry(_PREFILL_16_BIT if dtype.itemsize == 2 else _PREFILL_32_BIT, head_dim, dtype)


def decode_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """Raises ValueError for a head size that has no tile."""
    if device_backend() == "hip":
        return _DECODE_HIP
    return _entry(_DECODE_16_BIT if dtype.itemsize == 2 else _DECODE_32_BIT, head_dim, dtype)


def decode_rows(group: int) -> int:
    """Rows of a decode tile: the query heads of a group, at least the 16 that a tensor core takes."""
    return padded(group, 16)


def linear_tile(num_rows: int, dtype: torch.dtype) -> LinearTile:
    """The smallest that takes all rows, else the largest."""
    tiles = linear_tiles(dtype)
    return next((tile for tile in tiles if tile.block_t >= num_rows), tiles[-1])


def linear_tiles(dtype: torch.dtype) -> tuple[LinearTile, ...]:
    if device_backend() == "hip":
        return _LINEAR_HIP
    return _LINEAR_16_BIT if dtype.itemsize == 2 else _LINEAR_32_BIT


def head_sizes(dtype: torch.dtype) -> tuple[int, ...]:
    """The padded head sizes that have tiles of their own; a smaller head takes the next larger one's."""
    return tuple(_PREFILL_16_BIT if dtype.itemsize == 2 else _PREFILL_32_BIT)


def _entry(table: dict[int, Tile], head_dim: int, dtype: torch.dtype) -> Tile:
    block_d = padded(head_dim, 64)
    if block_d not in table:
        raise ValueError(f"attention: the head size must be at most {max(table)} for {dtype}, got {head_dim}")
    return table[block_d]


@cache
def device_backend() -> str:
    """'cuda' or 'hip'; the interpreter takes the tiles of cuda."""
    if triton.knobs.runtime.interpret:
        return "cuda"
    return str(triton.runtime.driver.active.get_current_target().backend)


@cache
def has_float8() -> bool:
    """Whether kernels can read and write float8_e4m3fn on the current device: from compute capability 8.9 on."""
    if triton.knobs.runtime.interpret:
        return True
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)
