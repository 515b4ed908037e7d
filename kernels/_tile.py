"""What the attention kernels share inside the GPU: a tile of query rows against a range of paged keys.

Knows block tables and the online softmax (Milakov and Gimelshein, 2018; Dao, 2023); not which rows make a tile.
Suffixes: M rows of the tile, N keys of one step, D head size padded to a power of two.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32. The interpreter adds bfloat16 as integers, so there the operands are widened first."""
    if INTERPRETED:
        return acc + tl.dot(a.to(b.dtype).to(tl.float32), b.to(tl.float32))
    else:  # needed: the compiler visits what follows a static if, even one that returns
        precision: tl.constexpr = "tf32x3" if b.dtype == tl.float32 else None
        return tl.dot(a.to(b.dtype), b, acc, input_precision=precision)


@triton.jit
def scale_or_one(scale_ptr):
    if scale_ptr is None:
        return 1.0
    else:
        return tl.load(scale_ptr).to(tl.float32)


@triton.jit
def attend(
    q_MD, acc_MD, peak_M, mass_M, row_positions_M, first_key, last_key,
    k_ptr, v_ptr, table_ptr, context, qk_scale, window, softcap, stride_block, stride_slot,
    MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold keys first_key .. last_key - 1 into the softmax state (acc, peak, mass), BLOCK_N at a time.

    `first_key` is a multiple of BLOCK_N. `qk_scale` times q·k is the score. Peaks are in units of log2. Unless MASKED,
    every row sees every key of the range and the range is whole tiles.
    """
    d_D = tl.arange(0, q_MD.shape[1])
    in_head_D = d_D < HEAD_DIM
    for start in range(first_key, last_key, BLOCK_N):
        keys_N = start + tl.arange(0, BLOCK_N)
        exists_N = keys_N < context
        blocks_N = tl.load(table_ptr + keys_N // BLOCK_SIZE, mask=exists_N, other=0).to(tl.int64)
        offsets_N = blocks_N * stride_block + (keys_N % BLOCK_SIZE) * stride_slot
        mask_DN = exists_N[None, :] & in_head_D[:, None]
        k_DN = tl.load(k_ptr + offsets_N[None, :] + d_D[:, None], mask=mask_DN, other=0.0)
        scores_MN = dot(q_MD, k_DN.to(q_MD.dtype), tl.zeros([q_MD.shape[0], BLOCK_N], tl.float32))
        if softcap is None:
            to_log2 = qk_scale * LOG2_E
        else:
            scores_MN = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores_MN * (2.0 * LOG2_E * qk_scale / softcap))))
            to_log2 = LOG2_E
        if MASKED:
            visible_MN = (keys_N[None, :] <= row_positions_M[:, None]) & exists_N[None, :]
            if window is not None:
                visible_MN &= keys_N[None, :] > row_positions_M[:, None] - window
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_peak_M = tl.maximum(peak_M, tl.max(scores_MN, 1) * to_log2)
        # a row that has seen no key yet has peak -inf, and -inf - -inf is NaN
        base_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M) if MASKED else new_peak_M
        weights_MN = tl.exp2(scores_MN * to_log2 - base_M[:, None])
        decay_M = tl.exp2(peak_M - base_M)
        mass_M = mass_M * decay_M + tl.sum(weights_MN, 1)
        mask_ND = exists_N[:, None] & in_head_D[None, :]
        v_ND = tl.load(v_ptr + offsets_N[:, None] + d_D[None, :], mask=mask_ND, other=0.0)
        acc_MD = dot(weights_MN, v_ND.to(q_MD.dtype), acc_MD * decay_M[:, None])
        peak_M = new_peak_M
    return acc_MD, peak_M, mass_M


@triton.jit
def finish(acc_MD, peak_M, mass_M):
    """The attention output and the log2 of the sum of exponentials; 0 and -inf for a row without keys."""
    empty_M = mass_M == 0.0
    safe_M = tl.where(empty_M, 1.0, mass_M)
    return acc_MD / safe_M[:, None], tl.where(empty_M, float("-inf"), peak_M + tl.log2(safe_M))
