"""The kernels in plain torch such that a token's result is the same bits in any batch and under any chunking.

A product of matrices rounds by the number of its rows and by the layout of its operands, a softmax by how its keys are
grouped. So rows are computed in tiles of a fixed number, the last one padded, and keys in tiles that begin at fixed
positions of their sequence, added up in order; every operand is contiguous. The promise holds for one machine, one
version of torch and one number of threads. Signatures and shape letters are those of `torch_backend`; R rows of a tile,
P tiles of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels import torch_backend
from schedlab.kernels.dispatch import Kernels
from schedlab.kernels.paged import Gathered, PagedSequence, Scale, groups, sequences

ROW_TILE = 16
KEY_TILE = 64


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
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_NB: Tensor,
    context_lens_N: Tensor,
    query_starts_N1: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_backend.prefill_attention` over tiles of keys that begin at multiples of KEY_TILE."""
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    result = torch.empty_like(q_THD) if out is None else out
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide)
    found = sequences(query_starts_N1.tolist(), context_lens_N.tolist(), window)
    for group in groups([s._replace(first_key=s.first_key // KEY_TILE * KEY_TILE) for s in found]):
        gathered = Gathered(group, block_tables_NB, k_cache.shape[1])
        keys, values = gathered.of(k_cache, wide, k_scale), gathered.of(v_cache, wide, v_scale)
        for sequence, k_HCD, v_HCD in zip(group, keys, values, strict=True):
            rows = slice(sequence.start, sequence.stop)
            if rows.start == rows.stop:
                continue
            keys_HPDC = _key_tiles(k_HCD).transpose(-1, -2).contiguous()
            attention = _Attention(sequence, keys_HPDC, _key_tiles(v_HCD), scale, window, softcap)
            result[rows], lse_TH[rows] = attention.of(q_THD[rows].to(wide))
    return (result, lse_TH) if return_lse else result


def decode_attention(
    q_NHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables_NB: Tensor,
    context_lens_N: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill_attention` with one query a sequence, and so the same bits."""
    starts = torch.arange(len(q_NHD) + 1)
    return prefill_attention(
        q_NHD, k_cache, v_cache, block_tables_NB, context_lens_N, starts, scale=scale, window=window, softcap=softcap,
        k_scale=k_scale, v_scale=v_scale, out=out, return_lse=return_lse,
    )  # fmt: skip


INVARIANT = Kernels(
    "torch-invariant",
    rms_norm=rms_norm,
    rope_kv_write=torch_backend.rope_kv_write,  # products and sums of single elements round alike everywhere
    silu_mul=silu_mul,
    prefill_attention=prefill_attention,
    decode_attention=decode_attention,
    sample=torch_backend.sample,  # row by row
)


class _Attention:
    """One sequence's attention; rows are (position, head of the group) of one key-value head, positions first."""

    def __init__(
        self,
        sequence: PagedSequence,
        keys_HPDC: Tensor,
        values_HPCD: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        self._sequence = sequence
        self._keys_HPDC = keys_HPDC
        self._values_HPCD = values_HPCD
        self._scale = scale
        self._window = window
        self._softcap = softcap

    def of(self, q_LHD: Tensor) -> tuple[Tensor, Tensor]:
        """Output [L, Hq, D] and log-sum-exp [L, Hq] of the sequence's queries."""
        num_queries, num_heads, head_dim = q_LHD.shape
        num_kv_heads = len(self._keys_HPDC)
        group = num_heads // num_kv_heads
        rows_HRD = q_LHD.reshape(num_queries, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
        missing = -rows_HRD.shape[1] % ROW_TILE
        positions = self._sequence.first_row + torch.arange(rows_HRD.shape[1] + missing) // group
        tiles = F.pad(rows_HRD, (0, 0, 0, missing)).split(ROW_TILE, dim=1)
        attended = [self._tile(q, at) for q, at in zip(tiles, positions.split(ROW_TILE), strict=True)]
        outs, lses = (torch.cat(parts, dim=1)[:, : rows_HRD.shape[1]] for parts in zip(*attended, strict=True))
        out_LHD = outs.unflatten(1, (num_queries, group)).transpose(0, 1).reshape(q_LHD.shape)
        return out_LHD, lses.unflatten(1, (num_queries, group)).transpose(0, 1).reshape(num_queries, num_heads)

    def _tile(self, q_HRD: Tensor, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """One tile of rows over the tiles of keys that any of its rows sees.

        Tiles of keys that a row does not see add exact zeros to its sums, so it does not matter how many there are.
        """
        first, last = self._seen(int(positions_R[0]), int(positions_R[-1]))
        keys_HPDC, values_HPCD = self._keys_HPDC[:, first:last], self._values_HPCD[:, first:last]
        scores_HPRC = q_HRD[:, None] @ keys_HPDC * self._scale
        if self._softcap is not None:
            scores_HPRC = self._softcap * torch.tanh(scores_HPRC / self._softcap)
        key_positions = self._sequence.first_key + torch.arange(first * KEY_TILE, last * KEY_TILE)
        ages_PRC = positions_R[:, None] - key_positions.view(-1, 1, KEY_TILE)
        hidden = ages_PRC < 0 if self._window is None else (ages_PRC < 0) | (ages_PRC >= self._window)
        scores_HPRC = scores_HPRC.masked_fill(hidden, -math.inf)
        peaks_H1R1 = scores_HPRC.amax((1, 3), keepdim=True)
        weights_HPRC = torch.exp(scores_HPRC - peaks_H1R1.clamp_min(torch.finfo(scores_HPRC.dtype).min))
        out_HRD = reduce(torch.add, (weights_HPRC @ values_HPCD).unbind(1))
        sums_HR1 = reduce(torch.add, weights_HPRC.sum(-1, keepdim=True).unbind(1))
        out_HRD = torch.where(sums_HR1 > 0, out_HRD / sums_HR1, 0.0)  # rows before position 0 see no key
        return out_HRD, (peaks_H1R1[:, 0] + sums_HR1.log()).squeeze(-1)

    def _seen(self, first_position: int, last_position: int) -> tuple[int, int]:
        """Tiles of keys, counted from the sequence's first gathered one; padding rows lie beyond the last."""
        first_key, window = self._sequence.first_key, self._window
        low = 0 if window is None else max(0, first_position - window + 1 - first_key) // KEY_TILE
        high = (last_position - first_key) // KEY_TILE + 1
        num_tiles = self._keys_HPDC.shape[1]
        return min(low, num_tiles - 1), max(min(high, num_tiles), 1)


def _key_tiles(rows_HCD: Tensor) -> Tensor:
    """[H, P, KEY_TILE, D], the last tile filled up with zeros; at least one tile."""
    missing = -rows_HCD.shape[1] % KEY_TILE if rows_HCD.shape[1] else KEY_TILE
    return F.pad(rows_HCD, (0, 0, 0, missing)).contiguous().unflatten(1, (-1, KEY_TILE))


def _by_tiles(function: Callable[[Tensor], Tensor], x_T: Tensor) -> Tensor:
    """`function` of ROW_TILE rows at a time, the last tile filled up with zeros."""
    num_rows = len(x_T)
    padding = x_T.new_zeros(-num_rows % ROW_TILE, *x_T.shape[1:])
    tiles = torch.cat([x_T, padding]).split(ROW_TILE)
    return torch.cat([function(tile) for tile in tiles])[:num_rows]
