"""What computes a decoder's step: the kernels, how its matrices are applied, and the type of the rows between them.

Knows devices, types and what the processor has instructions for; knows nothing of models, memory or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from schedlab.framework.errors import ConfigError
from schedlab.framework.model.linear import MakeLinear, compiled, packed, plain, quantising, tiled
from schedlab.kernels.dispatch import Kernels, kernels
from schedlab.kernels.native_library import BuildError, built, load
from schedlab.kernels.quantised import KINDS

KERNELS = ("auto", "torch", "native")
WEIGHT_DTYPES = ("bf16", *KINDS)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`projection` applies the matrices of the layers, `head` the last one; `weights` is the type both are read in."""

    kernels: Kernels
    projection: MakeLinear
    head: MakeLinear
    activations: torch.dtype
    weights: torch.dtype


def arithmetic(
    device: torch.device,
    dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
    choice: str = "auto",
    weight_dtype: str | None = None,
) -> Arithmetic:
    """What fits `device` and a model in `dtype`, its weights in `weight_dtype` if that is another.

    On a CPU rows are float32 (float64 for float64) whatever the weights: 16 bits would be slower and less exact.
    `choice`: the compiled kernels ("native"), torch's, or "auto", the former where they are built.
    """
    if choice not in KERNELS:
        raise ConfigError(f"engine.kernels: expected one of {', '.join(KERNELS)}, found {choice}")
    if weight_dtype not in (None, *WEIGHT_DTYPES):
        known = ", ".join(WEIGHT_DTYPES)
        raise ConfigError(f"model.weight_dtype: expected null or one of {known}, found {weight_dtype}")
    weights = dtype if weight_dtype is None else torch.bfloat16
    if device.type != "cpu":
        if weight_dtype in KINDS or weights != dtype:
            raise ConfigError(f"model.weight_dtype: expected null on {device}, found {weight_dtype}")
        return Arithmetic(kernels(device), plain, plain, dtype, dtype)
    if batch_invariant:
        return _invariant(dtype, weights, weight_dtype, choice)
    native = choice == "native" or (choice == "auto" and built())
    make = compiled if native else packed
    rows = torch.float64 if dtype == torch.float64 else torch.float32
    return Arithmetic(_cpu_kernels(native), _projection(make, weight_dtype), make, rows, weights)


def _invariant(dtype: torch.dtype, weights: torch.dtype, weight_dtype: str | None, choice: str) -> Arithmetic:
    from schedlab.kernels.torch_invariant import INVARIANT

    if choice == "native":
        raise ConfigError("engine.batch_invariant: expected engine.kernels=auto or torch, found native")
    if weights != dtype:
        raise ConfigError(f"model.weight_dtype: expected null in batch-invariant mode, found {weight_dtype}")
    return Arithmetic(INVARIANT, _projection(tiled, weight_dtype), tiled, dtype, weights)


def _projection(make: MakeLinear, weight_dtype: str | None) -> MakeLinear:
    return quantising(make, weight_dtype) if weight_dtype in KINDS else make


def _cpu_kernels(native: bool) -> Kernels:
    if not native:
        return kernels("cpu", "torch")
    try:
        load()
    except BuildError as error:
        raise ConfigError(f"engine.kernels=native: {error}; `schedlab kernels build` compiles them") from None
    return kernels("cpu", "native")
