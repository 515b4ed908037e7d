"""Rotary embedding of queries and keys, and the write of keys and values to their slots: one program a token."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.kernels import _checks as checks
from schedlab.kernels._tile import scale_or_one
from schedlab.kernels.attention import Scale
from schedlab.kernels.configs import padded
from schedlab.kernels.reference import FLOAT8_MAX

LARGEST = tl.constexpr(FLOAT8_MAX)


@triton.jit
def _cast(x, scale, dtype: tl.constexpr):
    """x / scale in the type of the cache; float8 saturates, as a cast beyond its range would give NaN."""
    x = x / scale
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _rotate_heads(
    x_ptr, out_ptr, cos_R, sin_R, scale, stride_x_head, stride_out_head,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token from x to out, and copy what lies beyond the rotary part of a head."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    heads_H = tl.arange(0, BLOCK_H)[:, None]
    r_R = tl.arange(0, BLOCK_R)[None, :]
    mask_HR = (heads_H < HEADS) & (r_R < HALF)
    x_HR = x_ptr + heads_H * stride_x_head + r_R
    out_HR = out_ptr + heads_H * stride_out_head + r_R
    low_HR = tl.load(x_HR, mask=mask_HR, other=0.0).to(tl.float32)
    high_HR = tl.load(x_HR + HALF, mask=mask_HR, other=0.0).to(tl.float32)
    tl.store(out_HR, _cast(low_HR * cos_R - high_HR * sin_R, scale, dtype), mask=mask_HR)
    tl.store(out_HR + HALF, _cast(high_HR * cos_R + low_HR * sin_R, scale, dtype), mask=mask_HR)
    if HEAD_DIM > 2 * HALF:
        d_D = 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, :]
        mask_HD = (heads_H < HEADS) & (d_D < HEAD_DIM)
        tail_HD = tl.load(x_ptr + heads_H * stride_x_head + d_D, mask=mask_HD, other=0.0).to(tl.float32)
        tl.store(out_ptr + heads_H * stride_out_head + d_D, _cast(tail_HD, scale, dtype), mask=mask_HD)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _rope_kv_write_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scale_ptr, v_scale_ptr,
    stride_q, stride_q_head, stride_k, stride_k_head, stride_v, stride_v_head, stride_cos,
    stride_block, stride_slot, stride_cache_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_TAIL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    r_R = tl.arange(0, BLOCK_R)
    cos_R = tl.load(cos_ptr + token * stride_cos + r_R, mask=r_R < HALF, other=0.0).to(tl.float32)[None, :]
    sin_R = tl.load(sin_ptr + token * stride_cos + r_R, mask=r_R < HALF, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        q_ptr + token * stride_q, out_ptr + token * Q_HEADS * HEAD_DIM, cos_R, sin_R, 1.0, stride_q_head, HEAD_DIM,
        Q_HEADS, HALF, HEAD_DIM, BLOCK_Q, BLOCK_R, BLOCK_TAIL,
    )  # fmt: skip
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot
        _rotate_heads(
            k_ptr + token * stride_k, k_cache_ptr + place, cos_R, sin_R, scale_or_one(k_scale_ptr),
            stride_k_head, stride_cache_head, KV_HEADS, HALF, HEAD_DIM, BLOCK_KV, BLOCK_R, BLOCK_TAIL,
        )  # fmt: skip
        heads_H = tl.arange(0, BLOCK_KV)[:, None]
        d_D = tl.arange(0, BLOCK_D)[None, :]
        mask_HD = (heads_H < KV_HEADS) & (d_D < HEAD_DIM)
        v_HD = tl.load(v_ptr + token * stride_v + heads_H * stride_v_head + d_D, mask=mask_HD, other=0.0).to(tl.float32)
        v_HD = _cast(v_HD, scale_or_one(v_scale_ptr), v_cache_ptr.dtype.element_ty)
        tl.store(v_cache_ptr + place + heads_H * stride_cache_head + d_D, v_HD, mask=mask_HD)


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
    """See `reference.rope_kv_write`.

    q [T, H, D], k and v [T, K, D] bfloat16, float16 or float32 of one type, views of a packed product included; cos and
    sin [T, R] of any of these types, equal strides; caches as in `attention_prefill.prefill_attention`; slots [T] int32
    or int64, unique but for -1. Returns a new contiguous [T, H, D]. Raises ValueError.
    """
    op = "rope_kv_write"
    checks.floats(op, "q", q_THD, 3)
    checks.caches(op, q_THD, k_cache, v_cache)
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads, half = k_cache.shape[2], cos_TR.shape[-1]
    for name, x in (("k", k_TKD), ("v", v_TKD)):
        checks.floats(op, name, x, 3, like=q_THD)
        checks.shaped(op, name, x, num_tokens, num_kv_heads, head_dim)
    checks.rotation(op, cos_TR, sin_TR, q_THD)
    checks.integers(op, "slots", slots_T, q_THD.device, num_tokens)
    checks.slots(op, slots_T, k_cache)
    out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if num_tokens:
        _rope_kv_write_kernel[(num_tokens,)](
            q_THD, k_TKD, v_TKD, cos_TR, sin_TR, out, k_cache, v_cache, slots_T,
            checks.scale_tensor(op, "k_scale", k_scale, q_THD.device),
            checks.scale_tensor(op, "v_scale", v_scale, q_THD.device),
            q_THD.stride(0), q_THD.stride(1), k_TKD.stride(0), k_TKD.stride(1), v_TKD.stride(0), v_TKD.stride(1),
            cos_TR.stride(0), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            Q_HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=half, HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1],
            BLOCK_Q=padded(num_heads), BLOCK_KV=padded(num_kv_heads), BLOCK_R=padded(half), BLOCK_D=padded(head_dim),
            BLOCK_TAIL=padded(max(1, head_dim - 2 * half)), num_warps=4,
        )  # fmt: skip
    return out
