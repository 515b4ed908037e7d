"""Shapes of the supported decoders: what a model consists of, its parameters, and the bytes of a token's KV cache.

A preset's keys become one here, a checkpoint's config.json in `hf.py`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

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
class LinearScaling:
    """Every rotary frequency divided by `factor` (arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies that turn less than `beta_slow` times in the original length divided by `factor`, those that turn
    more than `beta_fast` times kept, a ramp between, its ends whole numbers of pairs if `truncate`; cos and sin times
    `attention_factor` (arXiv:2309.00071)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


Scaling: TypeAlias = RopeScaling | LinearScaling | YarnScaling
SCALINGS: Mapping[str, type[Scaling]] = {"llama3": RopeScaling, "linear": LinearScaling, "yarn": YarnScaling}
"""By `rope_type`; a preset that names none means llama3."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder's shape; field names are those of Hugging Face's config.json where it has them.

    dtype            of the weights as published (or drawn); what the engine computes in is the executor's choice
    sliding_window   keys that a query sees, its own included, in every layer; None for all
    layer_windows    the same layer by layer, where layers differ; empty where they do not
    qkv_bias, qk_norm    what Qwen2 and Qwen3 add
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
    rope_scaling: Scaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_windows: tuple[int | None, ...] = ()
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
        self._check_windows()
        if self.dtype not in DTYPE_BYTES:
            raise ModelError(f"model.dtype: expected one of {', '.join(DTYPE_BYTES)}, found {self.dtype}")

    def _check_windows(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"model.sliding_window: expected null or at least 1, found {self.sliding_window}")
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise ModelError(f"model.layer_windows: expected each null or at least 1, found {window}")
        if self.layer_windows and len(self.layer_windows) != self.num_hidden_layers:
            raise ModelError(
                f"model.layer_windows: expected one for each of {self.num_hidden_layers} layers, "
                f"found {len(self.layer_windows)}"
            )
        if self.layer_windows and self.sliding_window is not None:
            raise ModelError("model.sliding_window: expected null beside layer_windows, found both")

    @classmethod
    def from_mapping(cls, keys: Mapping[str, Any]) -> ModelConfig:
        """From plain keys (a preset of conf/model); an unknown or missing key is a ModelError."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(keys) - known):
            raise ModelError(f"model.{unknown[0]}: no such key; expected some of {', '.join(sorted(known))}")
        values = dict(keys)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = scaling_of(dict(values["rope_scaling"]))
        for name in ("eos_token_ids", "layer_windows"):
            values[name] = tuple(values.get(name) or ())
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"model: {error}") from None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return self.layer_windows or (self.sliding_window,) * self.num_hidden_layers

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


def scaling_of(keys: dict[str, Any]) -> Scaling:
    """From a preset's mapping; `rope_type` says which."""
    kind = keys.pop("rope_type", "llama3")
    if kind not in SCALINGS:
        raise ModelError(f"model.rope_scaling.rope_type: expected one of {', '.join(SCALINGS)}, found {kind}")
    try:
        return SCALINGS[kind](**keys)
    except TypeError as error:
        raise ModelError(f"model.rope_scaling: {error}") from None
