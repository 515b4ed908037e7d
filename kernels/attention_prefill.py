"""Paged prefill attention: variable lengths, chunks, lower-right causal, grouped query heads, window, soft cap.

One program computes a tile of BLOCK_M rows, each a (token, head of the group) pair of one sequence and one KV head, so
that heads which share keys load them once. Which tiles exist is found on the device; the host reads no length.
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
from schedlab.kernels.configs import PrefillTile


@triton.jit
def _sequence_of(tile, starts_ptr, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that owns a tile: the last n with starts[n] // BLOCK_Q + n <= tile.

    Sequence n's tiles begin there, which leaves room for the partial tile of each sequence before it.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(
    do_not_specialize=["num_sequences", "stride_table", "window"],
    do_not_specialize_on_alignment=["tables_ptr", "contexts_ptr", "starts_ptr"],
)
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tables_ptr, contexts_ptr, starts_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, scale, window, softcap,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_slot, stride_kv_head, stride_table,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see the most keys: longest work first
    kv_head = tl.program_id(1)
    n = _sequence_of(tile, starts_ptr, num_sequences, BLOCK_Q)
    start = tl.load(starts_ptr + n).to(tl.int32)
    length = tl.load(starts_ptr + n + 1).to(tl.int32) - start
    context = tl.load(contexts_ptr + n).to(tl.int32)
    first_query = (tile - start // BLOCK_Q - n) * BLOCK_Q
    if first_query >= length:
        return
    last_query = tl.minimum(first_query + BLOCK_Q, length) - 1
    rows_M = tl.arange(0, BLOCK_M)
    queries_M = first_query + rows_M // GROUP
    heads_M = kv_head * GROUP + rows_M % GROUP
    d_D = tl.arange(0, BLOCK_D)
    valid_M = (rows_M < BLOCK_Q * GROUP) & (queries_M < length)
    valid_MD = valid_M[:, None] & (d_D < HEAD_DIM)[None, :]
    tokens_M = (start + queries_M).to(tl.int64)
    q_MD = tl.load(
        q_ptr + (tokens_M * stride_q_token + heads_M * stride_q_head)[:, None] + d_D[None, :], mask=valid_MD, other=0.0
    )
    positions_M = context - length + queries_M
    low_position = context - length + first_query
    first_key = 0
    if window is not None:
        first_key = tl.maximum(low_position - window + 1, 0) // BLOCK_N * BLOCK_N
    last_key = context - length + last_query + 1
    whole_key = first_key
    if window is None:  # keys that every row sees, in whole tiles
        whole_key = tl.maximum(low_position + 1, 0) // BLOCK_N * BLOCK_N
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass_M = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += kv_head * stride_kv_head
    v_ptr += kv_head * stride_kv_head
    table_ptr = tables_ptr + n.to(tl.int64) * stride_table
    qk_scale = scale * scale_or_one(k_scale_ptr)
    if window is None:
        acc_MD, peak_M, mass_M = attend(
            q_MD, acc_MD, peak_M, mass_M, positions_M, first_key, whole_key, k_ptr, v_ptr, table_ptr, context,
            qk_scale, window, softcap, stride_block, stride_slot, False, BLOCK_SIZE, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
    acc_MD, peak_M, mass_M = attend(
        q_MD, acc_MD, peak_M, mass_M, positions_M, whole_key, last_key, k_ptr, v_ptr, table_ptr, context,
        qk_scale, window, softcap, stride_block, stride_slot, True, BLOCK_SIZE, HEAD_DIM, BLOCK_N,
    )  # fmt: skip
    out_MD, lse_M = finish(acc_MD, peak_M, mass_M)
    out_MD *= scale_or_one(v_scale_ptr)
    out_offsets_M = tokens_M * stride_out_token + heads_M * stride_out_head
    tl.store(out_ptr + out_offsets_M[:, None] + d_D[None, :], out_MD.to(out_ptr.dtype.element_ty), mask=valid_MD)
    if lse_ptr is not None:
        num_heads = tl.num_programs(1) * GROUP
        tl.store(lse_ptr + tokens_M * num_heads + heads_M, lse_M * LN_2, mask=valid_M)


def prefill_attention(
    q_THD: Tensor,
    query_starts_N1: Tensor,
    paged: PagedKeys,
    *,
    out: Tensor | None = None,
    return_lse: bool = False,
    tile: PrefillTile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `reference.prefill_attention`.

    q_THD and out [T, H, D] bfloat16, float16 or float32; caches [num_blocks, block_size, K, D] of that type or
    float8_e4m3fn, k and v of equal strides; any strides but in D, which is contiguous. H is a multiple of K, D <= 256.
    Tables, lengths and starts int32 or int64 on the device of q; table entries past a sequence's length are never read.
    Scales: a number, or one float32 element on the device. `tile` overrides the table of configs.py. Raises ValueError.
    Unlike there, a value that is not finite also spoils those rows of its tile that do not see it.
    """
    op = "prefill_attention"
    checks.attention(op, q_THD, paged)
    k_cache, tables_NB, num_sequences = paged.k_cache, paged.block_tables_NB, len(paged.context_lens_N)
    checks.integers(op, "query_starts", query_starts_N1, q_THD.device, num_sequences + 1)
    checks.query_starts(op, query_starts_N1, len(q_THD))
    out = checks.output(op, out, q_THD, *q_THD.shape)
    num_tokens, num_heads, head_dim = q_THD.shape
    lse = q_THD.new_empty((num_tokens, num_heads), dtype=torch.float32) if return_lse else None
    tile = tile or configs.prefill_tile(head_dim, q_THD.dtype)
    group = num_heads // paged.num_kv_heads
    if group > tile.block_m:
        checks.fail(op, "the group of query heads that share a KV head", f"at most {tile.block_m}", group)
    if num_tokens and num_sequences:
        grid = (num_tokens // (tile.block_m // group) + num_sequences, paged.num_kv_heads)
        _prefill_kernel[grid](
            q_THD, k_cache, paged.v_cache, out, lse, tables_NB, paged.context_lens_N, query_starts_N1,
            checks.scale_tensor(op, "k_scale", paged.k_scale, q_THD.device),
            checks.scale_tensor(op, "v_scale", paged.v_scale, q_THD.device),
            num_sequences, paged.scale, paged.window, paged.softcap,
            q_THD.stride(0), q_THD.stride(1), out.stride(0), out.stride(1),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), tables_NB.stride(0),
            GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=paged.block_size,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_D=configs.padded(head_dim, 16),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return out if lse is None else (out, lse)
