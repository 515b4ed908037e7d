"""What a decoder runs on: kernels, how weights are applied, and by which kernel each token attends.

Knows the devices and the batch-invariant mode; knows nothing of models, memory or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from schedlab.framework.batch import Inputs
from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.linear import Linear, MakeLinear, plain, tiled
from schedlab.framework.model.phases import batch_by_phase
from schedlab.kernels.dispatch import Kernels, kernels

ROWS = 128
"""Rows of a product in batch-invariant mode on a GPU: at most a decode step's, so that its weights are read once."""


@dataclass(frozen=True, slots=True)
class Backend:
    """`ragged` turns inputs into tensors on a device."""

    kernels: Kernels
    linear: MakeLinear
    ragged: Callable[[Inputs, torch.device], RaggedBatch]


def backend_for(device: torch.device, *, batch_invariant: bool) -> Backend:
    """The one for `device`. Batch-invariant: a request's logits are the same bits in any batch, by fixed tiles."""
    if not batch_invariant:
        return Backend(kernels(device), plain, RaggedBatch.of)
    if device.type == "cpu":
        from schedlab.kernels.torch_invariant import INVARIANT

        return Backend(INVARIANT, tiled, RaggedBatch.of)
    return invariant_gpu(kernels(device))


def invariant_gpu(kernels: Kernels) -> Backend:
    """The Triton kernels have fixed tiles and splits; so have the products here, and each position has one kernel."""
    return Backend(kernels, by_rows, batch_by_phase)


def by_rows(weight_OK: Tensor, bias_O: Tensor | None) -> Linear:
    """The matrix applied to ROWS rows at a time, the last ones filled up: the device sees one shape of product."""

    def linear(x_TK: Tensor) -> Tensor:
        padded_TK = F.pad(x_TK, (0, 0, 0, -len(x_TK) % ROWS))
        tiles = [F.linear(tile, weight_OK, bias_O) for tile in torch.split(padded_TK, ROWS)]
        return torch.cat(tiles)[: len(x_TK)]

    return linear
