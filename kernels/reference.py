"""The specification of every kernel, in plain torch: what each returns, to the last tie.

Arithmetic is float64 throughout and only the result is rounded to the type of the input, so float64 inputs give float64
results to compare with. Knows nothing of speed, tiles or devices; loops over sequences on the host.

Shapes: T tokens of all sequences, N sequences, H query heads, K KV heads, D head size, R half of the rotary size,
B blocks of the widest table, S sampled rows, V vocabulary, I intermediate size. A cache is [num_blocks, block_size, K,
D]; the slot of a token is block * block_size + offset. Integer tensors are int32 or int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from schedlab.kernels.attention import PagedKeys, Scale

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension: x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019).

    x_TH may have more leading dimensions. With `residual_TH`, x + residual is rounded to the type of x, that sum is
    normalised, and (normed, sum) is returned. The inputs are not changed.
    """
    x = x_TH if residual_TH is None else (x_TH.double() + residual_TH.double()).to(x_TH.dtype)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight_H.double()
    result = _into(out, normed.to(x_TH.dtype))
    return result if residual_TH is None else (result, x)


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension and up the second: [T, 2I] -> [T, I]."""
    gate, up = gate_up_T2I.double().chunk(2, dim=-1)
    return _into(out, (torch.nn.functional.silu(gate) * up).to(gate_up_T2I.dtype))


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
    """Rotate Q and K, write rotated K and V to their slots, return rotated Q [T, H, D] (Su et al., 2021).

    The rotation pairs element i with i + R of the first 2R elements of a head; the rest is copied. A token of slot -1
    is rotated and not written. The cache holds x / scale, saturated at ±448 where it is float8_e4m3fn; a scale is a
    number or a tensor of one element.
    """
    keep = slots_T >= 0
    place = slots_T[keep].long() // k_cache.shape[1], slots_T[keep].long() % k_cache.shape[1]
    k_cache[place] = _stored(_rotate(k_TKD, cos_TR, sin_TR)[keep], k_cache.dtype, k_scale)
    v_cache[place] = _stored(v_TKD[keep].double(), v_cache.dtype, v_scale)
    return _rotate(q_THD, cos_TR, sin_TR).to(q_THD.dtype)


def prefill_attention(
    q_THD: Tensor, query_starts_N1: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequence n's queries q[query_starts[n] : query_starts[n + 1]] over its cache, lower-right causal.

    The queries are the last tokens of the sequence: with L of them, query i stands at position context_lens[n] - L + i
    and sees keys 0 .. its own position, within the window. A query that sees no key gives 0. query_starts[N] is T.
    Returns [T, H, D]; with `return_lse` also the natural log of the sum of exponentials, [T, H], -inf without keys.
    """
    out_THD = q_THD.new_zeros(q_THD.shape, dtype=torch.float64)
    lse_TH = q_THD.new_zeros(q_THD.shape[:2], dtype=torch.float64)
    starts = query_starts_N1.tolist()
    for n, (k_CKD, v_CKD) in enumerate(_sequences(paged)):
        rows = slice(starts[n], starts[n + 1])
        out_THD[rows], lse_TH[rows] = _attend(q_THD[rows].double(), k_CKD, v_CKD, paged)
    result = _into(out, out_THD.to(q_THD.dtype))
    return (result, _rounded_lse(lse_TH, q_THD.dtype)) if return_lse else result


def decode_attention(
    q_NHD: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`prefill_attention` with one query a sequence; a context length of 0 (padding) gives a row of 0."""
    return prefill_attention(q_NHD, torch.arange(len(q_NHD) + 1), paged, out=out, return_lse=return_lse)


def sample(
    logits_SV: Tensor, temperatures_S: Tensor, top_ks_S: Tensor, top_ps_S: Tensor, seeds_S: Tensor, positions_S: Tensor
) -> Tensor:
    """Draw one token id a row, int64 [S], from (logits, temperature, top_k, top_p, seed, position) of that row alone.

    Temperature 0 takes the largest logit, the lowest id on a tie. Otherwise candidates are ordered by (logit down, id
    up); the first top_k stay (0, negative or >= V: all); of those, with softmax(logits / temperature) renormalised over
    them, the ones before which less than top_p of the mass lies (always one; >= 1: all). Of what stays, the largest
    logit / temperature + gumbel_noise wins (Gumbel-max: a draw from the softmax). A logit of -inf is never drawn.
    A row whose largest logit is not finite (NaN or +inf anywhere, or -inf everywhere) yields -1.
    """
    logits = logits_SV.double()
    peak_S1 = logits.amax(-1, keepdim=True)
    hot_S1 = temperatures_S.double()[:, None]
    scaled = (logits - peak_S1) / torch.where(hot_S1 > 0, hot_S1, 1.0)
    ids_V = torch.arange(logits.shape[-1], device=logits.device)
    noise = gumbel_noise(seeds_S[:, None], positions_S[:, None], ids_V)
    scores = torch.where(_kept(scaled, top_ks_S, top_ps_S), scaled + noise, -math.inf)
    tokens = torch.where(hot_S1 > 0, scores, logits).argmax(-1)
    return torch.where(peak_S1[:, 0].isfinite(), tokens, -1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float64, a function of (seed, position, vocab id) alone; the arguments broadcast.

    The random bits are exact on every backend: 64-bit integers modulo 2⁶⁴, `mix64` below, GOLDEN = 0x9E3779B97F4A7C15,
        key  = mix64(mix64(seed) + position)
        bits = mix64(key + id * GOLDEN) >> 32
        noise = -log(-log((bits + 0.5) / 2³²))      in float64
    """
    key = mix64(mix64(seeds.long()) + positions.long())
    bits = _shift_right(mix64(key + vocab_ids.long() * GOLDEN), 32)
    return -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-32))


def mix64(x: Tensor) -> Tensor:
    """One step of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit integers, held in int64."""
    x = x + GOLDEN
    x = (x ^ _shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift of the 64 bits, where `>>` copies the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _scale(scale: Scale) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale.double().reshape(())
    return 1.0 if scale is None else scale


def _stored(x: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    x = x / _scale(scale)
    return (x.clamp(-FLOAT8_MAX, FLOAT8_MAX) if dtype == FLOAT8 else x).to(dtype)


def _rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    half = cos_TR.shape[-1]
    x_THD = x_THD.double()
    low, high, tail = x_THD[..., :half], x_THD[..., half : 2 * half], x_THD[..., 2 * half :]
    cos, sin = cos_TR.double()[:, None], sin_TR.double()[:, None]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, tail], dim=-1)


def _rounded_lse(lse_TH: Tensor, dtype: torch.dtype) -> Tensor:
    return lse_TH if dtype == torch.float64 else lse_TH.float()


def _sequences(paged: PagedKeys) -> Iterator[tuple[Tensor, Tensor]]:
    """Each sequence's keys and values in order, float64 [context, K, D]; entries beyond its length are not read."""
    for table, length in zip(paged.block_tables_NB, paged.context_lens_N.tolist(), strict=True):
        blocks = table[: math.ceil(length / paged.block_size)].long()
        yield (
            paged.k_cache[blocks].flatten(0, 1)[:length].double() * _scale(paged.k_scale),
            paged.v_cache[blocks].flatten(0, 1)[:length].double() * _scale(paged.v_scale),
        )


def _attend(q_LHD: Tensor, k_CKD: Tensor, v_CKD: Tensor, paged: PagedKeys) -> tuple[Tensor, Tensor]:
    """One sequence, float64: (out [L, H, D], lse [L, H])."""
    length, heads, _ = q_LHD.shape
    context, kv_heads, _ = k_CKD.shape
    k_CHD = k_CKD.repeat_interleave(heads // kv_heads, dim=1)
    v_CHD = v_CKD.repeat_interleave(heads // kv_heads, dim=1)
    scores_HLC = torch.einsum("lhd,chd->hlc", q_LHD, k_CHD) * paged.scale
    if paged.softcap is not None:
        scores_HLC = paged.softcap * torch.tanh(scores_HLC / paged.softcap)
    keys_C = torch.arange(context, device=q_LHD.device)
    ages_LC = (context - length + torch.arange(length, device=q_LHD.device))[:, None] - keys_C
    visible = (ages_LC >= 0) if paged.window is None else (ages_LC >= 0) & (ages_LC < paged.window)
    scores_HLC = scores_HLC.masked_fill(~visible, -math.inf)
    weights_HLC = torch.where(visible, scores_HLC.softmax(-1), 0.0)
    return _weighted(weights_HLC, v_CHD, visible), scores_HLC.logsumexp(-1).T


def _weighted(weights_HLC: Tensor, v_CHD: Tensor, visible_LC: Tensor) -> Tensor:
    """[L, H, D]; a value that a query does not see has no part in its sum, be it NaN."""
    if v_CHD.isfinite().all():
        return torch.einsum("hlc,chd->lhd", weights_HLC, v_CHD)
    out_LHD = v_CHD.new_zeros(len(visible_LC), *v_CHD.shape[1:])
    for query, seen_C in enumerate(visible_LC):
        out_LHD[query] = torch.einsum("hc,chd->hd", weights_HLC[:, query, seen_C], v_CHD[seen_C])
    return out_LHD


def _kept(scaled_SV: Tensor, top_ks_S: Tensor, top_ps_S: Tensor) -> Tensor:
    """Which candidates survive top-k, then top-p: bool [S, V]."""
    vocab = scaled_SV.shape[-1]
    order = scaled_SV.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, device=scaled_SV.device)
    top_ks = torch.where(top_ks_S > 0, top_ks_S, vocab)[:, None]
    ordered = scaled_SV.gather(-1, order).masked_fill(ranks >= top_ks, -math.inf)
    mass = torch.softmax(ordered, dim=-1)
    before = mass.cumsum(-1) - mass
    top_ps = top_ps_S.double()[:, None]
    keep = (ordered > -math.inf) & ((ranks == 0) | (top_ps >= 1) | (before < top_ps))
    return torch.zeros_like(keep).scatter(-1, order, keep)
