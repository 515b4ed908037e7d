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
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.linear import (
    Linear,
    MakeLinear,
    Matrix,
    by_triton,
    casting,
    compiled,
    packed,
    plain,
    quantising,
    tiled,
)
from schedlab.framework.model.phases import batch_by_phase
from schedlab.kernels.dispatch import Kernels, kernels
from schedlab.kernels.native_library import BuildError, built, load
from schedlab.kernels.quantised import KINDS

ROWS = 128
"""Rows of a product in batch-invariant mode on a GPU: at most a decode step's, so that its weights are read once."""


KERNELS = ("auto", "torch", "native")
WEIGHT_DTYPES = ("bf16", *KINDS)


@dataclass(frozen=True, slots=True)
class Backend:
    """`ragged` turns inputs into tensors on a device, `linear` and `head` apply the layers' and the last matrix, and
    `router` those that choose experts, of float32 rows.

    `weights` is the type in which these are read, `activations` that of the rows between them; None: the model's.
    `staged`: the layers' matrices are read into the host's memory, and `linear` takes each to the device as it will
    lie there. `row_classes`: numbers of rows of which each takes kernels of its own.
    """

    kernels: Kernels
    linear: MakeLinear
    ragged: Callable[[Inputs, torch.device], RaggedBatch]
    head: MakeLinear | None = None
    router: MakeLinear | None = None
    activations: torch.dtype | None = None
    weights: torch.dtype | None = None
    staged: bool = False
    row_classes: tuple[int, ...] = (1,)


def backend_for(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    choice: str = "auto",
    weight_dtype: str | None = None,
) -> Backend:
    """The one for `device` and a model in `dtype`.

    Batch-invariant: a request's logits are the same bits in any batch, by fixed tiles. `choice` of the CPU's kernels:
    "native" are the compiled ones, "torch" needs no compiler, "auto" takes the former where they are built.
    """
    _check(choice, weight_dtype, device, dtype, batch_invariant)
    if device.type == "cpu":
        return _invariant_cpu() if batch_invariant else _cpu(dtype, choice, weight_dtype)
    if batch_invariant:
        return invariant_gpu(kernels(device))
    if weight_dtype in KINDS:
        return quantised_gpu(kernels(device), device, dtype, weight_dtype)
    return Backend(kernels(device), plain, RaggedBatch.of)


def _check(
    choice: str, weight_dtype: str | None, device: torch.device, dtype: torch.dtype, batch_invariant: bool
) -> None:
    if choice not in KERNELS:
        raise ConfigError(f"engine.kernels: expected one of {', '.join(KERNELS)}, found {choice}")
    if weight_dtype not in (None, *WEIGHT_DTYPES):
        known = ", ".join(WEIGHT_DTYPES)
        raise ConfigError(f"model.weight_dtype: expected null or one of {known}, found {weight_dtype}")
    if weight_dtype is not None and batch_invariant:
        raise ConfigError(f"model.weight_dtype: expected null in batch-invariant mode, found {weight_dtype}")
    if weight_dtype == "bf16" and device.type != "cpu" and dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"model.weight_dtype: expected null, int8 or int4 with dtype={name} on {device}, found bf16")
    if weight_dtype in KINDS and device.type != "cpu" and dtype == torch.float64:
        raise ConfigError(f"model.weight_dtype: expected null with dtype=float64 on {device}, found {weight_dtype}")
    if choice == "native" and batch_invariant:
        raise ConfigError("engine.batch_invariant: expected engine.kernels=auto or torch, found native")


def _invariant_cpu() -> Backend:
    from schedlab.kernels.torch_invariant import INVARIANT

    return Backend(INVARIANT, tiled, RaggedBatch.of)


def _cpu(dtype: torch.dtype, choice: str, weight_dtype: str | None) -> Backend:
    """Rows are float32 (float64 for float64) whatever the weights: 16 bits would be slower and less exact."""
    native = choice == "native" or (choice == "auto" and built())
    make = compiled if native else packed
    return Backend(
        _cpu_kernels(native),
        quantising(make, weight_dtype) if weight_dtype in KINDS else make,
        RaggedBatch.of,
        head=make,
        router=make,
        activations=torch.float64 if dtype == torch.float64 else torch.float32,
        weights=dtype if weight_dtype is None else torch.bfloat16,
    )


def _cpu_kernels(native: bool) -> Kernels:
    if not native:
        return kernels("cpu", "torch")
    try:
        load()
    except BuildError as error:
        raise ConfigError(f"engine.kernels=native: {error}; `schedlab kernels build` compiles them") from None
    return kernels("cpu", "native")


def invariant_gpu(kernels: Kernels) -> Backend:
    """The Triton kernels have fixed tiles and splits; so have the products here, and each position has one kernel."""
    return Backend(kernels, by_rows, batch_by_phase)


def quantised_gpu(kernels: Kernels, device: torch.device, dtype: torch.dtype, kind: str) -> Backend:
    """Rows are `dtype`; the weights are read in bfloat16, as on a CPU, so that their integers are the same there."""
    from schedlab.kernels.configs import linear_tiles

    return Backend(
        kernels,
        quantising(by_triton, kind, device),
        RaggedBatch.of,
        head=casting(dtype),
        activations=dtype,
        weights=torch.bfloat16,
        staged=True,
        row_classes=tuple(tile.block_t for tile in linear_tiles(dtype)),
    )


def by_rows(weight_OK: Matrix, bias_O: Tensor | None) -> Linear:
    """The matrix applied to ROWS rows at a time, the last ones filled up: the device sees one shape of product."""
    assert isinstance(weight_OK, Tensor), "no such product on a GPU"

    def linear(x_TK: Tensor) -> Tensor:
        padded_TK = F.pad(x_TK, (0, 0, 0, -len(x_TK) % ROWS))
        tiles = [F.linear(tile, weight_OK, bias_O) for tile in torch.split(padded_TK, ROWS)]
        return torch.cat(tiles)[: len(x_TK)]

    return linear
