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
    local_rope_theta     base of the rotation, unscaled, in layers with a window; None: as in the others
    num_experts      of each layer, `num_experts_per_tok` of which compute a token, each `moe_intermediate_size` wide; 0
                     for one feed-forward of `intermediate_size`
    shared_intermediate_size     width of the expert that computes every token, 0 for none
    routing_skew     how unevenly tokens choose, for the cost model: expert e is as popular as (e + 1) ** -routing_skew
    router_scores    softmax or sigmoid, what turns a router's products into shares
    expert_dtype     of the experts' matrices where the checkpoint holds them in another type than the rest; for the
                     cost model
    num_dense_layers     layers before the first with experts, each with one feed-forward
    kv_lora_rank     numbers a token that all heads' keys and values come from (DeepSeek's latent attention), 0 for keys
                     and values of their own; then `q_lora_rank` such numbers of queries, `qk_rope_head_dim` rotated
                     ones beside the `head_dim` others of a query and a key, and `v_head_dim` of a value
    norm_topk_prob   whether the weights of a token's experts add up to 1
    qkv_bias, o_bias, mlp_bias   of the projections into and out of attention, and of router and experts
    qk_norm, wide_qk_norm    a norm of each head of queries and keys, or of all heads together
    attention_sinks  a learnt score a head that takes its share of every softmax
    activation       of the gate: silu, gelu_tanh or clamped_swiglu
    sandwich_norms   a norm also behind attention and feed-forward; norm_offset is added to every norm's weights
    embedding_multiplier, residual_multiplier, logits_divisor, attention_multiplier   what embeddings, what a layer's
                     halves add, and scores are multiplied by (None: head_dim ** -0.5), and what logits are divided by
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
    local_rope_theta: float | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    shared_intermediate_size: int = 0
    routing_skew: float = 0.0
    router_scores: str = "softmax"
    expert_dtype: str | None = None
    num_dense_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    o_bias: bool = False
    mlp_bias: bool = False
    wide_qk_norm: bool = False
    attention_sinks: bool = False
    activation: str = "silu"
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_divisor: float = 1.0
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
        self._check_experts()
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"model.activation: expected one of {', '.join(ACTIVATIONS)}, found {self.activation}")
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

    def _check_experts(self) -> None:
        most = self.num_hidden_layers if self.num_experts else 0
        if not 0 <= self.num_dense_layers <= most:
            raise ModelError(f"model.num_dense_layers: expected 0 to {most}, found {self.num_dense_layers}")
        if not self.num_experts:
            return
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ModelError(
                f"model.num_experts_per_tok: expected 1 to num_experts = {self.num_experts}, "
                f"found {self.num_experts_per_tok}"
            )
        if self.moe_intermediate_size < 1:
            raise ModelError(f"model.moe_intermediate_size: expected at least 1, found {self.moe_intermediate_size}")
        if self.router_scores not in ("softmax", "sigmoid"):
            raise ModelError(f"model.router_scores: expected softmax or sigmoid, found {self.router_scores}")
        if self.routing_skew < 0:
            raise ModelError(f"model.routing_skew: expected at least 0, found {self.routing_skew}")

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

    @property
    def attention_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_multiplier is None else self.attention_multiplier

    def num_vector_parameters(self) -> int:
        """Of one layer what is no matrix: norms, sinks, and biases but those of queries, keys and values."""
        hidden = self.hidden_size
        heads = self.q_size + self.kv_size if self.wide_qk_norm else 2 * self.head_dim * self.qk_norm
        norms = (4 if self.sandwich_norms else 2) * hidden + heads
        experts = self.num_experts * (2 * self.moe_intermediate_size + hidden + 1) * self.mlp_bias
        norms += self.q_lora_rank + self.kv_lora_rank
        return norms + hidden * self.o_bias + self.num_attention_heads * self.attention_sinks + experts

    def num_attention_weights(self, split: int = 1) -> int:
        """Of one layer's matrices, on one of `split` devices that share the heads."""
        hidden, heads = self.hidden_size, self.num_attention_heads // split
        if not self.kv_lora_rank:
            kv_heads = max(self.num_key_value_heads // split, 1)
            return hidden * self.head_dim * (2 * heads + 2 * kv_heads)
        shared = hidden * (self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim)
        query = self.q_lora_rank * (self.head_dim + self.qk_rope_head_dim)
        return shared + heads * (
            query + self.kv_lora_rank * (self.head_dim + self.v_head_dim) + self.v_head_dim * hidden
        )

    def num_feed_forward_parameters(self, experts: int) -> int:
        """Of all layers' feed-forwards, with so many of each layer's experts; what is no matrix is not counted."""
        hidden, inner = self.hidden_size, self.moe_intermediate_size
        if not self.num_experts:
            return self.num_hidden_layers * 3 * hidden * self.intermediate_size
        router = self.num_experts * hidden
        sparse = 3 * hidden * (self.shared_intermediate_size + experts * inner) + router
        dense = self.num_dense_layers * 3 * hidden * self.intermediate_size
        return dense + (self.num_hidden_layers - self.num_dense_layers) * sparse

    def num_parameters(self, active: bool = False) -> int:
        """All weights, a tied embedding counted once; `active`: of each layer's experts those of one token alone."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        experts = self.num_experts_per_tok if active else self.num_experts
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        idle = (self.num_experts - experts) * (2 * self.moe_intermediate_size + self.hidden_size) * self.mlp_bias
        layer = self.num_attention_weights() + self.num_vector_parameters() + bias - idle
        feed_forward = self.num_feed_forward_parameters(experts)
        return embeddings + self.num_hidden_layers * layer + feed_forward + self.hidden_size

    def kv_bytes_per_token(self, kv_dtype: str | None = None) -> int:
        """Bytes of keys and values of one token over all layers, in `kv_dtype` (default: the model's dtype)."""
        width = DTYPE_BYTES[kv_dtype or self.dtype]
        return int(self.num_hidden_layers * self.kv_elements() * width)

    def kv_elements(self, split: int = 1) -> int:
        """What one layer keeps of a token on one of `split` devices: keys and values, or what they all come from."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * max(self.num_key_value_heads // split, 1) * self.head_dim

    def virtual_only(self) -> tuple[str, object] | None:
        """The key of what no real engine computes, and what such an engine expects of it; None if there is none."""
        keys = ("kv_lora_rank", "num_dense_layers", "shared_intermediate_size", "router_scores", "expert_dtype")
        plain = {field.name: field.default for field in fields(self)}
        return next(((key, plain[key]) for key in keys if getattr(self, key) != plain[key]), None)


ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
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
