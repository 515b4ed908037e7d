"""How a weight matrix is applied. Knows one matrix and the rows given to it, nothing of the model around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels import torch_invariant
from schedlab.kernels.quantised import Quantised, quantise

Linear = Callable[[Tensor], Tensor]
"""Rows [T, K] to rows [T, O]."""

Matrix: TypeAlias = Tensor | Quantised
"""[O, K]"""

MakeLinear = Callable[[Matrix, Tensor | None], Linear]
"""Weight [O, K] and bias [O] or None to a Linear."""


FEW_ROWS = 4
"""oneDNN's products of one row on AVX-512 take longer than those of four (measured on Zen 4; not so on AVX2)."""


def plain(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """The matrix as it is, by torch, in its own type."""
    assert isinstance(weight_OK, Tensor), "torch has no product for this matrix"
    return partial(F.linear, weight=weight_OK, bias=bias_O)


def tiled(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """The matrix applied to a fixed number of rows at a time, so that a row's bits do not depend on the others."""
    weight_OK = weight_OK.dequantised() if isinstance(weight_OK, Quantised) else weight_OK
    return partial(torch_invariant.linear, weight_OH=weight_OK, bias_O=bias_O)


def packed(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """Float32 rows in and out, by torch on a CPU: prepacked for oneDNN where the running torch has that.

    16-bit weights are multiplied as such where oneDNN can on this processor, else held in float32: F.linear would be
    many times slower. Integers are turned into float32 at each call; that saves memory and no time.
    """
    if isinstance(weight_OK, Quantised):
        return lambda x_TK: F.linear(x_TK, weight_OK.dequantised(), _wide(bias_O))
    if weight_OK.dtype == torch.float64:
        return plain(weight_OK, bias_O)
    if weight_OK.dtype.itemsize == 2 and multiplies(weight_OK.dtype):
        return _Narrow(_prepacked(weight_OK, bias_O), weight_OK.dtype)
    return _prepacked(weight_OK.float(), _wide(bias_O))


def compiled(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """Float32 rows in and out, by the compiled kernels, and by oneDNN where the processor has instructions for that."""
    from schedlab.kernels import native

    if isinstance(weight_OK, Quantised):
        return native.linear(weight_OK, bias_O)
    if weight_OK.dtype == torch.float64 or (weight_OK.dtype.itemsize == 2 and multiplies(weight_OK.dtype)):
        return packed(weight_OK, bias_O)
    return native.linear(weight_OK if weight_OK.dtype == torch.bfloat16 else weight_OK.float(), bias_O)


def quantising(make: MakeLinear, kind: str, device: torch.device | None = None) -> MakeLinear:
    """`make` of the matrix in `kind`, int8 or int4, on `device` if another than the matrix's own."""

    def made(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
        assert isinstance(weight_OK, Tensor), "already quantised"
        return make(quantise(weight_OK.to(device), kind), None if bias_O is None else bias_O.to(device))

    return made


def by_triton(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """Integers on a GPU, by the Triton kernels; rows in and out of any type."""
    from schedlab.kernels import quantised_linear

    assert isinstance(weight_OK, Quantised), "for integers alone"
    return quantised_linear.linear(weight_OK, bias_O)


def casting(dtype: torch.dtype) -> MakeLinear:
    """`plain`, of the matrix in `dtype`."""

    def made(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
        assert isinstance(weight_OK, Tensor), "torch has no product for this matrix"
        return plain(weight_OK.to(dtype), bias_O)

    return made


def headless(weight_VH: Matrix, bias_V: Tensor | None) -> Linear:
    """In place of the last matrix where nobody reads logits."""
    return lambda x_SH: x_SH


class _Narrow:
    """A product in 16 bits between float32 rows."""

    def __init__(self, product: Linear, dtype: torch.dtype) -> None:
        self._product = product
        self._dtype = dtype

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._product(x_TK.to(self._dtype)).float()


class _Prepacked:
    """A matrix in oneDNN's own order, by operations that torch.compile uses and torch documents nowhere."""

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OK.contiguous(), FEW_ROWS)
        self._bias = bias_O
        self._pad = torch.backends.cpu.get_cpu_capability().startswith("AVX512")

    def __call__(self, x_TK: Tensor) -> Tensor:
        num_rows = len(x_TK)
        if self._pad and num_rows < FEW_ROWS:
            return self._product(F.pad(x_TK, (0, 0, 0, FEW_ROWS - num_rows)))[:num_rows]
        return self._product(x_TK)

    def _product(self, x_TK: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self._weight, self._bias, "none", [], "")
        return result


def _prepacked(weight_OK: Tensor, bias_O: Tensor | None) -> Linear:
    return _Prepacked(weight_OK, bias_O) if can_prepack() else plain(weight_OK, bias_O)


def _wide(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float()


@cache
def can_prepack() -> bool:
    """Whether the running torch has oneDNN's packed products, and they do what is expected of them."""
    try:
        x, weight, bias = torch.ones(3, 8), torch.full((5, 8), 2.0), torch.ones(5)
        return torch.equal(_Prepacked(weight, bias)._product(x), F.linear(x, weight, bias))
    except (AttributeError, RuntimeError):
        return False


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this 16-bit type here, at least as fast as float32 ones.

    Rows are then rounded to the type before and after the product, which sums in float32 whatever the instructions.
    """
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    try:
        return can_prepack() and bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False
