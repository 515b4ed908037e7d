"""A decoder's weights: read from a Hugging Face directory, where every tensor is checked, or drawn from a seed.

Shape letters: H hidden (and heads), V vocabulary, D head size, O rows of the fused query-key-value projection.
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
from schedlab.framework.model.layouts import FeedForward, Read, Shape, layout_of

CPU = torch.device("cpu")

_DERIVED = "rotary_emb.inv_freq"
"""Old Llama checkpoints store this table, which follows from the config."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; the projections that read the same input are fused by rows.

    `post_norm_H` stands before the feed-forward; the norms behind attention and feed-forward are there in a sandwich.
    """

    input_norm_H: Tensor
    qkv_OH: Tensor
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    o_HO: Tensor
    post_norm_H: Tensor
    feed_forward: FeedForward
    o_bias_H: Tensor | None = None
    sinks_H: Tensor | None = None
    attention_norm_H: Tensor | None = None
    feed_forward_norm_H: Tensor | None = None


Keep = Callable[[LayerWeights], LayerWeights]
"""One rank's share of a layer, or the layer in another form."""


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

    names = (
        "input_norm_H", "q_norm_D", "k_norm_D", "post_norm_H", "sinks_H", "attention_norm_H", "feed_forward_norm_H",
    )  # fmt: skip
    layers = tuple(replace(la, **{name: moved(getattr(la, name)) for name in names}) for la in weights.layers)
    embed = moved(weights.embed_VH)
    head = embed if weights.lm_head_VH is weights.embed_VH else moved(weights.lm_head_VH)
    return Weights(embed, layers, moved(weights.norm_H), head)


def load_weights(
    config: ModelConfig, directory: str | Path, dtype: torch.dtype, device: torch.device = CPU, *,
    keep: Keep | None = None,
) -> Weights:  # fmt: skip
    """Read a checkpoint of one or several safetensors files; of each layer what `keep` does.

    ModelError for a missing or unreadable file, a missing tensor, one of another shape, or one that nobody asked for.
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(Path(directory), stack)
        shapes = dict(tensor_shapes(config))
        checkpoint.check(shapes, config)
        return _assemble(config, lambda name: checkpoint.read(name).to(device, dtype), keep)


def random_weights(
    config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device = CPU, draw_on: torch.device | None = None,
    *, keep: Keep | None = None,
) -> Weights:  # fmt: skip
    """Weights drawn for each tensor from (seed, its name): the same in any process and for any order of drawing.

    They are the same on every device of the kind that they are drawn on, by default `device`; one thread of a
    CPU takes some 10 ns a number. On the meta device they have no values.
    """
    place = draw_on or device
    shapes = dict(tensor_shapes(config))
    one = 1.0 - config.norm_offset
    return _assemble(config, lambda name: _draw(name, shapes[name], seed, place, one).to(device, dtype), keep)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the tensors that a checkpoint of this config must hold."""
    hidden, layout = config.hidden_size, layout_of(config)
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for norm in _layer_norms(config):
            yield f"{layer}.{norm}.weight", (hidden,)
        for name, size in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
            yield f"{layer}.self_attn.{name}_proj.weight", (size, hidden)
            if config.qkv_bias:
                yield f"{layer}.self_attn.{name}_proj.bias", (size,)
        if config.qk_norm or config.wide_qk_norm:
            q_size, k_size = (config.q_size, config.kv_size) if config.wide_qk_norm else (config.head_dim,) * 2
            yield f"{layer}.self_attn.q_norm.weight", (q_size,)
            yield f"{layer}.self_attn.k_norm.weight", (k_size,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, config.q_size)
        if config.o_bias:
            yield f"{layer}.self_attn.o_proj.bias", (hidden,)
        if config.attention_sinks:
            yield f"{layer}.self_attn.sinks", (config.num_attention_heads,)
        yield from layout.shapes(config, layer)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


_NORMS = ("input_layernorm", "post_attention_layernorm")
_SANDWICH = ("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


def _layer_norms(config: ModelConfig) -> tuple[str, ...]:
    """Before attention, before the feed-forward, and behind each."""
    return _SANDWICH if config.sandwich_norms else _NORMS


def _assemble(config: ModelConfig, read: Read, keep: Keep | None) -> Weights:
    embed = read("model.embed_tokens.weight")
    layers = tuple(_assemble_layer(config, read, f"model.layers.{i}", keep) for i in range(config.num_hidden_layers))
    head = embed if config.tie_word_embeddings else read("lm_head.weight")
    return Weights(embed, layers, _norm(config, read, "model.norm"), head)


def _assemble_layer(config: ModelConfig, read: Read, layer: str, keep: Keep | None) -> LayerWeights:
    def fused(kind: str, *names: str) -> Tensor:
        return torch.cat([read(f"{layer}.{name}_proj.{kind}") for name in names])

    qkv = ("self_attn.q", "self_attn.k", "self_attn.v")
    before, after, *behind = (_norm(config, read, f"{layer}.{name}") for name in _layer_norms(config))
    heads = config.qk_norm or config.wide_qk_norm
    whole = LayerWeights(
        before,
        qkv_OH=fused("weight", *qkv),
        qkv_bias_O=fused("bias", *qkv) if config.qkv_bias else None,
        q_norm_D=_norm(config, read, f"{layer}.self_attn.q_norm") if heads else None,
        k_norm_D=_norm(config, read, f"{layer}.self_attn.k_norm") if heads else None,
        o_HO=read(f"{layer}.self_attn.o_proj.weight"),
        post_norm_H=after,
        feed_forward=layout_of(config).read(config, read, layer),
        o_bias_H=read(f"{layer}.self_attn.o_proj.bias") if config.o_bias else None,
        sinks_H=read(f"{layer}.self_attn.sinks") if config.attention_sinks else None,
        attention_norm_H=behind[0] if behind else None,
        feed_forward_norm_H=behind[1] if behind else None,
    )
    return whole if keep is None else keep(whole)


def _norm(config: ModelConfig, read: Read, name: str) -> Tensor:
    """A norm's weights; what is added to them is added in float32 at least, where a 16-bit sum would be rounded."""
    weight = read(f"{name}.weight")
    if not config.norm_offset:
        return weight
    return (weight if weight.dtype == torch.float64 else weight.float()) + config.norm_offset


_COLUMNS_FIRST = ("experts.gate_up_proj", "experts.down_proj")


def _draw(name: str, shape: Shape, seed: int, device: torch.device, norm: float) -> Tensor:
    """Standard normal / sqrt(fan-in), so that every layer's output is as large as the residual it joins.

    Queries and keys get a larger gain: random attention is then peaked, tokens depend on distant ones, and greedy
    streams neither repeat nor converge. Norms are `norm`.
    """
    if name.endswith("norm.weight"):
        return torch.full(shape, norm, device=device)
    if device.type == "meta":
        return torch.empty(shape, device=device)
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
    gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
    fan_in = shape[-2] if name.endswith(_COLUMNS_FIRST) else shape[-1]
    return torch.randn(shape, generator=generator, device=device) * (gain / math.sqrt(fan_in))


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
        reason = str(error).removesuffix(f": {path}")
        raise ModelError(f"{path}: expected a whole safetensors file, found: {reason}") from None
