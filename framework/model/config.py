"""Shapes of the supported decoders, from a preset or from a checkpoint's config.json.

Knows what a model consists of, how many parameters it has and what a token of its KV cache weighs; knows nothing of
tensors (it imports no torch) and nothing of speed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ModelError

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip
"""Bytes an element of each dtype name."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies (https://arxiv.org/abs/2407.21783, section 3.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder's shape; field names are those of Hugging Face's config.json where it has them.

    `dtype` is the dtype of the weights as published (or drawn); what the engine computes in is the executor's choice.
    `sliding_window` counts keys including the query's own, None for full attention. `qkv_bias` and `qk_norm` are what
    Qwen2 and Qwen3 add.
    """

    architecture: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            if (size := getattr(self, name)) < 1:
                raise ModelError(f"model.{name}: expected at least 1, found {size}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"model.num_attention_heads: expected a multiple of num_key_value_heads = {self.num_key_value_heads}, "
                f"found {self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ModelError(f"model.head_dim: expected an even number, found {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"model.sliding_window: expected null or at least 1, found {self.sliding_window}")
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"model.dtype: expected one of {', '.join(DTYPE_BYTES)}, found {self.dtype}")

    @classmethod
    def from_mapping(cls, keys: Mapping[str, Any]) -> ModelConfig:
        """From plain keys (a preset of conf/model); an unknown or missing key is a ModelError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(keys) - known):
            raise ModelError(f"model.{unknown[0]}: no such key; expected some of {', '.join(sorted(known))}")
        values = dict(keys)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        values["eos_token_ids"] = tuple(values.get("eos_token_ids") or ())
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"model: {error}") from None

    @classmethod
    def from_hf(cls, directory: str | Path) -> ModelConfig:
        """From a Hugging Face model directory; an architecture or variant we do not compute is a ModelError."""
        path = Path(directory) / "config.json"
        return _from_hf(read_json(path), path)

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    def num_layer_parameters(self) -> int:
        """Weights of one layer: attention, feed-forward and norms."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        bias = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + norms + 3 * self.hidden_size * self.intermediate_size

    def num_parameters(self) -> int:
        """All weights, a tied embedding counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.num_layer_parameters() + self.hidden_size

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """Bytes of keys and values of one token over all layers, in `kv_dtype` (default: the model's dtype)."""
        width = DTYPE_BYTES[kv_dtype or self.dtype]
        return int(2 * self.num_hidden_layers * self.kv_size * width)


_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory, or a ModelError of one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: expected a readable file of a Hugging Face model, found: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON, found: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _from_hf(hf: dict[str, Any], path: Path) -> ModelConfig:
    architecture = _architecture(hf, path)
    _refuse_variants(hf, path)
    heads = _required(hf, "num_attention_heads", path)
    hidden = _required(hf, "hidden_size", path)
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    try:
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            num_hidden_layers=_required(hf, "num_hidden_layers", path),
            num_attention_heads=heads,
            num_key_value_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hidden // heads,
            intermediate_size=_required(hf, "intermediate_size", path),
            vocab_size=_required(hf, "vocab_size", path),
            max_position_embeddings=_required(hf, "max_position_embeddings", path),
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000.0),
            rope_scaling=_rope_scaling(rope, path),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(hf, architecture, path),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(hf, path.with_name("generation_config.json")),
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _architecture(hf: dict[str, Any], path: Path) -> str:
    names = hf.get("architectures") or [hf.get("model_type", "nothing")]
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    raise ModelError(f"{path}: architectures: expected one of {', '.join(_ARCHITECTURES)}, found {', '.join(names)}")


def _required(hf: dict[str, Any], key: str, path: Path) -> Any:
    if hf.get(key) is None:
        raise ModelError(f"{path}: {key}: expected a value, found none")
    return hf[key]


def _refuse_variants(hf: dict[str, Any], path: Path) -> None:
    computed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "quantization_config": (None,),
        "partial_rotary_factor": (1.0,),
    }
    for key, values in computed.items():
        if (found := hf.get(key)) is not None and found not in values:
            raise ModelError(f"{path}: {key}: expected {values[0]} (nothing else is supported), found {found}")


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"{path}: rope_type: expected default or llama3, found {kind}")
    names = [field.name for field in fields(RopeScaling)]
    return RopeScaling(**{name: _required(rope, name, path) for name in names})


def _sliding_window(hf: dict[str, Any], architecture: str, path: Path) -> int | None:
    window: int | None = hf.get("sliding_window")
    if architecture == "llama" or (architecture.startswith("qwen") and not hf.get("use_sliding_window", False)):
        return None
    if architecture == "mistral" or window is None:
        return window
    layers: int = hf["num_hidden_layers"]
    full = hf.get("max_window_layers", layers)  # layers before it attend to everything
    if full >= layers:
        return None
    if full > 0:
        raise ModelError(f"{path}: max_window_layers: expected 0 or at least {layers} (no mixed layers), found {full}")
    return window


def _eos_token_ids(hf: dict[str, Any], generation_path: Path) -> tuple[int, ...]:
    generation = read_json(generation_path) if generation_path.exists() else {}
    ids: dict[int, None] = {}
    for found in (hf.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(dict.fromkeys(found if isinstance(found, list) else [] if found is None else [found]))
    return tuple(ids)
