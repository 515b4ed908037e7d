"""Paged decode attention, split over keys: one query a sequence, the heads of a group as the rows of one tile.

Splits have a fixed size, not a fixed count, and are combined in order, so that a row's bits depend on its sequence
alone. Which program computes a split is free: the grid comes from capacity, lengths are read on the device, and nothing
needs the host, so that a captured CUDA graph serves every later length.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.kernels import _checks as checks
from schedlab.kernels import configs
from schedlab.kernels._tile import LN_2, attend, finish, scale_or_one
from schedlab.kernels.attention import PagedKeys
from schedlab.kernels.configs import DecodeTile

PROGRAMS = 8192
"""Programs to aim for: some waves on a large GPU even when one sequence is far longer than the others."""
COMBINED = 16
"""Splits that are combined at once."""


@triton.jit
def _first_key(context, window, BLOCK_N: tl.constexpr):
    if window is None:
        return 0
    else:
        return tl.maximum(context - window, 0) // BLOCK_N * BLOCK_N


@triton.jit(
    do_not_specialize=["stride_table", "max_splits", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "contexts_ptr"],
)
def _split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, tables_ptr, contexts_ptr, k_scale_ptr,
    scale, window, softcap, max_splits,
    stride_q_token, stride_q_head, stride_block, stride_slot, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts_ptr + n).to(tl.int32)
    start = _first_key(context, window, BLOCK_N)
    first_split = start // SPLIT + tl.program_id(2)
    last_split = tl.cdiv(context, SPLIT)
    if first_split >= last_split:
        return
    rows_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, BLOCK_D)
    heads_M = kv_head * GROUP + rows_M
    valid_M = rows_M < GROUP
    valid_MD = valid_M[:, None] & (d_D < HEAD_DIM)[None, :]
    q_offsets_M = n * stride_q_token + heads_M * stride_q_head
    q_MD = tl.load(q_ptr + q_offsets_M[:, None] + d_D[None, :], mask=valid_MD, other=0.0)
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    table_ptr = tables_ptr + n * stride_table
    qk_scale = scale * scale_or_one(k_scale_ptr)
    positions_M = tl.full([BLOCK_M], 0, tl.int32) + (context - 1)
    rows_of_splits_M = (n * tl.num_programs(0) * GROUP + heads_M) * max_splits
    for split in range(first_split, last_split, tl.num_programs(2)):
        first_key = tl.maximum(split * SPLIT, start)
        last_key = tl.minimum(split * SPLIT + SPLIT, context)
        acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass_M = tl.zeros([BLOCK_M], tl.float32)
        acc_MD, peak_M, mass_M = attend(
            q_MD, acc_MD, peak_M, mass_M, positions_M, first_key, last_key, k_ptr, v_ptr, table_ptr, context,
            qk_scale, window, softcap, stride_block, stride_slot, True, BLOCK_SIZE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        out_MD, lse_M = finish(acc_MD, peak_M, mass_M)
        rows_M64 = rows_of_splits_M + split
        tl.store(partial_ptr + rows_M64[:, None] * HEAD_DIM + d_D[None, :], out_MD, mask=valid_MD)
        tl.store(lse_ptr + rows_M64, lse_M, mask=valid_M)


@triton.jit(do_not_specialize=["max_splits", "window"], do_not_specialize_on_alignment=["contexts_ptr"])
def _combine_kernel(
    partial_ptr, split_lse_ptr, out_ptr, lse_ptr, contexts_ptr, v_scale_ptr, window, max_splits,
    stride_out_token, stride_out_head,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    context = tl.load(contexts_ptr + n).to(tl.int32)
    row = n * tl.num_programs(0) + head
    d_D = tl.arange(0, BLOCK_D)
    in_head_D = d_D < HEAD_DIM
    acc_D = tl.zeros([BLOCK_D], tl.float32)
    peak = float("-inf")
    mass = 0.0
    last_split = tl.cdiv(context, SPLIT)
    for start in range(_first_key(context, window, BLOCK_N) // SPLIT, last_split, CHUNK):
        splits_C = start + tl.arange(0, CHUNK)
        exists_C = splits_C < last_split
        rows_C = row * max_splits + splits_C
        lse_C = tl.load(split_lse_ptr + rows_C, mask=exists_C, other=float("-inf"))
        mask_CD = exists_C[:, None] & in_head_D[None, :]
        partial_CD = tl.load(partial_ptr + rows_C[:, None] * HEAD_DIM + d_D[None, :], mask=mask_CD, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse_C, 0))  # finite: every split that exists holds a visible key
        weights_C = tl.exp2(lse_C - new_peak)
        decay = tl.exp2(peak - new_peak)
        acc_D = acc_D * decay + tl.sum(weights_C[:, None] * partial_CD, 0)
        mass = mass * decay + tl.sum(weights_C, 0)
        peak = new_peak
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    out_D = acc_D / safe * scale_or_one(v_scale_ptr)
    out_offset = n * stride_out_token + head * stride_out_head
    tl.store(out_ptr + out_offset + d_D, out_D.to(out_ptr.dtype.element_ty), mask=in_head_D)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), (peak + tl.log2(safe)) * LN_2))


def decode_workspace(
    num_sequences: int,
    num_heads: int,
    head_dim: int,
    max_context: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Scratch memory for `decode_attention`, to allocate once: float32, for the partial result of every split.

    `max_context` is the capacity of the block tables, blocks * block_size; `dtype` that of the queries.
    """
    splits = triton.cdiv(max_context, configs.decode_tile(head_dim, dtype).split)
    return torch.empty(num_sequences * num_heads * splits * (head_dim + 1), dtype=torch.float32, device=device)


def _scratch(op: str, workspace: Tensor | None, q_NHD: Tensor, max_splits: int) -> tuple[Tensor, Tensor]:
    """Partial outputs [N, H, splits, D] and their log2 sums of exponentials [N, H, splits], within the workspace."""
    rows = q_NHD.shape[0] * q_NHD.shape[1] * max_splits
    needed = rows * (q_NHD.shape[2] + 1)
    if workspace is None:
        workspace = q_NHD.new_empty(needed, dtype=torch.float32)
    if workspace.dtype != torch.float32 or workspace.ndim != 1 or workspace.device != q_NHD.device:
        checks.fail(op, "workspace", f"float32 of one dimension on {q_NHD.device}", checks.describe(workspace))
    if workspace.numel() < needed:
        checks.fail(op, "workspace", f"of at least {needed} elements (see decode_workspace)", workspace.numel())
    partial = workspace[: needed - rows]
    return partial, workspace[needed - rows : needed]


def decode_attention(
    q_NHD: Tensor,
    paged: PagedKeys,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    return_lse: bool = False,
    tile: DecodeTile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.decode_attention`; arguments as those of `attention_prefill.prefill_attention`.

    q_NHD and out [N, H, D]. `workspace` (see `decode_workspace`) must hold the splits of N sequences as long as the
    block tables allow; None allocates it. Safe to capture in a CUDA graph with `out` and `workspace` given: the grid
    depends on shapes only. A row of context length 0 becomes 0. Raises ValueError.
    """
    op = "decode_attention"
    checks.attention(op, q_NHD, paged)
    num_sequences, num_heads, head_dim = q_NHD.shape
    checks.shaped(op, "context_lens", paged.context_lens_N, num_sequences)
    out = checks.output(op, out, q_NHD, *q_NHD.shape)
    k_scale = checks.scale_tensor(op, "k_scale", paged.k_scale, q_NHD.device)
    v_scale = checks.scale_tensor(op, "v_scale", paged.v_scale, q_NHD.device)
    k_cache, tables_NB, num_kv_heads = paged.k_cache, paged.block_tables_NB, paged.num_kv_heads
    tile = tile or configs.decode_tile(head_dim, q_NHD.dtype)
    max_splits = triton.cdiv(tables_NB.shape[1] * paged.block_size, tile.split)
    partial, split_lse = _scratch(op, workspace, q_NHD, max_splits)
    lse = q_NHD.new_empty((num_sequences, num_heads), dtype=torch.float32) if return_lse else None
    if not num_sequences:
        return out if lse is None else (out, lse)
    group, block_d = num_heads // num_kv_heads, configs.padded(head_dim, 16)
    programs = max(1, min(max_splits, triton.cdiv(PROGRAMS, num_sequences * num_kv_heads)))
    _split_kernel[num_kv_heads, num_sequences, programs](
        q_NHD, k_cache, paged.v_cache, partial, split_lse, tables_NB, paged.context_lens_N,
        k_scale, paged.scale, paged.window, paged.softcap, max_splits,
        q_NHD.stride(0), q_NHD.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), tables_NB.stride(0),
        GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=paged.block_size,
        SPLIT=tile.split, BLOCK_M=configs.decode_rows(group), BLOCK_N=tile.block_n, BLOCK_D=block_d,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    _combine_kernel[num_heads, num_sequences](
        partial, split_lse, out, lse, paged.context_lens_N, v_scale, paged.window, max_splits,
        out.stride(0), out.stride(1),
        SPLIT=tile.split, CHUNK=COMBINED, BLOCK_N=tile.block_n, HEAD_DIM=head_dim, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return out if lse is None else (out, lse)
