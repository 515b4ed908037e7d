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

BLOCK = 2048
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
    """int32 in the order of the float32 values; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load(row_ptr, ids_V, vocab):
    return tl.load(row_ptr + ids_V, mask=ids_V < vocab, other=float("-inf")).to(tl.float32)


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
        x_V = _load(row_ptr, ids_V, vocab)
        better_V = x_V > best_V
        best_V = tl.where(better_V, x_V, best_V)
        best_ids_V = tl.where(better_V, ids_V, best_ids_V)
        nans_V += (x_V != x_V).to(tl.int32)
    peak = tl.max(best_V, 0)
    finite = (tl.sum(nans_V, 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    return peak, _lowest_best(best_V, best_ids_V), finite


@triton.jit
def _weight(x, peak, temperature):
    """Softmax mass relative to the peak's, float32."""
    return tl.exp2((x - peak) / temperature * LOG2_E)


@triton.jit
def _total(row_ptr, vocab, least, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Candidates from the ordered value `least` up: their number, or their softmax mass relative to the peak's."""
    total_V = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        ids_V = start + tl.arange(0, BLOCK)
        x_V = _load(row_ptr, ids_V, vocab)
        kept_V = (_ordered(x_V) >= least) & (ids_V < vocab)
        weights_V = _weight(x_V, peak, temperature) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
        total_V += tl.where(kept_V, weights_V, 0.0)
    return tl.sum(total_V, 0)


@triton.jit
def _threshold(row_ptr, vocab, low, target, peak, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest ordered value t >= low from which up the total reaches `target`, and the total above t."""
    low = low.to(tl.int64)
    high = _ordered(peak).to(tl.int64)
    above = peak * 0.0
    while low < high:
        middle = high - (high - low) // 2
        total = _total(row_ptr, vocab, middle, peak, temperature, BY_MASS, BLOCK)
        if total >= target:
            low = middle
        else:
            high = middle - 1
            above = total
    return low.to(tl.int32), above


@triton.jit
def _kept(row_ptr, vocab, top_k, top_p, peak, temperature, BLOCK: tl.constexpr):
    """What top-k, then top-p leave: all above an ordered value, and so many of the lowest ids at that value."""
    least = _ordered(peak * 0.0 - float("inf"))
    quota = vocab * 1.0
    if (top_k > 0) & (top_k < vocab):
        least, above = _threshold(row_ptr, vocab, least, top_k * 1.0, peak, temperature, False, BLOCK)
        quota = top_k * 1.0 - above
    if top_p < 1.0:
        mass = _total(row_ptr, vocab, least.to(tl.int64) + 1, peak, temperature, True, BLOCK)
        mass += quota * _weight(_value(least), peak, temperature)
        floor, above = _threshold(row_ptr, vocab, least, top_p * mass, peak, temperature, True, BLOCK)
        needed = tl.ceil((top_p * mass - above) / _weight(_value(floor), peak, temperature))
        quota = tl.where(floor == least, tl.minimum(quota, needed), needed)
        least = floor
    return least, tl.maximum(quota, 1.0).to(tl.int32)


@triton.jit
def _value(ordered):
    """The float32 that `_ordered` maps to this."""
    return tl.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _draw(row_ptr, vocab, least, quota, peak, temperature, key, BLOCK: tl.constexpr):
    """The kept candidate with the largest logit / temperature + noise."""
    best_V = tl.full([BLOCK], float("-inf"), tl.float64)
    best_ids_V = tl.full([BLOCK], NO_TOKEN, tl.int32)
    ties = quota * 0
    for start in range(0, vocab, BLOCK):
        ids_V = start + tl.arange(0, BLOCK)
        x_V = _load(row_ptr, ids_V, vocab)
        ordered_V = _ordered(x_V)
        tie_V = ((ordered_V == least) & (ids_V < vocab)).to(tl.int32)
        kept_V = (ordered_V > least) | ((tie_V == 1) & (ties + tl.cumsum(tie_V, 0) <= quota))
        scores_V = (x_V.to(tl.float64) - peak) / temperature + _gumbel_noise(key, ids_V)
        scores_V = tl.where(kept_V, scores_V, float("-inf"))
        better_V = scores_V > best_V
        best_V = tl.where(better_V, scores_V, best_V)
        best_ids_V = tl.where(better_V, ids_V, best_ids_V)
        ties += tl.sum(tie_V, 0)
    return _lowest_best(best_V, best_ids_V)


@triton.jit
def _sample_kernel(
    logits_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, seeds_ptr, positions_ptr, tokens_ptr, vocab, stride_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    temperature = tl.load(temperatures_ptr + row).to(tl.float64)
    peak, token, finite = _greedy(row_ptr, vocab, BLOCK)
    if finite & (temperature > 0.0):
        top_k, top_p = tl.load(top_ks_ptr + row).to(tl.int32), tl.load(top_ps_ptr + row).to(tl.float32)
        rounded = tl.maximum(temperature, 1e-30).to(tl.float32)  # still above 0
        least, quota = _kept(row_ptr, vocab, top_k, top_p, peak, rounded, BLOCK)
        seed, position = tl.load(seeds_ptr + row).to(tl.uint64), tl.load(positions_ptr + row).to(tl.uint64)
        token = _draw(row_ptr, vocab, least, quota, peak, temperature, _mix64(_mix64(seed) + position), BLOCK)
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
            logits_SV.stride(0), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return tokens
