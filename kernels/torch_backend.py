"""The kernels in plain torch, for CPUs: a loop over sequences, one gather of blocks each, SDPA on grouped rows.

Knows paged keys and values, not models. Same signatures as the other backends. Shape letters: T tokens of all
sequences, N sequences, H hidden or heads (Hq query heads, Hkv key-value heads, G = Hq / Hkv), D head size, R rotated
pairs, I intermediate, B blocks a row of the table, S rows of logits, V vocabulary, L query and C key rows of one
sequence. Caches are [num_blocks, block_size, Hkv, D]. Arithmetic that decides precision (norms, rotation, softmax) runs
in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels.attention import PagedKeys, Scale
from schedlab.kernels.paged import Gathered, PagedSequence, groups, padded, sequences

_MASK64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
QUERY_TILE = 128
"""Query rows attended at once in prefill: keys beyond a tile's last row are never touched, and masks stay small."""


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; with a residual also returns x + residual.

    With `residual_TH` the norm is taken of the sum: returns (normed, x + residual). arXiv:1910.07467.
    """
    if residual_TH is not None:
        x_TH = x_TH + residual_TH
    result = _into(out, F.rms_norm(x_TH, weight_H.shape, weight_H, eps))
    return result if residual_TH is None else (result, x_TH)


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up of [T, 2I], gate first: [T, I]."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return _into(out, F.silu(gate).mul_(up))


def rope_kv_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots, return the rotated queries.

    The first 2R of the D lanes rotate as halves (lane i with lane R + i), the rest pass through. Slot = block *
    block_size + offset; a token of slot -1 is rotated but not written.
    """
    turned = rotate(torch.cat([q_THD, k_TKD], dim=1), cos_TR, sin_TR)
    out_THD, keys_TKD = turned.split_with_sizes([q_THD.shape[1], k_TKD.shape[1]], dim=1)
    kept = slots_T >= 0
    if not bool(kept.all()):
        slots_T, keys_TKD, v_TKD = slots_T[kept], keys_TKD[kept], v_TKD[kept]
    _write(k_cache, slots_T, keys_TKD, k_scale)
    _write(v_cache, slots_T, v_TKD, v_scale)
    return out_THD


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotary position embedding in the half-split form, arXiv:2104.09864: x * cos + (x with its halves swapped) * ±sin.

    Few operations, as those on a decode's rows cost their start.
    """
    wide, pairs = _wide(x_THD.dtype), cos_TR.shape[-1]
    cos = torch.cat([cos_TR, cos_TR], dim=-1).to(wide).unsqueeze(1)
    sin = torch.cat([-sin_TR, sin_TR], dim=-1).to(wide).unsqueeze(1)
    turning = x_THD[..., : 2 * pairs].to(wide)
    rotated = torch.addcmul(turning * cos, turning.roll(pairs, -1), sin).to(x_THD.dtype)
    return rotated if 2 * pairs == x_THD.shape[-1] else torch.cat([rotated, x_THD[..., 2 * pairs :]], dim=-1)


def prefill_attention(
    q_THD: Tensor, query_starts_N1: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of each sequence's last queries over its cached keys, its own included.

    Query i of sequence n stands at position context - queries + i and sees the keys up to it, within the window.
    Returns [T, Hq, D], with `return_lse` also the natural log-sum-exp of the scores, [T, Hq]. A row without keys is 0,
    its lse -inf.
    """
    result = torch.empty_like(q_THD) if out is None else out
    lse = q_THD.new_empty(q_THD.shape[:2], dtype=_wide(q_THD.dtype)) if return_lse else None
    for group in groups(sequences(query_starts_N1.tolist(), paged.context_lens_N.tolist(), paged.window)):
        gathered = Gathered(group, paged.block_tables_NB, paged.block_size)
        keys = gathered.of(paged.k_cache, q_THD.dtype, paged.k_scale)
        values = gathered.of(paged.v_cache, q_THD.dtype, paged.v_scale)
        for sequence, k_HCD, v_HCD in zip(group, keys, values, strict=True):
            rows = slice(sequence.start, sequence.stop)
            rows_lse = None if lse is None else lse[rows]
            _attend_sequence(q_THD[rows], k_HCD, v_HCD, sequence, paged, result[rows], rows_lse)
    return result if lse is None else (result, lse)


def decode_attention(
    q_NHD: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill_attention` with one query a sequence."""
    if paged.softcap is not None or return_lse:
        return prefill_attention(q_NHD, torch.arange(len(q_NHD) + 1), paged, out=out, return_lse=return_lse)
    result = torch.empty_like(q_NHD) if out is None else out
    q_NKGD = q_NHD.reshape(len(q_NHD), paged.num_kv_heads, -1, q_NHD.shape[-1])
    for group in padded(paged.block_tables_NB, paged.context_lens_N, paged.window, paged.block_size, q_NHD.dtype):
        if not group.high:
            result[group.rows_G] = 0
            continue
        keys = group.of(paged.k_cache, q_NHD.dtype, paged.k_scale)
        values = group.of(paged.v_cache, q_NHD.dtype, paged.v_scale)
        attended_GKGD = F.scaled_dot_product_attention(
            q_NKGD[group.rows_G], keys, values, attn_mask=group.mask_G11C, scale=paged.scale
        )
        result[group.rows_G] = attended_GKGD.flatten(1, 2)
    return result


def sample(
    logits_SV: Tensor,
    temperatures_S: Tensor,
    top_ks_S: Tensor,
    top_ps_S: Tensor,
    seeds_S: Tensor,
    positions_S: Tensor,
) -> Tensor:
    """One token a row, int64 [S]: a function of the row, its parameters, its seed and its position only.

    Temperature 0 takes the lowest index of the maximum. Otherwise exactly the `top_k` largest logits stay (0: all; of
    equal ones the lowest ids), of these the smallest set of the likeliest that reaches `top_p`, and the draw is the
    maximum of logit / temperature + Gumbel noise. A row whose maximum is not finite (NaN or inf in it) yields -1.
    """
    peaks_S, tokens = logits_SV.max(dim=-1)
    tokens = torch.where(peaks_S.isfinite(), tokens, -1)
    for row in torch.nonzero((temperatures_S > 0) & (tokens >= 0)).flatten().tolist():
        scores_V = (logits_SV[row].double() - peaks_S[row].double()) / float(temperatures_S[row])
        scores_K, ids_K = _candidates(scores_V, int(top_ks_S[row]), float(top_ps_S[row]))
        noise_K = gumbel_noise(int(seeds_S[row]), int(positions_S[row]), ids_K)
        tokens[row] = ids_K[(scores_K + noise_K).argmax()]
    return tokens


def gumbel_noise(seed: int, position: int, ids_K: Tensor) -> Tensor:
    """Standard Gumbel noise, float64 [K], one value for each (seed, position, vocabulary id).

    splitmix64 (Steele, Lea and Flood 2014) of the three; the upper 32 bits make the uniform variate.
    """
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.full(1, seed & _MASK64, dtype=np.uint64)) + np.uint64(position & _MASK64))
        bits = _mix(key + ids_K.numpy().astype(np.uint64) * _GOLDEN) >> np.uint64(32)
    uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-32)
    return -torch.log(-torch.log(uniform))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def _candidates(scores_V: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Scores and vocabulary ids that top-k, then top-p leave."""
    if not 0 < top_k < len(scores_V) and top_p >= 1:
        return scores_V, torch.arange(len(scores_V))
    scores_K, ids_K = scores_V.sort(descending=True, stable=True)
    if top_k > 0:
        scores_K, ids_K = scores_K[:top_k], ids_K[:top_k]
    if top_p < 1:
        mass_K = scores_K.softmax(-1)
        count = max(1, int((mass_K.cumsum(-1) - mass_K < top_p).sum()))
        scores_K, ids_K = scores_K[:count], ids_K[:count]
    return scores_K, ids_K


def _attend_sequence(
    q_LHD: Tensor,
    keys_HCD: Tensor,
    values_HCD: Tensor,
    sequence: PagedSequence,
    paged: PagedKeys,
    out_LHD: Tensor,
    lse_LH: Tensor | None,
) -> None:
    """Attend one sequence's queries to the keys from `first_key` on, tile by tile."""
    keyless = max(0, -sequence.first_row)  # rows before position 0 are padding
    out_LHD[:keyless] = 0
    if lse_LH is not None:
        lse_LH[:keyless] = -math.inf
    for start in range(keyless, len(q_LHD), QUERY_TILE):
        rows = range(start, min(start + QUERY_TILE, len(q_LHD)))
        _attend_rows(rows, q_LHD, keys_HCD, values_HCD, sequence, paged, out_LHD, lse_LH)


def _attend_rows(
    rows: range,
    q_LHD: Tensor,
    keys_HCD: Tensor,
    values_HCD: Tensor,
    sequence: PagedSequence,
    paged: PagedKeys,
    out_LHD: Tensor,
    lse_LH: Tensor | None,
) -> None:
    """Attend `rows` at once; again by halves if a result is not finite, as a key hidden from a row may be why.

    A hidden key has weight 0, and 0 * NaN is NaN. A single row is given no key that it does not see.
    """
    first_position = sequence.first_row + rows.start
    low = 0 if paged.window is None else max(0, first_position - paged.window + 1 - sequence.first_key)
    high = sequence.first_row + rows.stop - sequence.first_key
    keys, values, at = keys_HCD[:, low:high], values_HCD[:, low:high], slice(rows.start, rows.stop)
    if lse_LH is None and paged.softcap is None:
        out_LHD[at] = _sdpa(q_LHD[at], keys, values, paged.scale, paged.window)
    else:
        out_LHD[at] = _explicit(q_LHD[at], keys, values, paged, None if lse_LH is None else lse_LH[at])
    if len(rows) > 1 and not bool(out_LHD[at].isfinite().all()):
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            _attend_rows(half, q_LHD, keys_HCD, values_HCD, sequence, paged, out_LHD, lse_LH)


def _visible(rows: int, keys: int, window: int | None) -> Tensor | None:
    """bool [rows, keys], lower-right aligned, or None if every row sees every key."""
    if rows == 1:
        return None  # the caller has cut the keys to what this row sees
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return visible if window is None else visible.triu(keys - rows - window + 1)


def _sdpa(q_LHD: Tensor, keys_HCD: Tensor, values_HCD: Tensor, scale: float, window: int | None) -> Tensor:
    """Group heads become rows for a single query, and a broadcast dimension for many: keys are never repeated."""
    num_kv_heads, num_keys, head_dim = keys_HCD.shape
    num_rows = len(q_LHD)
    if num_rows == 1:
        q = q_LHD.reshape(1, num_kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(q, keys_HCD[None], values_HCD[None], scale=scale).reshape(q_LHD.shape)
    q = q_LHD.reshape(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, q.shape[1], num_keys, head_dim)
    mask = _visible(num_rows, num_keys, window)
    out = F.scaled_dot_product_attention(
        q, keys_HCD[:, None].expand(shape), values_HCD[:, None].expand(shape), attn_mask=mask, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(q_LHD.shape)


def _explicit(q_LHD: Tensor, keys_HCD: Tensor, values_HCD: Tensor, paged: PagedKeys, lse_LH: Tensor | None) -> Tensor:
    """The same with the scores at hand, for a softcap or the log-sum-exp."""
    num_kv_heads, num_keys, head_dim = keys_HCD.shape
    num_rows, wide = len(q_LHD), _wide(q_LHD.dtype)
    q = q_LHD.reshape(num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).to(wide)
    scores_HGLC = q @ keys_HCD[:, None].transpose(-1, -2).to(wide) * paged.scale
    if paged.softcap is not None:
        scores_HGLC = paged.softcap * torch.tanh(scores_HGLC / paged.softcap)
    if (visible := _visible(num_rows, num_keys, paged.window)) is not None:
        scores_HGLC = scores_HGLC.masked_fill(~visible, -math.inf)
    out = scores_HGLC.softmax(-1) @ values_HCD[:, None].to(wide)
    if lse_LH is not None:
        lse_LH.copy_(scores_HGLC.logsumexp(-1).permute(2, 0, 1).reshape(num_rows, -1))
    return out.permute(2, 0, 1, 3).reshape(q_LHD.shape).to(q_LHD.dtype)


def _write(cache: Tensor, slots_T: Tensor, rows_THD: Tensor, scale: Scale) -> None:
    if scale is not None:
        rows_THD = rows_THD / float(scale)
    if cache.dtype.itemsize == 1:
        limit = torch.finfo(cache.dtype).max
        rows_THD = rows_THD.clamp(-limit, limit)  # a cast beyond the range would give NaN
    rows_THD = rows_THD.to(cache.dtype)
    if cache.is_contiguous() and cache.dtype.itemsize > 1:
        cache.view(-1, *rows_THD.shape[1:]).index_copy_(0, slots_T, rows_THD)
    else:
        block_size = cache.shape[1]
        cache[slots_T // block_size, slots_T % block_size] = rows_THD


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
