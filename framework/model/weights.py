"""A decoder's weights: read from a Hugging Face directory, or drawn from a seed.

Knows the names and shapes of a checkpoint's tensors and checks every one of them; knows nothing of how they are used.
Shape letters: H hidden, V vocabulary, I intermediate, D head size, O rows of the fused query-key-value projection.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from schedlab.framework.errors import ModelError
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.hf import read_json

Shape = tuple[int, ...]
CPU = torch.device("cpu")

_DERIVED = "rotary_emb.inv_freq"
"""Old Llama checkpoints store this table, which follows from the config."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; the projections that read the same input are fused by rows."""

    input_norm_H: Tensor
    qkv_OH: Tensor
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_HO: Tensor
    post_norm_H: Tensor
    gate_up_2IH: Tensor
    down_HI: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights; `lm_head_VH` is `embed_VH` itself where the model ties them."""

    embed_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    lm_head_VH: Tensor


def all_but_matrices_on(device: torch.device, weights: Weights) -> Weights:
    """`weights` on `device`, but for the layers' matrices and their biases, which stay where they are."""

    def moved(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device)

    names = ("input_norm_H", "q_norm_D", "k_norm_D", "post_norm_H")
    layers = tuple(replace(la, **{name: moved(getattr(la, name)) for name in names}) for la in weights.layers)
    embed = moved(weights.embed_VH)
    head = embed if weights.lm_head_VH is weights.embed_VH else moved(weights.lm_head_VH)
    return Weights(embed, layers, moved(weights.norm_H), head)


def load_weights(config: ModelConfig, directory: str | Path, dtype: torch.dtype, device: torch.device = CPU) -> Weights:
    """Read a checkpoint of one or several safetensors files.

    ModelError for a missing or unreadable file, a missing tensor, one of another shape, or one that nobody asked for.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(directory), stack)
        shapes = dict(tensor_shapes(config))
        checkpoint.check(shapes, config)
        return _assemble(config, lambda name: checkpoint.read(name).to(device, dtype))


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device = CPU, draw_on: torch.device = CPU
) -> Weights:
    """Weights drawn for each tensor from (seed, its name): the same in any process and for any order of drawing.

    Drawn on the CPU they are the same for every device; `draw_on` a GPU is quicker, and the same on that kind of GPU.
    """
    shapes = dict(tensor_shapes(config))
    return _assemble(config, lambda name: _draw(name, shapes[name], seed, draw_on).to(device, dtype))


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the tensors that a checkpoint of this config must hold."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        for name, size in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
            yield f"{layer}.self_attn.{name}_proj.weight", (size, hidden)
            if config.qkv_bias:
                yield f"{layer}.self_attn.{name}_proj.bias", (size,)
        if config.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (config.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (config.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, config.q_size)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _assemble(config: ModelConfig, read: Callable[[str], Tensor]) -> Weights:
    embed = read("model.embed_tokens.weight")
    layers = tuple(_assemble_layer(config, read, f"model.layers.{i}") for i in range(config.num_hidden_layers))
    head = embed if config.tie_word_embeddings else read("lm_head.weight")
    return Weights(embed, layers, read("model.norm.weight"), head)


def _assemble_layer(config: ModelConfig, read: Callable[[str], Tensor], layer: str) -> LayerWeights:
    def fused(kind: str, *names: str) -> Tensor:
        return torch.cat([read(f"{layer}.{name}_proj.{kind}") for name in names])

    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    return LayerWeights(
        input_norm_H=read(f"{layer}.input_layernorm.weight"),
        qkv_OH=fused("weight", *qkv),
        qkv_bias_O=fused("bias", *qkv) if config.qkv_bias else None,
        q_norm_D=read(f"{layer}.self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm_D=read(f"{layer}.self_attn.k_norm.weight") if config.qk_norm else None,
        o_HO=read(f"{layer}.self_attn.o_proj.weight"),
        post_norm_H=read(f"{layer}.post_attention_layernorm.weight"),
        gate_up_2IH=fused("weight", "mlp.gate", "mlp.up"),
        down_HI=read(f"{layer}.mlp.down_proj.weight"),
    )


def _draw(name: str, shape: Shape, seed: int, device: torch.device) -> Tensor:
    """Standard normal / sqrt(fan-in), so that every layer's output is as large as the residual it joins.

    Queries and keys get a larger gain: random attention is then peaked, tokens depend on distant ones, and greedy
    streams neither repeat nor converge.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
    gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    return torch.randn(shape, generator=generator, device=device) * (gain / math.sqrt(shape[-1]))


class _Checkpoint:
    """The safetensors files of a directory as one mapping from tensor names; open as long as its stack."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in self._paths(directory):
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if not name.endswith(_DERIVED):
                    self._files[name] = file

    @staticmethod
    def _paths(directory: Path) -> list[Path]:
        index = directory / "model.safetensors.index.json"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{index}: weight_map: expected tensor names and their files, found {weight_map}")
            return [directory / name for name in sorted(set(weight_map.values()))]
        if paths := sorted(directory.glob("*.safetensors")):
            return paths
        raise ModelError(f"{directory}: expected *.safetensors files, found none")

    def check(self, shapes: dict[str, Shape], config: ModelConfig) -> None:
        for name, expected in shapes.items():
            file = self._files.get(name)
            found = None if file is None else tuple(file.get_slice(name).get_shape())
            if found != expected:
                stated = "no such tensor" if found is None else list(found)
                raise ModelError(f"{self._directory}: tensor {name}: expected shape {list(expected)}, found {stated}")
        leftover = sorted(set(self._files) - set(shapes))
        if config.tie_word_embeddings and "lm_head.weight" in leftover:
            self._check_tied("lm_head.weight", "model.embed_tokens.weight")
            leftover.remove("lm_head.weight")
        if leftover:
            names = ", ".join(leftover[:3]) + (f" and {len(leftover) - 3} more" if len(leftover) > 3 else "")
            raise ModelError(
                f"{self._directory}: expected the tensors of {config.architecture} alone, found also {names}"
            )

    def _check_tied(self, head: str, embed: str) -> None:
        if not torch.equal(self._files[head].get_tensor(head), self._files[embed].get_tensor(embed)):
            raise ModelError(f"{self._directory}: tensor {head}: expected {embed} (tied), found other values")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ModelError(f"{self._directory}: tensor {name}: expected bf16, fp16 or fp32, found {tensor.dtype}")
        return tensor


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: expected a whole safetensors file, found: {error}") from None
