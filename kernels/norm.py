"""RMSNorm, alone or with the residual addition before it: one read of each input, one write of each output."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.kernels import _checks as checks
from schedlab.kernels.configs import padded

TILE = 1024
"""Elements of a tile of short rows; longer rows have a program each."""


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, num_rows, eps,
    stride_x, stride_x_head, stride_residual, stride_out, stride_out_head,
    HEADS: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    rows_R = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    h_H = tl.arange(0, BLOCK_H)
    mask_RH = (rows_R < num_rows)[:, None] & (h_H < HIDDEN)[None, :]
    x_offsets_R = (rows_R // HEADS) * stride_x + (rows_R % HEADS) * stride_x_head
    x_RH = tl.load(x_ptr + x_offsets_R[:, None] + h_H[None, :], mask=mask_RH, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual_RH = tl.load(residual_ptr + rows_R[:, None] * stride_residual + h_H[None, :], mask=mask_RH, other=0.0)
        sum_RH = (x_RH + residual_RH.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + rows_R[:, None] * HIDDEN + h_H[None, :], sum_RH, mask=mask_RH)
        x_RH = sum_RH.to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(x_RH * x_RH, 1) / HIDDEN + eps)
    weight_H = tl.load(weight_ptr + h_H, mask=h_H < HIDDEN, other=0.0).to(tl.float32)
    normed_RH = x_RH * scale_R[:, None] * weight_H[None, :]
    out_offsets_R = (rows_R // HEADS) * stride_out + (rows_R % HEADS) * stride_out_head
    tl.store(out_ptr + out_offsets_R[:, None] + h_H[None, :], normed_RH.to(out_ptr.dtype.element_ty), mask=mask_RH)


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.rms_norm`.

    x [T, H], or [T, heads, H] without a residual; residual [T, H]; weight [H]; out like x, or x itself. bfloat16,
    float16 or float32, all of one type; any strides but in the last dimension, which is contiguous. Raises ValueError.
    """
    op = "rms_norm"
    checks.floats(op, "x", x_TH, 3 if x_TH.ndim == 3 else 2)
    checks.floats(op, "weight", weight_H, 1, like=x_TH)
    checks.shaped(op, "weight", weight_H, x_TH.shape[-1])
    if residual_TH is not None:
        checks.floats(op, "residual", residual_TH, 2, like=x_TH)
        checks.shaped(op, "residual", residual_TH, *x_TH.shape)
    out = checks.output(op, out, x_TH, *x_TH.shape)
    total = None if residual_TH is None else torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    hidden, heads = x_TH.shape[-1], x_TH.shape[1] if x_TH.ndim == 3 else 1
    num_rows, block = x_TH.shape[0] * heads, padded(hidden)
    rows = max(1, TILE // block)
    if num_rows:
        _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x_TH, residual_TH, weight_H, out, total, num_rows, eps,
            x_TH.stride(0), x_TH.stride(1) if x_TH.ndim == 3 else 0,
            0 if residual_TH is None else residual_TH.stride(0),
            out.stride(0), out.stride(1) if out.ndim == 3 else 0,
            HEADS=heads, HIDDEN=hidden, ROWS=rows, BLOCK_H=block, num_warps=min(16, max(1, rows * block // 512)),
        )  # fmt: skip
    return out if total is None else (out, total)
