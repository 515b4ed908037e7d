"""Tests of norm, activation, rotation and cache write, for every implementation: the importing module gives `ops`."""

from __future__ import annotations

import pytest
import torch
from cases import FP8, REFERENCE, TOLERANCE, error
from torch import Tensor

from schedlab.kernels.dispatch import Kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 64, 576, 1500])
def test_rms_norm(ops: Kernels, hidden: int, dtype: torch.dtype) -> None:
    x, weight = normal(5, hidden, dtype=dtype), normal(hidden, dtype=dtype, seed=1)
    assert error(ops.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x.double(), weight, 1e-6)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_of_the_sum_with_the_residual(ops: Kernels, dtype: torch.dtype) -> None:
    """The new residual is the rounded sum, the norm is of what was rounded; the inputs stay as they were."""
    x, residual, weight = (normal(7, 96, dtype=dtype, seed=seed) for seed in range(3))
    before = x.clone(), residual.clone()
    normed, total = ops.rms_norm(x, weight[0], 1e-5, residual)
    expected, expected_total = REFERENCE.rms_norm(x.double(), weight[0], 1e-5, residual)
    assert error(total, expected_total) <= TOLERANCE[dtype]
    assert error(normed, expected) <= TOLERANCE[dtype]
    assert torch.equal(normed, ops.rms_norm(total, weight[0], 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


def test_rms_norm_of_heads_in_a_packed_product(ops: Kernels) -> None:
    """QK norm: rows are the heads of a view that skips the rest of the packed row."""
    packed, weight = normal(6, 10, 32), normal(32, seed=1)
    heads = packed[:, 2:7]
    expected = REFERENCE.rms_norm(heads.double(), weight, 1e-6)
    assert error(ops.rms_norm(heads, weight, 1e-6), expected) <= 2e-6


def test_rms_norm_extremes(ops: Kernels) -> None:
    """A row of zeros is zeros by eps; squares of float16's largest values do not overflow; NaN stays in its row."""
    x = normal(4, 64, dtype=torch.float16)
    x[0], x[1], x[2] = 0.0, 6e4, torch.nan
    out = ops.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
    assert (out[0] == 0).all() and (out[1] == 1).all() and out[2].isnan().all() and out[3].isfinite().all()


def test_rms_norm_into_out(ops: Kernels) -> None:
    x, weight = normal(5, 48), normal(48, seed=1)
    wide = torch.full((5, 60), 7.0)
    result = ops.rms_norm(x, weight, 1e-6, out=wide[:, 4:52])
    assert result.data_ptr() == wide[:, 4:].data_ptr()
    assert error(result, REFERENCE.rms_norm(x.double(), weight, 1e-6)) <= 2e-6
    assert (wide[:, :4] == 7).all() and (wide[:, 52:] == 7).all()
    expected = REFERENCE.rms_norm(x.double(), weight, 1e-6)
    assert error(ops.rms_norm(x, weight, 1e-6, out=x), expected) <= 2e-6, "out may be x itself"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1100])
def test_silu_mul(ops: Kernels, size: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * size, dtype=dtype) * 4
    assert error(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up.double())) <= TOLERANCE[dtype]


def test_silu_mul_saturates(ops: Kernels) -> None:
    """exp of a large negative gate overflows; the product is 0, not NaN."""
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 2.0, 2.0, 2.0, 2.0]])
    assert error(ops.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 0.0, 200.0]])) <= 1e-6


def test_silu_mul_of_views_into_out(ops: Kernels) -> None:
    wide, target = normal(4, 100), torch.full((4, 50), 7.0)
    result = ops.silu_mul(wide[:, 10:90], out=target[:, 5:45])
    assert error(result, REFERENCE.silu_mul(wide[:, 10:90].double())) <= 2e-6
    assert (target[:, :5] == 7).all() and (target[:, 45:] == 7).all()


class Write:
    """Tokens to rotate and write: q, k and v views of one packed product, a cache of NaN where nothing was written."""

    def __init__(
        self,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        half: int | None = None,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        slots: tuple[int, ...] = (5, -1, 63, 0, 17, 33),
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        packed = normal(len(slots), heads + 2 * kv_heads, head_dim, dtype=dtype)
        self.q, self.k, self.v = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
        angles = normal(len(slots), half or head_dim // 2, seed=1) * 3
        self.cos, self.sin = angles.cos(), angles.sin()
        shape = (4, 16, kv_heads, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan).to(cache_dtype or dtype) for _ in range(2))
        self.slots = torch.tensor(slots, dtype=index_dtype)

    def run(self, ops: Kernels, **scales: float | Tensor) -> Tensor:
        tables = self.cos, self.sin, self.k_cache, self.v_cache
        return ops.rope_kv_write(self.q, self.k, self.v, *tables, self.slots, **scales)

    def expected(self, **scales: float) -> tuple[Tensor, Tensor, Tensor]:
        """(q, k cache, v cache) in float64, the caches as wide as they come."""
        caches = [torch.full(self.k_cache.shape, torch.nan, dtype=torch.float64) for _ in range(2)]
        inputs = self.q.double(), self.k.double(), self.v.double(), self.cos, self.sin
        return REFERENCE.rope_kv_write(*inputs, *caches, self.slots, **scales), *caches


def written_error(cache: Tensor, expected: Tensor) -> float:
    """`error` over what was written; NaN if anything else was, or if not all was."""
    cache, unwritten = cache.double(), expected.isnan()
    if not torch.equal(cache.isnan(), unwritten):
        return float("nan")
    return error(cache[~unwritten], expected[~unwritten])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [{}, {"half": 16}, {"half": 3}, {"head_dim": 80}, {"heads": 9, "kv_heads": 3}, {"heads": 1, "kv_heads": 1}],
    ids=str,
)
def test_rope_kv_write(ops: Kernels, shape: dict, dtype: torch.dtype) -> None:
    """Slot -1 is skipped and its query rotated all the same; partial rotation copies the tail; heads in any number."""
    write = Write(dtype=dtype, **shape)
    q = write.run(ops)
    expected_q, expected_k, expected_v = write.expected()
    assert error(q, expected_q) <= TOLERANCE[dtype]
    assert written_error(write.k_cache, expected_k) <= TOLERANCE[dtype]
    assert written_error(write.v_cache, expected_v) == 0.0


def test_rope_kv_write_takes_int32_slots_and_a_head_major_cache(ops: Kernels) -> None:
    write = Write(index_dtype=torch.int32)
    head_major = [torch.full((4, 2, 16, 64), torch.nan).transpose(1, 2) for _ in range(2)]
    write.k_cache, write.v_cache = head_major
    write.run(ops)
    _, expected_k, expected_v = write.expected()
    assert written_error(head_major[0], expected_k) <= 2e-6
    assert written_error(head_major[1], expected_v) == 0.0


def test_rope_kv_write_of_nothing(ops: Kernels) -> None:
    assert Write(slots=()).run(ops).shape == (0, 4, 64)
    padding = Write(slots=(-1, -1))
    padding.run(ops)
    assert padding.k_cache.isnan().all() and padding.v_cache.isnan().all()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_float8_write_divides_by_the_scale(ops: Kernels, as_tensor: bool) -> None:
    """Once, K and V each by its own; read back times the scale it is the value, to float8's three bits.

    Rounding errs by 3 % of the norm; the interpreter truncates, which errs by twice that.
    """
    write = Write(dtype=torch.float16, cache_dtype=FP8)
    scales = {"k_scale": 0.02, "v_scale": 3.0}
    write.run(ops, **{name: torch.tensor(scale) if as_tensor else scale for name, scale in scales.items()})
    _, expected_k, expected_v = write.expected()
    bound = 0.08 if ops.name == "triton" else 0.03
    assert written_error(write.k_cache.double() * 0.02, expected_k) <= bound
    assert written_error(write.v_cache.double() * 3.0, expected_v) <= bound


def test_float8_write_saturates(ops: Kernels) -> None:
    """Beyond ±448 a cast gives NaN; a write gives ±448."""
    write = Write(dtype=torch.float32, cache_dtype=FP8, slots=(0, 1))
    write.v[0], write.v[1] = 1e6, -torch.inf
    write.run(ops)
    rows = write.v_cache.float()[0]
    assert (rows[0] == 448).all() and (rows[1] == -448).all()
