"""How a weight matrix is applied. Knows one matrix and the rows given to it, nothing of the model around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from schedlab.kernels import torch_invariant

Linear = Callable[[Tensor], Tensor]
"""Rows [T, K] to rows [T, O]."""

MakeLinear = Callable[[Tensor, Tensor | None], Linear]
"""Weight [O, K] and bias [O] or None to a Linear."""


def plain(weight_OK: Tensor, bias_O: Tensor | None) -> Linear:
    """The matrix as it is, by torch."""
    return partial(F.linear, weight=weight_OK, bias=bias_O)


def tiled(weight_OK: Tensor, bias_O: Tensor | None) -> Linear:
    """The matrix applied to a fixed number of rows at a time, so that a row's bits do not depend on the others."""
    return partial(torch_invariant.linear, weight_OH=weight_OK, bias_O=bias_O)
