"""Greedy and seeded top-k / top-p sampling without a sort: one program a row finds the least kept logit by bisection.

Noise is a function of (seed, position, vocab id), so that a row's token never depends on the rest of the batch. Knows
nothing of requests; what a token is drawn from is said in `reference.sample`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from schedlab.kernels import _checks as checks
from schedlab.kernels._tile import LOG2_E

SCANNED = 8192
"""Logits looked at a step; a draw, whose noise is float64, takes DRAWN."""
DRAWN = 2048
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _mix64(x):
    x = x + GOLDEN
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel_noise(key, ids_V):
    """`reference.gumbel_noise`, the row's key given: float64."""
    bits_V = _mix64(key + ids_V.to(tl.uint64) * GOLDEN) >> 32
    return -tl.log(-tl.log((bits_V.to(tl.float64) + 0.5) * 2.3283064365386963e-10))


@triton.jit
def _ordered(x):
    """An int64 in the order of the float32 values; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(ordered):
    """The float32 that `_ordered` maps to this."""
    bits = ordered.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _lowest_best(scores_V, ids_V):
    """The lowest id among the lanes of the largest score."""
    return tl.min(tl.where(scores_V == tl.max(scores_V, 0), ids_V, NO_TOKEN), 0)


@triton.jit
def _greedy(row_ptr, vocab, BLOCK: tl.constexpr):
    """The largest logit, the lowest id that has it, and whether the largest is a finite number and no logit is NaN."""
    best_V = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids_V = tl.full([BLOCK], NO_TOKEN, tl.int32)
    nans_V = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids_V = start + tl.arange(0, BLOCK)
        x_V = tl.load(row_ptr + ids_V, mask=ids_V < vocab, other=float("-inf")).to(tl.float32)
        better_V = x_V > best_V
        best_V = tl.where(better_V, x_V, best_V)
        best_ids_V = tl.where(better_V, ids_V, best_ids_V)
        nans_V += (x_V != x_V).to(tl.int32)
    peak = tl.max(best_V, 0)
    finite = (tl.sum(nans_V, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    return peak, _lowest_best(best_V, best_ids_V), finite


@triton.jit
def _total(row_ptr, vocab, least, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Logits from `least` (above -inf) up: their number, or their softmax mass relative to the peak's. float32."""
    total_V = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids_V = start + tl.arange(0, BLOCK)
        x_V = tl.load(row_ptr + ids_V, mask=ids_V < vocab, other=float("-inf")).to(tl.float32)
        if BY_MASS:
            total_V += tl.where(x_V >= least, tl.exp2((x_V - peak) / temperature * LOG2_E), 0.0)
        else:
            total_V += (x_V >= least).to(tl.float32)
    return tl.sum(total_V, 0)


@triton.jit
def _threshold(row_ptr, vocab, least, total, target, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit t >= least from which up the total reaches `target`; the total from t up, and one above t.

    `total` is that from `least` up. The one above t is of all above t, or, where the total from t up is just the
    target, of some of them: what is lacking to the target is then at least what lies at t.
    """
    low = _ordered(least)
    high = _ordered(peak)
    above = peak * 0.0
    while low < high:
        middle = high - (high - low) // 2
        tried = _total(row_ptr, vocab, _value(middle), peak, temperature, BY_MASS, BLOCK)
        if tried >= target:
            low = middle
            total = tried
            if tried == target:
                high = middle
        else:
            high = middle - 1
            above = tried
    return _value(low), total, above


@triton.jit
def _kept(row_ptr, vocab, top_k, top_p, peak, temperature, BLOCK: tl.constexpr):
    """What top-k, then top-p leave: every logit above a value, and so many of the lowest ids at that value."""
    least = peak * 0.0 - float("inf")
    quota = vocab * 1.0
    excess = quota * 0.0
    if (top_k > 0) & (top_k < vocab):
        target = top_k * 1.0
        least, total, above = _threshold(row_ptr, vocab, least, quota, target, peak, temperature, False, BLOCK)
        quota = target - above
        excess = total - target
    if top_p < 1.0:
        mass = _total(row_ptr, vocab, least, peak, temperature, True, BLOCK)
        target = top_p * (mass - excess * tl.exp2((least - peak) / temperature * LOG2_E))
        floor, total, above = _threshold(row_ptr, vocab, least, mass, target, peak, temperature, True, BLOCK)
        needed = tl.ceil((target - above) / tl.exp2((floor - peak) / temperature * LOG2_E))
        quota = tl.where(floor == least, tl.minimum(quota, needed), needed)
        least = floor
    return least, tl.maximum(quota, 1.0)


@triton.jit
def _draw(row_ptr, vocab, least, quota, peak, temperature, key, BLOCK: tl.constexpr):
    """The kept candidate with the largest logit / temperature + noise."""
    best_V = tl.full([BLOCK], float("-inf"), tl.float64)
    best_ids_V = tl.full([BLOCK], NO_TOKEN, tl.int32)
    ties = quota * 0.0
    for start in range(0, vocab, BLOCK):
        ids_V = start + tl.arange(0, BLOCK)
        x_V = tl.load(row_ptr + ids_V, mask=ids_V < vocab, other=float("-inf")).to(tl.float32)
        tie_V = (x_V == least).to(tl.float32)
        kept_V = (x_V > least) | ((tie_V > 0.0) & (ties + tl.cumsum(tie_V, 0) <= quota))
        scores_V = (x_V.to(tl.float64) - peak) / temperature + _gumbel_noise(key, ids_V)
        scores_V = tl.where(kept_V, scores_V, float("-inf"))
        better_V = scores_V > best_V
        best_V = tl.where(better_V, scores_V, best_V)
        best_ids_V = tl.where(better_V, ids_V, best_ids_V)
        ties += tl.sum(tie_V, 0)
    return _lowest_best(best_V, best_ids_V)


PARAMETERS = ["temperatures_ptr", "top_ks_ptr", "top_ps_ptr", "seeds_ptr", "positions_ptr", "tokens_ptr"]


@triton.jit(do_not_specialize_on_alignment=PARAMETERS)
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, seeds_ptr, positions_ptr, tokens_ptr, vocab, stride_row,
    SCANNED: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    temperature = tl.load(temperatures_ptr + row).to(tl.float64)
    peak, token, finite = _greedy(row_ptr, vocab, SCANNED)
    if finite & (temperature > 0.0):
        top_k, top_p = tl.load(top_ks_ptr + row).to(tl.int32), tl.load(top_ps_ptr + row).to(tl.float32)
        rounded = tl.maximum(temperature, 1e-30).to(tl.float32)  # still above 0
        least, quota = _kept(row_ptr, vocab, top_k, top_p, peak, rounded, SCANNED)
        seed, position = tl.load(seeds_ptr + row).to(tl.uint64), tl.load(positions_ptr + row).to(tl.uint64)
        token = _draw(row_ptr, vocab, least, quota, peak, temperature, _mix64(_mix64(seed) + position), DRAWN)
    tl.store(tokens_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def sample(
    logits_SV: Tensor, temperatures_S: Tensor, top_ks_S: Tensor, top_ps_S: Tensor, seeds_S: Tensor, positions_S: Tensor
) -> Tensor:
    """See `reference.sample`.

    logits [S, V] bfloat16, float16 or float32, rows contiguous; temperatures and top_ps [S] float32 or float64; top_ks,
    seeds and positions [S] int32 or int64. Masses are float32 sums: a candidate within about 1e-6 of the top_p boundary
    may fall on either side of it. Raises ValueError.
    """
    op = "sample"
    checks.floats(op, "logits", logits_SV, 2)
    num_rows, vocab = logits_SV.shape
    if not vocab:
        checks.fail(op, "logits", "of at least one column", list(logits_SV.shape))
    for name, x in (("temperatures", temperatures_S), ("top_ps", top_ps_S)):
        checks.parameters(op, name, x, logits_SV.device, num_rows)
    for name, x in (("top_ks", top_ks_S), ("seeds", seeds_S), ("positions", positions_S)):
        checks.integers(op, name, x, logits_SV.device, num_rows)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits_SV, temperatures_S, top_ks_S, top_ps_S, seeds_S, positions_S, tokens, vocab,
            logits_SV.stride(0), SCANNED=SCANNED, DRAWN=DRAWN, num_warps=16,
        )  # fmt: skip
    return tokens
