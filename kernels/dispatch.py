"""Which implementation of the kernels serves a device: 'triton', 'torch', 'native' or 'reference'.

Triton is imported only when chosen, so that a machine without it can run on torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch


class Kernels(NamedTuple):
    """The operations of one implementation; signatures and meaning are those of `reference`."""

    name: str
    rms_norm: Operation
    rope_kv_write: Operation
    silu_mul: Operation
    prefill_attention: Operation
    decode_attention: Operation
    sample: Operation
    in_tiles: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor] = lambda f, rows: f(rows)
    """How any other function of rows is applied so that what the implementation promises of their bits holds."""


class Operation(Protocol):
    """A kernel's wrapper: torch tensors in, torch tensors out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_TRITON_MODULES = {
    "rms_norm": "norm",
    "rope_kv_write": "kv_write",
    "silu_mul": "activation",
    "prefill_attention": "attention_prefill",
    "decode_attention": "attention_decode",
    "sample": "sampling",
}


def kernels(device: torch.device | str, backend: str | None = None) -> Kernels:
    """The implementation named `backend`, or the one that serves `device`: Triton on cuda, torch elsewhere.

    `native` are the compiled ones of native.py, for CPUs. Under TRITON_INTERPRET=1, `kernels("cpu", "triton")` runs the
    Triton code on CPU tensors. Raises ValueError for an unknown name, or where it cannot run on the device.
    """
    kind = torch.device(device).type
    name = backend or ("triton" if kind == "cuda" else "torch")
    if name not in ("triton", "torch", "native", "reference"):
        raise ValueError(f"kernels: backend must be triton, torch, native or reference, got {name!r}")
    if name == "native" and kind != "cpu":
        raise ValueError(f"kernels: native runs on cpu, got device {kind!r}")
    if name == "triton" and kind != "cuda" and not _interpreted():
        raise ValueError(f"kernels: triton runs on cuda, got device {kind!r}; use torch, or set TRITON_INTERPRET=1")
    return _load(name)


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


@cache
def _load(name: str) -> Kernels:
    whole = {"torch": "torch_backend", "native": "native", "reference": "reference"}
    modules = dict.fromkeys(_TRITON_MODULES, whole[name]) if name in whole else _TRITON_MODULES
    return Kernels(name, *(getattr(import_module(f"{__package__}.{modules[op]}"), op) for op in _TRITON_MODULES))
