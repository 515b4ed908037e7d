"""The kernels of native.cpp behind the signatures of `torch_backend`, and the products of packed matrices.

Arithmetic is float32: activations are float32, keys and values float32 or bfloat16, matrices those or integers with a
scale for each group. What the compiled code has no form for (float64, fp8 caches, softcap, log-sum-exp, strided rows)
is computed by `torch_backend`. Blocks are read where they lie, through the block table. Shape letters as there, and K
depth, O columns of a product, P panels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from schedlab.kernels import torch_backend
from schedlab.kernels.attention import PagedKeys, Scale
from schedlab.kernels.native_library import load
from schedlab.kernels.quantised import Quantised

TYPES = (torch.float32, torch.bfloat16)
"""What weights, keys and values may be held in."""
Product: TypeAlias = Callable[[Tensor], Tensor]


def linear(weight_OK: Tensor | Quantised, bias_O: Tensor | None) -> Product:
    """x @ weight.T + bias for float32 x [T, K]; the weight is packed once. Types: float32, bfloat16, Quantised.

    A row's result is the same bits with any other rows beside it.
    """
    bias = None if bias_O is None else bias_O.float().contiguous()
    if isinstance(weight_OK, Quantised):
        return _Quantised(weight_OK, bias)
    return _Packed(weight_OK, bias)


class _Packed:
    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None) -> None:
        if weight_OK.dtype not in TYPES:
            raise ValueError(f"linear: weight must be float32, bfloat16 or Quantised, got {weight_OK.dtype}")
        self._columns, self._depth = weight_OK.shape
        self._weight = _panels(weight_OK)
        self._bias = bias_O
        library = load()
        wide = weight_OK.dtype == torch.float32
        self._multiply = library.schedlab_linear_float if wide else library.schedlab_linear_bf16

    def __call__(self, x_TK: Tensor) -> Tensor:
        x_TK, out_TO = _rows(x_TK, self._depth), x_TK.new_empty(len(x_TK), self._columns, dtype=torch.float32)
        self._multiply(
            x_TK.data_ptr(), x_TK.stride(0), len(x_TK), self._depth, self._columns, self._weight.data_ptr(),
            _pointer(self._bias), out_TO.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out_TO


class _Quantised:
    def __init__(self, weight: Quantised, bias_O: Tensor | None) -> None:
        self._columns, self._depth = weight.shape
        self._group = weight.group.bit_length() - 1
        self._scales = _panels(weight.scales_OG.float())
        self._zeros = None if weight.zeros_OG is None else _panels(weight.zeros_OG.float())
        self._weight = _panels(weight.numbers_OK)
        if self._zeros is not None:
            low, high = self._weight.chunk(2, dim=-1)
            self._weight = (low | high << 4).contiguous()
        self._bias = bias_O

    def __call__(self, x_TK: Tensor) -> Tensor:
        x_TK, out_TO = _rows(x_TK, self._depth), x_TK.new_empty(len(x_TK), self._columns, dtype=torch.float32)
        shape = x_TK.data_ptr(), x_TK.stride(0), len(x_TK), self._depth, self._columns
        packed = self._weight.data_ptr(), self._scales.data_ptr()
        rest = self._group, _pointer(self._bias), out_TO.data_ptr(), torch.get_num_threads()
        if self._zeros is None:
            load().schedlab_linear_int8(*shape, *packed, *rest)
        else:
            load().schedlab_linear_int4(*shape, *packed, self._zeros.data_ptr(), *rest)
        return out_TO


def rms_norm(
    x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """See `torch_backend.rms_norm`."""
    if not _plain(x_TH, weight_H, residual_TH, out):
        return torch_backend.rms_norm(x_TH, weight_H, eps, residual_TH, out=out)
    result = torch.empty_like(x_TH) if out is None else out
    sum_TH = None if residual_TH is None else torch.empty_like(x_TH)
    size = x_TH.shape[-1]
    load().schedlab_rms_norm(
        x_TH.data_ptr(), _pointer(residual_TH), weight_H.data_ptr(), eps, _pointer(sum_TH), result.data_ptr(),
        x_TH.numel() // size, size,
    )  # fmt: skip
    return result if sum_TH is None else (result, sum_TH)


def silu_mul(gate_up_T2I: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `torch_backend.silu_mul`."""
    if not _plain(gate_up_T2I, out):
        return torch_backend.silu_mul(gate_up_T2I, out=out)
    num_rows, width = gate_up_T2I.shape
    result = gate_up_T2I.new_empty(num_rows, width // 2) if out is None else out
    load().schedlab_silu_mul(gate_up_T2I.data_ptr(), result.data_ptr(), num_rows, width // 2)
    return result


def rope_kv_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> Tensor:
    """See `torch_backend.rope_kv_write`."""
    rows = (q_THD, k_TKD, v_TKD)
    usable = (
        k_scale is None and v_scale is None and _caches(k_cache, v_cache) and _plain(cos_TR, sin_TR)
        and slots_T.dtype == torch.int64 and all(map(_heads_lie_together, rows))
    )  # fmt: skip
    if not usable:
        return torch_backend.rope_kv_write(
            *rows, cos_TR, sin_TR, k_cache, v_cache, slots_T, k_scale=k_scale, v_scale=v_scale
        )
    num_tokens, heads, dim = q_THD.shape
    out_THD = q_THD.new_empty(q_THD.shape)
    load().schedlab_rope_kv_write(
        *(x.data_ptr() for x in rows), *(x.stride(0) for x in rows), cos_TR.data_ptr(), sin_TR.data_ptr(),
        slots_T.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), k_cache.dtype == torch.bfloat16,
        out_THD.data_ptr(), num_tokens, heads, k_cache.shape[2], dim, cos_TR.shape[-1],
    )  # fmt: skip
    return out_THD


def prefill_attention(
    q_THD: Tensor, query_starts_N1: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `torch_backend.prefill_attention`."""
    if return_lse or not _attends(q_THD, query_starts_N1, paged, out):
        return torch_backend.prefill_attention(q_THD, query_starts_N1, paged, out=out, return_lse=return_lse)
    result = _attend(q_THD, query_starts_N1, paged, out)
    if not bool(result.isfinite().all()):  # a key that a row does not see has weight 0 here, and 0 * NaN is NaN
        torch_backend.prefill_attention(q_THD, query_starts_N1, paged, out=result)
    return result


def decode_attention(
    q_NHD: Tensor, paged: PagedKeys, *, out: Tensor | None = None, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """See `torch_backend.decode_attention`."""
    if return_lse or not _attends(q_NHD, None, paged, out):
        return torch_backend.decode_attention(q_NHD, paged, out=out, return_lse=return_lse)
    return _attend(q_NHD, None, paged, out)


def _attend(q_THD: Tensor, query_starts_N1: Tensor | None, paged: PagedKeys, out: Tensor | None) -> Tensor:
    result = torch.empty_like(q_THD) if out is None else out
    k_cache, tables_NB, contexts_N = paged.k_cache, paged.block_tables_NB, paged.context_lens_N
    block_size, kv_heads, dim = k_cache.shape[1:]
    load().schedlab_attention(
        q_THD.data_ptr(), k_cache.data_ptr(), paged.v_cache.data_ptr(), k_cache.dtype == torch.bfloat16,
        tables_NB.data_ptr(), tables_NB.stride(0), contexts_N.data_ptr(), _pointer(query_starts_N1),
        result.data_ptr(), len(contexts_N), q_THD.shape[1], kv_heads, dim, block_size, paged.window or 0, paged.scale,
        torch.get_num_threads(),
    )  # fmt: skip
    return result


sample = torch_backend.sample


def _panels(matrix_OK: Tensor) -> Tensor:
    """[P, K, width of a panel], columns beyond the last zero."""
    width = load().schedlab_panel()
    columns, depth = matrix_OK.shape
    padded = torch.nn.functional.pad(matrix_OK, (0, 0, 0, -columns % width))
    return padded.view(-1, width, depth).transpose(1, 2).contiguous()


def _rows(x_TK: Tensor, depth: int) -> Tensor:
    """Float32 rows, each contiguous."""
    if x_TK.ndim != 2 or x_TK.shape[1] != depth or x_TK.dtype != torch.float32:
        found = f"{list(x_TK.shape)} {x_TK.dtype}"
        raise ValueError(f"linear: x must be float32 of shape [rows, {depth}], got {found}")
    return x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()


def _plain(*tensors: Tensor | None) -> bool:
    return all(x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in tensors)


def _heads_lie_together(x_THD: Tensor) -> bool:
    """Float32, the heads of a token one after the other; tokens at any distance."""
    return x_THD.dtype == torch.float32 and x_THD.stride()[1:] == (x_THD.shape[2], 1)


def _attends(q_THD: Tensor, query_starts_N1: Tensor | None, paged: PagedKeys, out: Tensor | None) -> bool:
    """The compiled code has a form for this."""
    if paged.softcap is not None or paged.k_scale is not None or paged.v_scale is not None:
        return False
    integers = (x for x in (paged.block_tables_NB, paged.context_lens_N, query_starts_N1) if x is not None)
    whole = all(x.dtype == torch.int64 and (x.numel() < 2 or x.stride(-1) == 1) for x in integers)
    return whole and _caches(paged.k_cache, paged.v_cache) and _plain(q_THD, out)


def _caches(k_cache: Tensor, v_cache: Tensor) -> bool:
    return k_cache.dtype in TYPES and k_cache.is_contiguous() and v_cache.is_contiguous()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
