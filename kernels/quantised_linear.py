"""x @ weight.T + bias where the weight is `Quantised`, for any number of rows, on a GPU.

One kernel, whose tiles differ by the number of rows. It reads integers, makes them weights of the rows' type in
registers (exact in float32, then rounded once) and multiplies on tensor cores into float32. The weights are the left
operand, as an sm_90 takes that one from registers: they are never written anywhere. Up to a tile of rows each is read
once, in the order in which it lies. A matrix with too few columns to occupy the device is then split along its depth,
and a second kernel adds the parts in order, so that results are deterministic.

Many rows take the same kernel rather than a copy of the matrix in 16 bits and the library's product: the copy would be
written and read again at each call and take room that the cache could have.

Knows one matrix, and how it is packed for the kernel. Shape letters as in quantised.py, and T rows of x, P panels of
rows of the matrix, S steps along its depth, N numbers of a byte, W bytes of a row and step, C scales for these.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels import _checks as checks
from schedlab.kernels._tile import dot
from schedlab.kernels.configs import LinearTile, linear_tile
from schedlab.kernels.quantised import Quantised

PANEL = 16
"""Rows of the matrix that lie together."""
BLOCK = 1024
MIDDLE = tl.constexpr(128)
"""What is added to int8 so that no number is negative."""


@triton.jit(do_not_specialize=["num_rows", "num_panels", "num_steps", "steps_per_split"])
def _product_kernel(
    x_ptr, numbers_ptr, scales_ptr, bias_ptr, out_ptr,
    num_rows, columns, depth, num_panels, num_steps, steps_per_split, stride_x, stride_out, stride_split,
    INT4: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    o_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    split = tl.program_id(2)
    w_W = tl.arange(0, WIDTH)
    c_C = tl.arange(0, WIDTH if GROUP < WIDTH else 1)  # where groups change within a step, a scale for each column
    NIBBLES: tl.constexpr = 2 if INT4 else 1
    STEP_BYTES: tl.constexpr = PANEL * WIDTH
    exists_O1 = (o_O < num_panels * PANEL)[:, None]
    exists_1T = (t_T < num_rows)[None, :]
    rows_O = (o_O // PANEL).to(tl.int64) * num_steps * STEP_BYTES + o_O % PANEL * WIDTH
    acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    for step in range(split * steps_per_split, tl.minimum((split + 1) * steps_per_split, num_steps)):
        numbers_ptrs_OW = numbers_ptr + rows_O[:, None] + step * STEP_BYTES + w_W[None, :]
        numbers_OW = tl.load(numbers_ptrs_OW, mask=exists_O1, other=0)
        for part in tl.static_range(NIBBLES):
            first = (step * NIBBLES + part) * WIDTH
            k_W = first + w_W
            x_ptrs_WT = x_ptr + t_T[None, :] * stride_x + k_W[:, None]
            x_WT = tl.load(x_ptrs_WT, mask=exists_1T & (k_W < depth)[:, None], other=0.0)
            groups_1C = ((first + c_C) // GROUP)[None, :]
            if INT4:
                pairs_ptrs_OC = scales_ptr + groups_1C * (num_panels * PANEL) + o_O[:, None]
                pairs_OC = tl.load(pairs_ptrs_OC, mask=exists_O1, other=0)
                scale_OC = (pairs_OC << 16).to(tl.float32, bitcast=True)
                zero_OC = (pairs_OC & -65536).to(tl.float32, bitcast=True)
                weights_OW = (numbers_OW >> (4 * part) & 15).to(tl.float32) * scale_OC + zero_OC
            else:
                pairs_ptrs_OC = scales_ptr + groups_1C // 2 * (num_panels * PANEL) + o_O[:, None]
                pairs_OC = tl.load(pairs_ptrs_OC, mask=exists_O1, other=0)
                scale_OC = (pairs_OC >> groups_1C % 2 * 16 << 16).to(tl.float32, bitcast=True)
                weights_OW = numbers_OW.to(tl.float32) * scale_OC - MIDDLE * scale_OC
            acc_OT = dot(weights_OW, x_WT, acc_OT)
    if bias_ptr is not None:
        acc_OT += tl.load(bias_ptr + o_O, mask=o_O < columns, other=0.0).to(tl.float32)[:, None]
    out_ptrs_OT = out_ptr + split.to(tl.int64) * stride_split + t_T[None, :] * stride_out + o_O[:, None]
    tl.store(out_ptrs_OT, acc_OT.to(out_ptr.dtype.element_ty), mask=(o_O < columns)[:, None] & exists_1T)


@triton.jit(do_not_specialize=["num_splits"])
def _sum_kernel(parts_ptr, bias_ptr, out_ptr, num_splits, columns, stride_split, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_O = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_O = o_O < columns
    part_ptrs_O = parts_ptr + row * columns + o_O
    total_O = tl.zeros([BLOCK], tl.float32)
    for _ in range(num_splits):
        total_O += tl.load(part_ptrs_O, mask=exists_O, other=0.0)
        part_ptrs_O += stride_split
    if bias_ptr is not None:
        total_O += tl.load(bias_ptr + o_O, mask=exists_O, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * columns + o_O, total_O.to(out_ptr.dtype.element_ty), mask=exists_O)


@dataclass(frozen=True, slots=True)
class Panels:
    """A `Quantised` in the order in which the kernel reads it: what a step of a panel takes lies together.

    numbers_PSRW: uint8 [P, S, PANEL, W]. int8 plus MIDDLE: a step has W columns. int4: two to a byte, a step has 2 W
    columns, the first W of them in the low bits. scales: int32 words of two bfloat16, the first in the low bits. int4:
    scale and zero, [groups, P * PANEL]. int8: the scales of two neighbouring groups, [groups / 2, P * PANEL]. What
    fills up steps, panels and words has scale 0.
    """

    numbers_PSRW: Tensor
    scales: Tensor
    columns: int
    depth: int
    group: int
    int4: bool

    @classmethod
    def of(cls, weight: Quantised) -> Panels:
        (columns, depth), int4 = weight.shape, weight.zeros_OG is not None
        nibbles = 2 if int4 else 1
        width = _width(depth, weight.group, nibbles)
        numbers_OK = weight.numbers_OK if int4 else weight.numbers_OK.view(torch.uint8) ^ MIDDLE.value
        padded = F.pad(numbers_OK, (0, -depth % (width * nibbles), 0, -columns % PANEL))
        numbers_PRSNW = padded.view(len(padded) // PANEL, PANEL, -1, nibbles, width)
        packed = numbers_PRSNW[..., 0, :] | numbers_PRSNW[..., 1, :] << 4 if int4 else numbers_PRSNW[..., 0, :]
        scales = _words(weight, *padded.shape)
        return cls(packed.transpose(1, 2).contiguous(), scales, columns, depth, weight.group, int4)

    @property
    def nbytes(self) -> int:
        return self.numbers_PSRW.nbytes + self.scales.nbytes


def _width(depth: int, group: int, nibbles: int) -> int:
    """Bytes of a row and step: 64 where the depth is whole steps then; within a group where that has 16 columns."""
    return min(64 if depth % (64 * nibbles) == 0 else 32, max(group, 16))


def _words(weight: Quantised, rows: int, depth: int) -> Tensor:
    """Of a matrix filled up to this shape."""
    num_groups = -(-depth // weight.group)
    more = num_groups - weight.scales_OG.shape[1]
    if weight.zeros_OG is not None:
        pairs_OG2 = F.pad(torch.stack((weight.scales_OG, weight.zeros_OG), -1), (0, 0, 0, more))
    else:
        pairs_OG2 = F.pad(weight.scales_OG, (0, more + num_groups % 2)).unflatten(1, (-1, 2))
    words_OG = pairs_OG2.contiguous().view(torch.int32)[..., 0]
    return F.pad(words_OG, (0, 0, 0, rows - len(words_OG))).T.contiguous()


def linear(weight: Quantised, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x @ weight.T + bias for x [T, K] of bfloat16, float16 or float32; the result [T, O] is of x's type.

    The weight is packed once, `bias_O` may be of any of these types. Rows of x may be at any distance, each contiguous.
    Looks at no value and allocates nothing but temporaries, so that a graph can hold it. ValueError for another x.
    """
    panels = Panels.of(weight)
    return lambda x_TK: product(x_TK, panels, bias_O)


def product(x_TK: Tensor, weight: Panels, bias_O: Tensor | None = None, *, tile: LinearTile | None = None) -> Tensor:
    """See `linear`. `tile`: another than the table's."""
    op = "linear"
    checks.floats(op, "x", x_TK, 2)
    checks.shaped(op, "x", x_TK, len(x_TK), weight.depth)
    if x_TK.device != weight.scales.device:
        checks.fail(op, "x", f"on {weight.scales.device}", x_TK.device)
    num_rows = len(x_TK)
    out_TO = x_TK.new_empty(num_rows, weight.columns)
    if not num_rows:
        return out_TO
    tile = tile or linear_tile(num_rows, x_TK.dtype)
    num_steps = weight.numbers_PSRW.shape[1]
    steps = triton.cdiv(num_steps, tile.splits(weight.columns, weight.depth))
    splits = triton.cdiv(num_steps, steps)
    if splits == 1:
        _launch(x_TK, weight, bias_O, out_TO[None], steps, tile)
        return out_TO
    parts = x_TK.new_empty(splits, num_rows, weight.columns, dtype=torch.float32)
    _launch(x_TK, weight, None, parts, steps, tile)
    _sum_kernel[num_rows, triton.cdiv(weight.columns, BLOCK)](
        parts, bias_O, out_TO, splits, weight.columns, parts.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return out_TO


def _launch(x_TK: Tensor, weight: Panels, bias_O: Tensor | None, out: Tensor, steps: int, tile: LinearTile) -> None:
    """Rows are the fastest axis of the grid: programs that run together share weights."""
    splits, num_rows, columns = out.shape
    num_panels, num_steps, _, width = weight.numbers_PSRW.shape
    _product_kernel[triton.cdiv(num_rows, tile.block_t), triton.cdiv(columns, tile.block_o), splits](
        x_TK, weight.numbers_PSRW, weight.scales, bias_O, out, num_rows, columns, weight.depth, num_panels, num_steps,
        steps, x_TK.stride(0), out.stride(1), out.stride(0), INT4=weight.int4, GROUP=weight.group, WIDTH=width,
        PANEL=PANEL, BLOCK_O=tile.block_o, BLOCK_T=tile.block_t, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
