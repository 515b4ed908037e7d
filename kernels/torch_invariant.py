"""The kernels in plain torch such that a token's result is the same bits in any batch and under any chunking.

A product of matrices rounds by the number of its rows and by the layout of its operands, a softmax by how its keys are
grouped. So rows are computed in tiles of a fixed number, the last one padded, and keys in tiles that begin at fixed
positions of their sequence, added up in order; every operand is contiguous. The promise holds for one machine, one
version of torch and one number of threads, which divides ROW_TILE. Signatures and shape letters are those of
`torch_backend`; W tiles of R rows, P pairs of such a tile with a tile of C keys, G heads that share one of H KV heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels import torch_backend
from schedlab.kernels.attention import PagedKeys, Scale
from schedlab.kernels.dispatch import Kernels

ROW_TILE = 16
KEY_TILE = 64
PAIRS = 256
"""Pairs of a row tile and a tile of keys that are computed at once."""


def linear(x_TH: Tensor, weight_OH: Tensor, bias_O: Tensor | None) -> Tensor:
    """x @ weight.T + bias."""
    return _by_tiles(partial(F.linear, weight=weight_OH, bias=bias_O), x_TH)


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_backend.rms_norm`, row tile by row tile."""
    if residual_TH is not None:
        x_TH = x_TH + residual_TH
    normed = _by_tiles(lambda tile: F.rms_norm(tile, weight_H.shape, weight_H, eps), x_TH)
    result = normed if out is None else out.copy_(normed)
    return result if residual_TH is None else (result, x_TH)


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch_backend.silu_mul`, row tile by row tile."""
    product = _by_tiles(torch_backend.silu_mul, gate_up_T2I)
    return product if out is None else out.copy_(product)


def prefill_attention(
    q_THD: Tensor, query_starts_N1: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_backend.prefill_attention` over tiles of keys that begin at multiples of KEY_TILE."""
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    result = torch.empty_like(q_THD) if out is None else out
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    q_TGHD, out_TGHD, lse_TGH = (_by_kv_head(x, paged.num_kv_heads) for x in (q_THD, result, lse_TH))
    lengths = query_starts_N1.tolist(), paged.context_lens_N.tolist()
    for tiles in _chunks(_row_tiles(*lengths, q_TGHD.shape[1], paged.window)):
        work = _Work(tiles, paged)
        keys_PHDC = work.gathered(paged.k_cache, wide, paged.k_scale).permute(0, 2, 3, 1).contiguous()
        values_PHCD = work.gathered(paged.v_cache, wide, paged.v_scale).transpose(1, 2).contiguous()
        q_WHRD = q_TGHD[work.tokens_WR, work.heads_WR].to(wide).transpose(1, 2).contiguous()
        out_WHRD, lse_WHR = _attend(q_WHRD, keys_PHDC, values_PHCD, work, paged)
        out_TGHD[work.tokens_WR, work.heads_WR] = out_WHRD.transpose(1, 2).to(q_THD.dtype)
        lse_TGH[work.tokens_WR, work.heads_WR] = lse_WHR.transpose(1, 2)
    return (result, lse_TH) if return_lse else result


def decode_attention(
    q_NHD: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill_attention` with one query a sequence, and so the same bits."""
    return prefill_attention(q_NHD, torch.arange(len(q_NHD) + 1), paged, out=out, return_lse=return_lse)


INVARIANT = Kernels(
    "torch-invariant",
    rms_norm=rms_norm,
    rope_kv_write=torch_backend.rope_kv_write,  # products and sums of single elements round alike everywhere
    silu_mul=silu_mul,
    prefill_attention=prefill_attention,
    decode_attention=decode_attention,
    sample=torch_backend.sample,  # row by row
    in_tiles=lambda function, rows: _by_tiles(function, rows),
)


class _RowTile(NamedTuple):
    """ROW_TILE of a sequence's rows, from `first_row` on; a row is a query and one of the G heads of its group.

    `first_token` and `first_position` are those of the sequence's first row, `key_tiles` the first positions of the
    tiles of keys that any of the rows sees.
    """

    sequence: int
    first_token: int
    first_position: int
    group: int
    num_rows: int
    first_row: int
    key_tiles: range


def _row_tiles(starts: list[int], contexts: list[int], group: int, window: int | None) -> Iterator[_RowTile]:
    for n, context in enumerate(contexts):
        num_rows = (starts[n + 1] - starts[n]) * group
        first_position = context - (starts[n + 1] - starts[n])
        for row in range(0, num_rows, ROW_TILE):
            first = first_position + row // group
            last = first_position + (min(row + ROW_TILE, num_rows) - 1) // group
            low = 0 if window is None else max(0, first - window + 1) // KEY_TILE * KEY_TILE
            key_tiles = range(low, max(last, low) + 1, KEY_TILE)
            yield _RowTile(n, starts[n], first_position, group, num_rows, row, key_tiles)


def _chunks(tiles: Iterable[_RowTile]) -> Iterator[list[_RowTile]]:
    """Row tiles that are computed by one call: few enough to bound what is gathered."""
    chunk: list[_RowTile] = []
    pairs = 0
    for tile in tiles:
        if chunk and pairs + len(tile.key_tiles) > PAIRS:
            yield chunk
            chunk, pairs = [], 0
        chunk.append(tile)
        pairs += len(tile.key_tiles)
    if chunk:
        yield chunk


class _Work:
    """W row tiles and the P pairs of a row tile with a tile of keys, in order, as index tensors.

    Rows beyond a sequence's last repeat the last, and so write the same result to the same place.
    """

    def __init__(self, tiles: list[_RowTile], paged: PagedKeys) -> None:
        fields = torch.tensor([tile[1:6] for tile in tiles]).T[:, :, None]
        tokens, positions, groups, counts, firsts = fields
        rows_WR = torch.minimum(firsts + torch.arange(ROW_TILE), counts - 1)
        self.tokens_WR = tokens + rows_WR // groups
        self.heads_WR = rows_WR % groups
        self.positions_WR = positions + rows_WR // groups
        self.tiles_P = torch.tensor([w for w, tile in enumerate(tiles) for _ in tile.key_tiles])
        sequences_P1 = torch.tensor([tile.sequence for tile in tiles for _ in tile.key_tiles])[:, None]
        starts_P1 = torch.tensor([start for tile in tiles for start in tile.key_tiles])[:, None]
        self.positions_PC = starts_P1 + torch.arange(KEY_TILE)
        self._written_PC = self.positions_PC < paged.context_lens_N[sequences_P1]
        columns_PC = (self.positions_PC // paged.block_size).clamp_max(paged.block_tables_NB.shape[1] - 1)
        self._blocks_PC = torch.where(self._written_PC, paged.block_tables_NB[sequences_P1, columns_PC], 0)
        self._offsets_PC = self.positions_PC % paged.block_size

    def gathered(self, cache: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
        """[P, C, H, D], zero beyond a sequence's context: what is there may be anything, and 0 * NaN is NaN."""
        rows = cache[self._blocks_PC, self._offsets_PC].to(dtype)
        rows = rows if scale is None else rows * float(scale)
        return rows.masked_fill(~self._written_PC[:, :, None, None], 0)


def _attend(
    q_WHRD: Tensor, keys_PHDC: Tensor, values_PHCD: Tensor, work: _Work, paged: PagedKeys
) -> tuple[Tensor, Tensor]:
    """Output [W, H, R, D] and log-sum-exp [W, H, R].

    Each pair's share is computed alone and the shares of a row tile are added up in order. A key that a row does not
    see adds an exact zero, so it does not matter how many such keys there are, nor what they hold.
    """
    tiles_P = work.tiles_P
    scores_PHRC = q_WHRD[tiles_P] @ keys_PHDC * paged.scale
    if paged.softcap is not None:
        scores_PHRC = paged.softcap * torch.tanh(scores_PHRC / paged.softcap)
    ages_PRC = work.positions_WR[tiles_P][:, :, None] - work.positions_PC[:, None, :]
    hidden_PRC = ages_PRC < 0 if paged.window is None else (ages_PRC < 0) | (ages_PRC >= paged.window)
    scores_PHRC = scores_PHRC.masked_fill(hidden_PRC[:, None], -math.inf)
    peaks_PHR1 = scores_PHRC.amax(-1, keepdim=True)
    peaks_WHR1 = torch.full_like(q_WHRD[..., :1], -math.inf)
    peaks_WHR1.scatter_reduce_(0, tiles_P[:, None, None, None].expand_as(peaks_PHR1), peaks_PHR1, "amax")
    finite_WHR1 = peaks_WHR1.clamp_min(torch.finfo(scores_PHRC.dtype).min)
    weights_PHRC = torch.exp(scores_PHRC - finite_WHR1[tiles_P])
    shares_PHRD = _shares(weights_PHRC, values_PHCD, hidden_PRC)
    out_WHRD = torch.zeros_like(q_WHRD).index_add_(0, tiles_P, shares_PHRD)
    sums_WHR1 = torch.zeros_like(peaks_WHR1).index_add_(0, tiles_P, weights_PHRC.sum(-1, keepdim=True))
    out_WHRD = torch.where(sums_WHR1 == 0, 0.0, out_WHRD / sums_WHR1)  # rows before position 0 see no key
    return out_WHRD, (peaks_WHR1 + sums_WHR1.log()).squeeze(-1)


def _shares(weights_PHRC: Tensor, values_PHCD: Tensor, hidden_PRC: Tensor) -> Tensor:
    """Weighted values [P, H, R, D]; a row that sees a value which is not finite becomes NaN, and no other row."""
    finite_PHC = values_PHCD.isfinite().all(-1)
    if bool(finite_PHC.all()):
        return weights_PHRC @ values_PHCD
    spoiled_PHR1 = (~hidden_PRC[:, None] & ~finite_PHC[:, :, None]).any(-1, keepdim=True)
    shares_PHRD = weights_PHRC @ values_PHCD.masked_fill(~finite_PHC[..., None], 0)
    return shares_PHRD.masked_fill(spoiled_PHR1, torch.nan)


def _by_kv_head(x_TH: Tensor, num_kv_heads: int) -> Tensor:
    """A view [T, G, H, ...] of [T, query heads, ...]."""
    return x_TH.view(len(x_TH), num_kv_heads, x_TH.shape[1] // num_kv_heads, *x_TH.shape[2:]).transpose(1, 2)


def _by_tiles(function: Callable[[Tensor], Tensor], x_T: Tensor) -> Tensor:
    """`function` of ROW_TILE rows at a time, the last tile filled up with zeros."""
    num_rows = len(x_T)
    padding = x_T.new_zeros(-num_rows % ROW_TILE, *x_T.shape[1:])
    tiles = torch.split(torch.cat([x_T, padding]), ROW_TILE)
    return torch.cat([function(tile) for tile in tiles])[:num_rows]
