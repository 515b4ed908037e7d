"""What every wrapper demands of its arguments, each as one clear ValueError: operation, argument, expected, found.

Looks at shapes, types, strides and devices only, never at values on a device: a look would wait for the device.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from schedlab.kernels import configs
from schedlab.kernels.attention import PagedKeys, Scale
from schedlab.kernels.reference import FLOAT8

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
MAX_HEAD_DIM = 256


def fail(op: str, name: str, expected: str, found: object) -> NoReturn:
    raise ValueError(f"{op}: {name} must be {expected}, got {found}")


def floats(op: str, name: str, x: Tensor, ndim: int, like: Tensor | None = None) -> None:
    """`x` has `ndim` dimensions, the last one contiguous, and the type and device of `like`."""
    if x.ndim != ndim:
        fail(op, name, f"a tensor of {ndim} dimensions", f"{x.ndim}")
    if x.dtype not in FLOATS if like is None else x.dtype != like.dtype:
        fail(op, name, "bfloat16, float16 or float32" if like is None else f"{like.dtype}", x.dtype)
    if like is not None and x.device != like.device:
        fail(op, name, f"on {like.device}", x.device)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"strides {x.stride()}")


def shaped(op: str, name: str, x: Tensor, *shape: int) -> None:
    if x.shape != shape:
        fail(op, name, f"of shape {list(shape)}", list(x.shape))


def integers(op: str, name: str, x: Tensor, device: torch.device, *shape: int) -> None:
    """`x` is int32 or int64 of this shape on this device, contiguous in its last dimension."""
    if x.dtype not in INTEGERS:
        fail(op, name, "int32 or int64", x.dtype)
    shaped(op, name, x, *shape)
    if x.device != device:
        fail(op, name, f"on {device}", x.device)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        fail(op, name, "contiguous in its last dimension", f"strides {x.stride()}")


def parameters(op: str, name: str, x: Tensor, device: torch.device, num_rows: int) -> None:
    """`x` is one float32 or float64 a row."""
    if x.dtype not in (torch.float32, torch.float64):
        fail(op, name, "float32 or float64", x.dtype)
    shaped(op, name, x, num_rows)
    if x.device != device or (num_rows > 1 and x.stride(0) != 1):
        fail(op, name, f"contiguous on {device}", f"strides {x.stride()} on {x.device}")


def output(op: str, out: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """`out` itself if it can take a result of this shape and of the type of `like`; else a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    floats(op, "out", out, len(shape), like)
    shaped(op, "out", out, *shape)
    return out


def scale_tensor(op: str, name: str, scale: Scale, device: torch.device) -> Tensor | None:
    """The scale of a quantised cache where a kernel can read it; None stays None and costs nothing."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return torch.full((), scale, dtype=torch.float32, device=device)
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != device:
        found = f"{list(scale.shape)} {scale.dtype} on {scale.device}"
        fail(op, name, f"a number, or one float32 element on {device}", found)
    return scale


def caches(op: str, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Caches are [num_blocks, block_size, K, D] of the type of Q or float8_e4m3fn, equal in shape and strides."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        like = cache if cache.dtype == FLOAT8 and cache.device == q_THD.device else q_THD
        floats(op, name, cache, 4, like)
    if k_cache.dtype == FLOAT8 and not configs.has_float8():
        fail(op, "k_cache", f"{q_THD.dtype} below compute capability 8.9", k_cache.dtype)
    heads, head_dim = q_THD.shape[1:]
    kv_heads = k_cache.shape[2]
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        fail(op, "v_cache", f"like k_cache, {describe(k_cache)}", describe(v_cache))
    if k_cache.shape[3] != head_dim or kv_heads == 0 or heads % kv_heads:
        found = f"{kv_heads} heads of {k_cache.shape[3]}"
        fail(op, "k_cache", f"of heads that divide the {heads} of q, of size {head_dim}", found)
    if head_dim > MAX_HEAD_DIM:
        fail(op, "the head size", f"at most {MAX_HEAD_DIM}", head_dim)


def attention(op: str, q_THD: Tensor, paged: PagedKeys) -> None:
    """All but the scales of a quantised cache, see `scale_tensor`."""
    floats(op, "q", q_THD, 3)
    caches(op, q_THD, paged.k_cache, paged.v_cache)
    tables_NB = paged.block_tables_NB
    if tables_NB.ndim != 2:
        fail(op, "block_tables", "of shape [sequences, blocks]", list(tables_NB.shape))
    integers(op, "block_tables", tables_NB, q_THD.device, *tables_NB.shape)
    integers(op, "context_lens", paged.context_lens_N, q_THD.device, len(tables_NB))
    tables(op, paged)
    if not paged.scale > 0:
        fail(op, "scale", "above 0", paged.scale)
    if paged.window is not None and paged.window < 1:
        fail(op, "window", "at least 1, the query's own key", paged.window)
    if paged.softcap is not None and not paged.softcap > 0:
        fail(op, "softcap", "above 0", paged.softcap)


def rotation(op: str, cos_TR: Tensor, sin_TR: Tensor, q_THD: Tensor) -> None:
    """cos and sin are [T, R] with 2R <= D, of one type and equal strides."""
    num_tokens, _, head_dim = q_THD.shape
    for name, x in (("cos", cos_TR), ("sin", sin_TR)):
        floats(op, name, x, 2)
        shaped(op, name, x, num_tokens, cos_TR.shape[-1])
    if cos_TR.device != q_THD.device or describe(cos_TR) != describe(sin_TR) or cos_TR.device != sin_TR.device:
        fail(op, "sin", f"like cos, {describe(cos_TR)}, on {q_THD.device}", f"{describe(sin_TR)} on {sin_TR.device}")
    if not 0 < 2 * cos_TR.shape[-1] <= head_dim:
        fail(op, "cos", f"of 1 to {head_dim // 2} columns, half of the rotary part", cos_TR.shape[-1])


def slots(op: str, slots_T: Tensor, k_cache: Tensor) -> None:
    """Where the slots lie in host memory, as under the interpreter: unique but for -1, and within the cache."""
    if slots_T.device.type != "cpu":
        return
    capacity = k_cache.shape[0] * k_cache.shape[1]
    used = slots_T[slots_T != -1]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < capacity:
        fail(op, "slots", f"-1 or in 0 .. {capacity - 1}", used.tolist())
    if len(set(used.tolist())) != used.numel():
        fail(op, "slots", "unique but for -1", used.tolist())


def tables(op: str, paged: PagedKeys) -> None:
    """Where tables lie in host memory: lengths fit the tables, and the entries in use name blocks of the cache."""
    if paged.block_tables_NB.device.type != "cpu":
        return
    num_blocks, block_size = paged.k_cache.shape[:2]
    width = paged.block_tables_NB.shape[1]
    for n, length in enumerate(paged.context_lens_N.tolist()):
        if not 0 <= length <= width * block_size:
            fail(op, f"context_lens[{n}]", f"in 0 .. {width * block_size}, what {width} blocks hold", length)
        used = paged.block_tables_NB[n, : -(-length // block_size)]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < num_blocks:
            fail(op, f"block_tables[{n}]", f"in 0 .. {num_blocks - 1}", used.tolist())


def query_starts(op: str, starts_N1: Tensor, num_tokens: int) -> None:
    """Where the starts lie in host memory: they rise from 0 to the number of tokens."""
    if starts_N1.device.type != "cpu":
        return
    starts = starts_N1.tolist()
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] != num_tokens:
        fail(op, "query_starts", f"rising from 0 to {num_tokens}", starts)


def describe(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} with strides {x.stride()}"
