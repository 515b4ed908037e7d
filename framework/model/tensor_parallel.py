"""Tensor parallelism: one layer's matrices over several ranks (Shoeybi et al., arXiv:1909.08053, section 3).

What follows a norm is split by rows, heads or inner channels whole; what follows that is split by columns, so that a
layer takes two sums over the ranks. Experts go to ranks whole. Embedding, norms and routers are on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.layouts import Experts, FeedForward, Gated
from schedlab.framework.model.weights import LayerWeights
from schedlab.kernels.quantised import GROUP, KINDS

KEY = "engine.tensor_parallel"
distributed: Any = torch.distributed
"""Its classes of process groups are typed in part."""
PATIENCE = timedelta(minutes=10)
"""A sum that one rank reaches later than this ends them all."""


def check_split(config: ModelConfig, degree: int, weight_dtype: str | None = None) -> None:
    """ConfigError unless `degree` ranks can share the model, each with whole heads, experts and groups of integers."""
    if degree < 1:
        raise ConfigError(f"{KEY}: expected at least 1, found {degree}")
    kv_heads = config.num_key_value_heads
    if kv_heads % degree and degree % kv_heads:
        raise ConfigError(f"{KEY}: expected a divisor or multiple of {kv_heads} key-value heads, found {degree}")
    shared = {"attention heads": config.num_attention_heads}
    inner = {"experts": config.num_experts} if config.num_experts else {"inner channels": config.intermediate_size}
    for name, count in (shared | inner).items():
        if count % degree:
            raise ConfigError(f"{KEY}: expected a divisor of {count} {name}, found {degree}")
    if config.wide_qk_norm and degree > 1:
        raise ConfigError(f"{KEY}: expected 1 for {config.architecture}, whose norm spans all heads, found {degree}")
    columns = [config.q_size, *([] if config.num_experts else [config.intermediate_size])]
    if weight_dtype in KINDS and degree > 1 and any(count // degree % GROUP for count in columns):
        raise ConfigError(
            f"{KEY}: expected one that leaves whole groups of {GROUP} of {min(columns)} columns in {weight_dtype}, "
            f"found {degree}"
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `rank` of `degree` in a model."""

    rank: int
    degree: int

    def config(self, config: ModelConfig) -> ModelConfig:
        """The shape of this share; experts keep their number, for every rank routes among all of them."""
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // self.degree,
            num_key_value_heads=max(config.num_key_value_heads // self.degree, 1),
            intermediate_size=config.intermediate_size // (1 if config.num_experts else self.degree),
        )

    def num_parameters(self, config: ModelConfig) -> int:
        """Of this share, what all ranks have counted whole."""
        common = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        return common + (config.num_parameters() - common) // self.degree

    def layer(self, config: ModelConfig, weights: LayerWeights) -> LayerWeights:
        """Of one layer of a model of shape `config`."""
        sinks = weights.sinks_H
        return replace(
            weights,
            qkv_OH=self._heads(config, weights.qkv_OH),
            qkv_bias_O=None if weights.qkv_bias_O is None else self._heads(config, weights.qkv_bias_O),
            o_HO=self._columns(weights.o_HO),
            o_bias_H=self._once(weights.o_bias_H),
            sinks_H=None if sinks is None else self._rows(sinks),
            feed_forward=self._feed_forward(weights.feed_forward),
        )

    def _heads(self, config: ModelConfig, qkv_O: Tensor) -> Tensor:
        """Queries, keys and values of this rank's heads; where ranks are more than key-value heads, they share one."""
        q_O, k_O, v_O = torch.split(qkv_O, [config.q_size, config.kv_size, config.kv_size])
        count = max(config.num_key_value_heads // self.degree, 1) * config.head_dim
        first = self.rank * config.num_key_value_heads // self.degree * config.head_dim
        return torch.cat([self._rows(q_O), k_O[first : first + count], v_O[first : first + count]])

    def _feed_forward(self, weights: FeedForward) -> FeedForward:
        if isinstance(weights, Experts):
            return replace(weights, experts=self._own_experts(weights.experts))
        bias_2I = weights.gate_up_bias_2I
        return Gated(
            self._halves(weights.gate_up_2IH),
            self._columns(weights.down_HI),
            None if bias_2I is None else self._halves(bias_2I),
            self._once(weights.down_bias_H),
        )

    def _own_experts(self, experts: tuple[Gated | None, ...]) -> tuple[Gated | None, ...]:
        count = len(experts) // self.degree
        own = range(self.rank * count, (self.rank + 1) * count)
        return tuple(expert if e in own else None for e, expert in enumerate(experts))

    def _halves(self, gate_up_2I: Tensor) -> Tensor:
        return torch.cat([self._rows(half) for half in gate_up_2I.chunk(2)])

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.degree)[self.rank].clone()

    def _columns(self, matrix: Tensor) -> Tensor:
        return matrix.chunk(self.degree, dim=1)[self.rank].contiguous().clone()

    def _once(self, bias: Tensor | None) -> Tensor | None:
        """A bias behind a sum over the ranks is one rank's alone."""
        return bias if self.rank == 0 else None


class Group:
    """The sums of rank `shard.rank`, by gloo over the loopback interface; `meeting` is a file that all ranks name.

    A process group of its own: torch's default one, of which a process has one, is neither needed nor touched.
    """

    def __init__(self, shard: Shard, meeting: str) -> None:
        self.shard = shard
        gloo = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = PATIENCE
        store = distributed.FileStore(meeting, shard.degree)
        self._gloo = gloo(store, shard.rank, shard.degree, options)

    def sum(self, x_TH: Tensor) -> Tensor:
        """Over the ranks, in their order: the same bits on each, whatever the number of tokens.

        A ring would add the shares of an element in an order that depends on its place in the message.
        """
        x_TH = x_TH.contiguous()
        shares = [torch.empty_like(x_TH) for _ in range(self.shard.degree)]
        self._gloo.allgather([shares], [x_TH]).wait()
        return torch.stack(shares).sum(0)
