"""A Llama-family decoder over a ragged batch: tokens of all sequences concatenated, keys and values in paged caches.

Knows the arithmetic of one forward pass; knows nothing of requests, scheduling, sampling or where weights come from.
Shape letters: T tokens, N sequences, S sequences whose last token needs logits, H hidden (and heads), D head size,
R rotated pairs, V vocabulary, B blocks of the widest table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from schedlab.framework.batch import Inputs
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.feed_forward import feed_forward
from schedlab.framework.model.linear import Linear, MakeLinear
from schedlab.framework.model.rope import rope_tables
from schedlab.framework.model.weights import LayerWeights, Weights
from schedlab.kernels.attention import PagedKeys
from schedlab.kernels.dispatch import Kernels

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, Hkv, D]."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring sequences of a ragged batch that attend by one kernel call; `decode`: all have one query."""

    decode: bool
    rows: slice
    query_starts_N1: Tensor
    context_lens_N: Tensor
    block_tables_NB: Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """`Inputs` as tensors: `last_rows_S` are the rows of the tokens whose logits are due."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    last_rows_S: Tensor
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, inputs: Inputs, device: torch.device) -> RaggedBatch:
        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        last_rows = inputs.query_starts_N1[inputs.emitting_S + 1] - 1
        return cls(
            tensor(inputs.token_ids_T), tensor(inputs.positions_T), tensor(inputs.slots_T), tensor(last_rows),
            tuple(_spans(inputs, device)),
        )  # fmt: skip


def _spans(inputs: Inputs, device: torch.device) -> Iterator[Span]:
    """Cut the batch where single queries and longer ones meet; a batch in grant order has at most a few such places."""
    starts = inputs.query_starts_N1
    single = np.diff(starts) == 1
    cuts = [0, *(np.flatnonzero(np.diff(single)) + 1).tolist(), len(single)]
    for first, stop in zip(cuts, cuts[1:], strict=False):
        yield Span(
            decode=bool(single[first]),
            rows=slice(int(starts[first]), int(starts[stop])),
            query_starts_N1=torch.from_numpy(starts[first : stop + 1] - starts[first]).to(device),
            context_lens_N=torch.from_numpy(inputs.context_lens_N[first:stop]).to(device),
            block_tables_NB=torch.from_numpy(inputs.block_tables_NB[first:stop]).to(device),
        )


class Decoder:
    """Weights made ready for one backend, and the forward pass over them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        linear: MakeLinear,
        *,
        head: MakeLinear | None = None,
        router: MakeLinear | None = None,
        activations: torch.dtype | None = None,
        reduce: Linear | None = None,
    ) -> None:
        """`head` applies the last matrix and `router` those that choose experts, default `linear`; rows are
        `activations`, default the type of the weights. `reduce` adds up the shares [T, H] of the ranks that `config`
        and `weights` are one's share of."""
        rows = activations or weights.embed_VH.dtype
        device = weights.embed_VH.device
        wide = torch.float64 if weights.embed_VH.dtype == torch.float64 else torch.float32
        self._tables = {
            local: tuple(t.to(device, wide) for t in rope_tables(config, config.max_position_embeddings, local))
            for local in {_turns_locally(config, window) for window in config.windows}
        }
        self._embed_VH = weights.embed_VH
        self._embedding_multiplier = torch.tensor(config.embedding_multiplier).to(weights.embed_VH.dtype).item()
        self._layers = tuple(
            Layer(config, window, layer, kernels, linear, router or linear, rows, reduce)
            for window, layer in zip(config.windows, weights.layers, strict=True)
        )
        self._norm_H = weights.norm_H.to(rows)
        self._lm_head = (head or linear)(weights.lm_head_VH, None)
        self._rows = rows
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._logits_divisor = config.logits_divisor
        self._wide = wide

    def forward(self, batch: RaggedBatch, kv_caches: list[KVCache]) -> Tensor:
        """Write the keys and values of all tokens to their slots; logits [S, V], float32 (float64 in float64)."""
        turns = {local: (cos[batch.positions_T], sin[batch.positions_T]) for local, (cos, sin) in self._tables.items()}
        x_TH, residual_TH = self._embed_VH[batch.token_ids_T].to(self._rows), None
        if self._embedding_multiplier != 1:
            x_TH = x_TH * self._embedding_multiplier
        for layer, cache in zip(self._layers, kv_caches, strict=True):
            x_TH, residual_TH = layer.forward(x_TH, residual_TH, batch, *turns[layer.local], cache)
        rows = batch.last_rows_S
        last_SH, residual_SH = x_TH[rows], None if residual_TH is None else residual_TH[rows]
        normed_SH, _ = self._kernels.rms_norm(last_SH, self._norm_H, self._eps, residual_SH)
        logits_SV: Tensor = self._lm_head(normed_SH).to(self._wide)
        return logits_SV if self._logits_divisor == 1 else logits_SV / self._logits_divisor


def _reduced(half: Linear, reduce: Linear | None) -> Linear:
    return half if reduce is None else lambda x_TH: reduce(half(x_TH))


def _turns_locally(config: ModelConfig, window: int | None) -> bool:
    """Whether a layer rotates by the base of layers with a window."""
    return config.local_rope_theta is not None and window is not None


class Layer:
    """Attention and gated feed-forward, each behind a norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        weights: LayerWeights,
        kernels: Kernels,
        linear: MakeLinear,
        router: MakeLinear,
        rows: torch.dtype,
        reduce: Linear | None,
    ) -> None:
        self.local = _turns_locally(config, window)
        self._config = config
        self._window = window
        self._kernels = kernels
        self._scale = config.attention_scale
        self._input_norm_H, self._post_norm_H, self._q_norm_D, self._k_norm_D = (
            None if norm is None else norm.to(rows)
            for norm in (weights.input_norm_H, weights.post_norm_H, weights.q_norm_D, weights.k_norm_D)
        )
        self._behind_attention, self._behind_feed_forward = (
            self._added(None if norm is None else norm.to(rows))
            for norm in (weights.attention_norm_H, weights.feed_forward_norm_H)
        )
        self._qkv: Linear = linear(weights.qkv_OH, weights.qkv_bias_O)
        self._o = _reduced(linear(weights.o_HO, weights.o_bias_H), reduce)
        self._sinks_H = weights.sinks_H
        self._feed_forward = _reduced(feed_forward(config, weights.feed_forward, kernels, linear, router), reduce)

    def forward(
        self,
        x_TH: Tensor,
        residual_TH: Tensor | None,
        batch: RaggedBatch,
        cos_TR: Tensor,
        sin_TR: Tensor,
        cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """(output, residual): the sum of the two is the layer's value, added by the next norm."""
        eps, norm = self._config.rms_norm_eps, self._kernels.rms_norm
        if residual_TH is None:
            normed_TH, residual_TH = norm(x_TH, self._input_norm_H, eps), x_TH
        else:
            normed_TH, residual_TH = norm(x_TH, self._input_norm_H, eps, residual_TH)
        x_TH = self._behind_attention(self._attention(normed_TH, batch, cos_TR, sin_TR, cache))
        normed_TH, residual_TH = norm(x_TH, self._post_norm_H, eps, residual_TH)
        return self._behind_feed_forward(self._feed_forward(normed_TH)), residual_TH

    def _added(self, norm_H: Tensor | None) -> Linear:
        """What a half of the layer gives, as it joins the residual."""
        factor, eps = self._config.residual_multiplier, self._config.rms_norm_eps
        rms_norm = self._kernels.rms_norm  # a function that refers to this layer would be a cycle
        if norm_H is not None:
            return lambda x_TH: rms_norm(x_TH, norm_H, eps)
        return (lambda x_TH: x_TH) if factor == 1 else lambda x_TH: x_TH * factor

    def _attention(self, x_TH: Tensor, batch: RaggedBatch, cos_TR: Tensor, sin_TR: Tensor, cache: KVCache) -> Tensor:
        config = self._config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv_THD = self._qkv(x_TH).view(len(x_TH), q_heads + 2 * kv_heads, config.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv_THD, [q_heads, kv_heads, kv_heads], dim=1)
        if config.wide_qk_norm:
            q_THD, k_TKD = self._wide_norm(q_THD, self._q_norm_D), self._wide_norm(k_TKD, self._k_norm_D)
        elif self._q_norm_D is not None:
            q_THD = self._kernels.rms_norm(q_THD, self._q_norm_D, config.rms_norm_eps)
            k_TKD = self._kernels.rms_norm(k_TKD, self._k_norm_D, config.rms_norm_eps)
        q_THD = self._kernels.rope_kv_write(q_THD, k_TKD, v_TKD, cos_TR, sin_TR, *cache, batch.slots_T)
        out_THD = torch.empty_like(q_THD)
        for span in batch.spans:
            self._attend(q_THD[span.rows], span, cache, out_THD[span.rows])
        return self._o(out_THD.flatten(1))

    def _wide_norm(self, x_THD: Tensor, weight_HD: Tensor | None) -> Tensor:
        normed: Tensor = self._kernels.rms_norm(x_THD.flatten(1), weight_HD, self._config.rms_norm_eps)
        return normed.view_as(x_THD)

    def _attend(self, q_THD: Tensor, span: Span, cache: KVCache, out_THD: Tensor) -> None:
        paged = PagedKeys(*cache, span.block_tables_NB, span.context_lens_N, self._scale, self._window)
        if span.decode:
            attention = partial(self._kernels.decode_attention, q_THD, paged, out=out_THD)
        else:
            attention = partial(self._kernels.prefill_attention, q_THD, span.query_starts_N1, paged, out=out_THD)
        if self._sinks_H is None:
            attention()
        else:  # a sink adds exp(sink) to the softmax's denominator, whose logarithm the kernel gives
            _, lse_TH = attention(return_lse=True)
            shares_TH = self._kernels.in_tiles(torch.sigmoid, lse_TH - self._sinks_H.to(lse_TH.dtype))
            out_THD.mul_(shares_TH[..., None].to(out_THD.dtype))
