"""The launches that are compiled: the project's wrappers on tensors without data, in shapes of real models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from schedlab.kernels.activation import silu_mul
from schedlab.kernels.attention import PagedKeys
from schedlab.kernels.attention_decode import decode_attention
from schedlab.kernels.attention_prefill import prefill_attention
from schedlab.kernels.kv_write import rope_kv_write
from schedlab.kernels.norm import rms_norm
from schedlab.kernels.quantised import Quantised
from schedlab.kernels.quantised_linear import linear
from schedlab.kernels.sampling import sample

FP8 = torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def attention(
    phase: str,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    sequences: int = 4,
    columns: int = 70,
    tokens: int = 300,
    return_lse: bool = False,
    **options: Any,
) -> None:
    cache = meta(1000, 16, kv_heads, head_dim, dtype=cache_dtype or dtype)
    paged = PagedKeys(cache, cache, indices(sequences, columns), indices(sequences), scale=0.1, **options)
    if phase == "prefill":
        q = meta(tokens, heads, head_dim, dtype=dtype)
        prefill_attention(q, indices(sequences + 1), paged, return_lse=return_lse)
    else:
        decode_attention(meta(sequences, heads, head_dim, dtype=dtype), paged, return_lse=return_lse)


def norm(rows: int = 64) -> None:
    rms_norm(meta(rows, 4096), meta(4096), 1e-6, meta(rows, 4096))


def head_norm(rows: int = 64) -> None:
    rms_norm(meta(rows, 48, 128)[:, :32], meta(128), 1e-6)


def activation(rows: int = 64) -> None:
    silu_mul(meta(rows, 2 * 14336))


def rope(rows: int = 64, cache_dtype: torch.dtype = torch.bfloat16, scale: float | None = None) -> None:
    packed, cache = meta(rows, 48, 128), meta(1000, 16, 8, 128, dtype=cache_dtype)
    tables = meta(rows, 64, dtype=torch.float32), meta(rows, 64, dtype=torch.float32)
    q, k, v = packed[:, :32], packed[:, 32:40], packed[:, 40:]
    rope_kv_write(q, k, v, *tables, cache, cache, indices(rows), k_scale=scale, v_scale=scale)


def sampling(rows: int = 64) -> None:
    floats, longs = meta(rows, dtype=torch.float32), meta(rows, dtype=torch.int64)
    sample(meta(rows, 128256, dtype=torch.float32), floats, longs, floats, longs, longs)


def quantised(kind: str, columns: int, depth: int, group: int = 64) -> Quantised:
    scales = meta(columns, -(-depth // group))
    numbers = meta(columns, depth, dtype=torch.int8 if kind == "int8" else torch.uint8)
    return Quantised(numbers, scales, scales if kind == "int4" else None, group)


def product(
    kind: str, rows: int, dtype: torch.dtype = torch.bfloat16, columns: int = 4096, depth: int = 4096, group: int = 64
) -> None:
    """Split along its depth where rows are few, as the matrix is."""
    linear(quantised(kind, columns, depth, group), None)(meta(rows, depth, dtype=dtype))
