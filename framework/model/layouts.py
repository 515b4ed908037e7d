"""What follows attention in a layer as each family's checkpoints hold it: names and shapes of tensors, and our form.

Shape letters: E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from schedlab.framework.model.config import ModelConfig

Shape = tuple[int, ...]
Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Gated:
    """A gated feed-forward; the rows of the gate come first, then those of what it gates."""

    gate_up_2IH: Tensor
    down_HI: Tensor
    gate_up_bias_2I: Tensor | None = None
    down_bias_H: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """A router and what it chooses among; None stands for an expert of another rank."""

    router_EH: Tensor
    router_bias_E: Tensor | None
    experts: tuple[Gated | None, ...]


FeedForward = Gated | Experts


class Layout(Protocol):
    """How a family names these tensors. `layer` is the prefix of a layer's names; `read` gives a tensor by its name."""

    def shapes(self, config: ModelConfig, layer: str) -> Iterator[tuple[str, Shape]]: ...

    def read(self, config: ModelConfig, read: Read, layer: str) -> FeedForward: ...


class Dense:
    """Three matrices: a Llama's."""

    def shapes(self, config: ModelConfig, layer: str) -> Iterator[tuple[str, Shape]]:
        yield from _gated_shapes(f"{layer}.mlp", NAMES, config.hidden_size, config.intermediate_size)

    def read(self, config: ModelConfig, read: Read, layer: str) -> FeedForward:
        return _gated(read, f"{layer}.mlp", NAMES)


@dataclass(frozen=True, slots=True)
class Separate:
    """Three matrices an expert, under names of their own."""

    block: str
    names: tuple[str, str, str]

    def shapes(self, config: ModelConfig, layer: str) -> Iterator[tuple[str, Shape]]:
        yield f"{layer}.{self.block}.gate.weight", (config.num_experts, config.hidden_size)
        for expert in self._experts(config, layer):
            yield from _gated_shapes(expert, self.names, config.hidden_size, config.moe_intermediate_size)

    def read(self, config: ModelConfig, read: Read, layer: str) -> FeedForward:
        experts = tuple(_gated(read, expert, self.names) for expert in self._experts(config, layer))
        return Experts(read(f"{layer}.{self.block}.gate.weight"), None, experts)

    def _experts(self, config: ModelConfig, layer: str) -> list[str]:
        return [f"{layer}.{self.block}.experts.{e}" for e in range(config.num_experts)]


class Stacked:
    """One tensor of all experts for each of two matrices: Granite's."""

    def shapes(self, config: ModelConfig, layer: str) -> Iterator[tuple[str, Shape]]:
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        yield f"{layer}.block_sparse_moe.router.layer.weight", (experts, hidden)
        yield f"{layer}.block_sparse_moe.input_linear.weight", (experts, 2 * inner, hidden)
        yield f"{layer}.block_sparse_moe.output_linear.weight", (experts, hidden, inner)

    def read(self, config: ModelConfig, read: Read, layer: str) -> FeedForward:
        block = f"{layer}.block_sparse_moe"
        matrices = (read(f"{block}.{name}_linear.weight").unbind() for name in ("input", "output"))
        experts = tuple(Gated(*pair) for pair in zip(*matrices, strict=True))
        return Experts(read(f"{block}.router.layer.weight"), None, experts)


class Transposed:
    """One tensor for each of two matrices, columns before rows, gate and up interleaved, with biases: gpt-oss's."""

    def shapes(self, config: ModelConfig, layer: str) -> Iterator[tuple[str, Shape]]:
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        yield f"{layer}.mlp.router.weight", (experts, hidden)
        yield f"{layer}.mlp.router.bias", (experts,)
        yield f"{layer}.mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
        yield f"{layer}.mlp.experts.gate_up_proj_bias", (experts, 2 * inner)
        yield f"{layer}.mlp.experts.down_proj", (experts, inner, hidden)
        yield f"{layer}.mlp.experts.down_proj_bias", (experts, hidden)

    def read(self, config: ModelConfig, read: Read, layer: str) -> FeedForward:
        stem = f"{layer}.mlp.experts"
        gate_up_EH2I, bias_E2I = read(f"{stem}.gate_up_proj"), read(f"{stem}.gate_up_proj_bias")
        columns = (
            _halves_apart(gate_up_EH2I).transpose(1, 2), read(f"{stem}.down_proj").transpose(1, 2),
            _halves_apart(bias_E2I), read(f"{stem}.down_proj_bias"),
        )  # fmt: skip
        experts = tuple(Gated(*(tensor.contiguous() for tensor in each)) for each in zip(*columns, strict=True))
        return Experts(read(f"{layer}.mlp.router.weight"), read(f"{layer}.mlp.router.bias"), experts)


NAMES = ("gate_proj", "up_proj", "down_proj")
_LAYOUTS: dict[str, Layout] = {
    "mixtral": Separate("block_sparse_moe", ("w1", "w3", "w2")),
    "granitemoe": Stacked(),
    "gpt_oss": Transposed(),
}


def layout_of(config: ModelConfig) -> Layout:
    """The architecture's; where it has none of its own, Llama's, or Qwen's if there are experts."""
    return _LAYOUTS.get(config.architecture) or (Separate("mlp", NAMES) if config.num_experts else Dense())


def _gated_shapes(stem: str, names: tuple[str, str, str], hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    for name, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        yield f"{stem}.{name}.weight", shape


def _gated(read: Read, stem: str, names: tuple[str, str, str]) -> Gated:
    gate, up, down = (read(f"{stem}.{name}.weight") for name in names)
    return Gated(torch.cat([gate, up]), down)


def _halves_apart(interleaved: Tensor) -> Tensor:
    """Even ones of the last dimension, then odd ones."""
    return torch.cat([interleaved[..., ::2], interleaved[..., 1::2]], dim=-1)
