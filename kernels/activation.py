"""SiLU(gate) * up on the packed output of one matrix product: gate is the first half of a row, up the second."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from schedlab.kernels import _checks as checks

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, size, stride_row, stride_out, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_I = i_I < size
    gate_I = tl.load(gate_up_ptr + row * stride_row + i_I, mask=mask_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up_ptr + row * stride_row + size + i_I, mask=mask_I, other=0.0).to(tl.float32)
    out_I = gate_I / (1.0 + tl.exp(-gate_I)) * up_I
    tl.store(out_ptr + row * stride_out + i_I, out_I.to(out_ptr.dtype.element_ty), mask=mask_I)


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `reference.silu_mul`.

    gate_up [T, 2I], out [T, I], bfloat16, float16 or float32 of one type; rows contiguous, at any stride.
    Raises ValueError.
    """
    op = "silu_mul"
    checks.floats(op, "gate_up", gate_up_T2I, 2)
    num_rows, width = gate_up_T2I.shape
    if width % 2:
        checks.fail(op, "gate_up", "of an even width, gate and up", width)
    out = checks.output(op, out, gate_up_T2I, num_rows, width // 2)
    if out.numel():
        _silu_mul_kernel[num_rows, triton.cdiv(width // 2, BLOCK)](
            gate_up_T2I, out, width // 2, gate_up_T2I.stride(0), out.stride(0), BLOCK=BLOCK, num_warps=4
        )
    return out
