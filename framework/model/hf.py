"""A checkpoint's config.json, read as transformers reads it: what a key means, and what an absent one does.

Each architecture's defaults are those of its configuration class in transformers; a key that is there and null is null.
What we do not compute is refused in one line that names the key. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedlab.framework.errors import ModelError
from schedlab.framework.model.config import LinearScaling, ModelConfig, RopeScaling, Scaling, YarnScaling

Keys = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name here, what absent keys mean, of which keys one value is computed, and what it is
    beside a Llama."""

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    computed: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)


_STREAM = {"bos_token_id": 1, "eos_token_id": 2}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_BIASED = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _STREAM),
    "MistralForCausalLM": Family("mistral", {**_STREAM, "num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, shape={"qkv_bias": True}),
    "Qwen3ForCausalLM": Family("qwen3", {**_QWEN, "head_dim": 128}, shape={"qk_norm": True}),
    "MixtralForCausalLM": Family("mixtral", {
        **_STREAM, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", {
        "num_key_value_heads": 4, "sliding_window": 4096, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1,
    }, {"mlp_only_layers": [], "decoder_sparse_step": 1}, {"qk_norm": True}),
    "OlmoeForCausalLM": Family("olmoe", {
        "rms_norm_eps": 1e-5, "eos_token_id": 50279, "num_experts": 64, "num_experts_per_tok": 8,
        "norm_topk_prob": False, "clip_qkv": None,
    }, {"clip_qkv": None}, {"wide_qk_norm": True}),
    "GraniteMoeForCausalLM": Family("granitemoe", {
        **_STREAM, "num_local_experts": 8, "num_experts_per_tok": 2, "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0, "attention_multiplier": 1.0, "logits_scaling": 1.0,
    }),
    "GptOssForCausalLM": Family("gpt_oss", {
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128,
        "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
    }, {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
       {**_BIASED, "attention_sinks": True, "activation": "clamped_swiglu"}),
    "Gemma3ForCausalLM": Family("gemma3", {
        "bos_token_id": 2, "eos_token_id": 1, "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True,
        "sliding_window": 4096, "sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256, "final_logit_softcapping": None, "attn_logit_softcapping": None,
        "use_bidirectional_attention": False, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    }, {"hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": None, "attn_logit_softcapping": None,
        "use_bidirectional_attention": False},
       {"qk_norm": True, "activation": "gelu_tanh", "sandwich_norms": True, "norm_offset": 1.0}),
}  # fmt: skip
"""By the name in `architectures`."""
_ALL = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None,
}  # fmt: skip
_COMPUTED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # fmt: skip


def read_json(path: Path) -> Keys:
    """The object in a JSON file of a model directory, or a ModelError of one line."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: expected a readable file of a Hugging Face model, found: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: expected JSON, found: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_config(directory: str | Path) -> ModelConfig:
    """The shape that a model directory's config.json states; stop tokens also from its generation_config.json.

    ModelError for an architecture or variant that is not computed here.
    """
    path = Path(directory) / "config.json"
    said = read_json(path)
    generation_path = path.with_name("generation_config.json")
    generation = read_json(generation_path) if generation_path.exists() else {}
    try:
        family = _family(said)
        if said.get("rope_parameters") is None:
            said.pop("rope_parameters", None)  # a null is filled in too
        return _config({**_ALL, **family.defaults, **said}, family, generation)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def _family(said: Keys) -> Family:
    names = said.get("architectures") or [said.get("model_type", "nothing")]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ModelError(f"architectures: expected one of {', '.join(FAMILIES)}, found {', '.join(names)}")


def _config(keys: Keys, family: Family, generation: Keys) -> ModelConfig:
    for key, value in {**_COMPUTED, **family.computed}.items():
        found = keys[key]
        if found is not None and found != value:
            found = found.get("quant_method", found) if isinstance(found, dict) else found
            raise ModelError(f"{key}: expected {value} (nothing else is supported), found {found}")
    heads, hidden = _required(keys, "num_attention_heads"), _required(keys, "hidden_size")
    layers = _required(keys, "num_hidden_layers")
    rope = _rope(keys)
    return ModelConfig(
        architecture=family.name,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if keys.get("num_key_value_heads") is None else keys["num_key_value_heads"],
        head_dim=hidden // heads if keys.get("head_dim") is None else keys["head_dim"],
        intermediate_size=_required(keys, "intermediate_size"),
        vocab_size=_required(keys, "vocab_size"),
        max_position_embeddings=_required(keys, "max_position_embeddings"),
        rope_theta=float(_required(rope, "rope_theta")),
        rope_scaling=_scaling(rope, keys),
        rms_norm_eps=_required(keys, "rms_norm_eps"),
        tie_word_embeddings=_required(keys, "tie_word_embeddings"),
        dtype=str(keys.get("dtype") or keys.get("torch_dtype") or "float32"),
        bos_token_id=keys.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(keys, generation),
        **_windows(_layer_windows(keys, family.name, layers)),
        **_experts(keys),
        **_multipliers(keys, family.name, hidden),
        **family.shape,
    )


def _required(keys: Keys, key: str) -> Any:
    if keys.get(key) is None:
        raise ModelError(f"{key}: expected a value, found none")
    return keys[key]


def _experts(keys: Keys) -> Keys:
    count = keys.get("num_local_experts") or keys.get("num_experts")
    if count is None:
        return {}
    return {
        "num_experts": count,
        "num_experts_per_tok": _required(keys, "num_experts_per_tok"),
        "moe_intermediate_size": keys.get("moe_intermediate_size") or _required(keys, "intermediate_size"),
        "norm_topk_prob": keys.get("norm_topk_prob", True),
    }


def _multipliers(keys: Keys, name: str, hidden: int) -> Keys:
    if name == "gemma3":
        return {
            "embedding_multiplier": hidden**0.5,
            "attention_multiplier": _required(keys, "query_pre_attn_scalar") ** -0.5,
            "local_rope_theta": _local_theta(keys),
        }
    if name != "granitemoe":
        return {}
    multipliers = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")
    return {**{key: _required(keys, key) for key in multipliers}, "logits_divisor": _required(keys, "logits_scaling")}


# ---- rotary embedding ----


def _rope(keys: Keys) -> Keys:
    """The rotary keys from wherever this version of the format has them: one of two mappings, or the top."""
    rope = dict(keys.get("rope_scaling") or keys.get("rope_parameters") or {})
    if "full_attention" in rope or "sliding_attention" in rope:
        rope = dict(rope.get("full_attention") or {})
    if (found := rope.get("partial_rotary_factor")) not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor: expected 1.0 (nothing else is supported), found {found}")
    rope.setdefault("rope_theta", keys["rope_theta"])
    return rope


def _local_theta(keys: Keys) -> float:
    """The base in layers with a window, which may not be scaled."""
    local = (keys.get("rope_parameters") or {}).get("sliding_attention") or {}
    kind = local.get("rope_type") or local.get("type") or "default"
    if kind != "default":
        raise ModelError(f"rope_parameters.sliding_attention.rope_type: expected default, found {kind}")
    return float(local.get("rope_theta") or _required(keys, "rope_local_base_freq"))


def _scaling(rope: Keys, keys: Keys) -> Scaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(float(_required(rope, "factor")))
    length = rope.get("original_max_position_embeddings") or keys["max_position_embeddings"]
    if kind == "yarn":
        return _yarn(rope, length, keys["max_position_embeddings"])
    if kind != "llama3":
        raise ModelError(f"rope_type: expected default, linear, llama3 or yarn, found {kind}")
    factors = {name: _required(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return RopeScaling(**factors, original_max_position_embeddings=length)


def _yarn(rope: Keys, length: int, longest: int) -> YarnScaling:
    factor = rope.get("factor") or longest / length
    attention = rope.get("attention_factor")
    if attention is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor, 1.0)
    return YarnScaling(
        float(factor), length, float(attention), rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0,
        rope.get("truncate", True),
    )  # fmt: skip


def _mscale(factor: float, weight: float) -> float:
    """How much larger scores become in a context stretched by `factor` (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


# ---- windows ----


def _windows(windows: tuple[int | None, ...]) -> Keys:
    """As the shorthand where all layers agree."""
    same = len(set(windows)) == 1
    return {"sliding_window": windows[0]} if same else {"layer_windows": windows}


_ALIKE = ("llama", "mistral", "mixtral", "qwen3_moe", "olmoe", "granitemoe")
"""Families whose layers all see the same."""


def _layer_windows(keys: Keys, name: str, layers: int) -> tuple[int | None, ...]:
    window: int | None = keys.get("sliding_window")
    kinds = keys.get("layer_types")
    if name.startswith("qwen") and not keys.get("use_sliding_window"):
        window = None
    if name in _ALIKE:
        alike = (window if name in ("mistral", "mixtral", "qwen3_moe") else None,) * layers
        if kinds is not None and windows_of(kinds, window, layers) != alike:
            raise ModelError(f"layer_types: expected none in a {name}, whose layers are alike, found {kinds}")
        return alike
    if kinds is None:
        kinds = ["full_attention" if _full(keys, name, i) else "sliding_attention" for i in range(layers)]
    return windows_of(kinds, window, layers)


def _full(keys: Keys, name: str, layer: int) -> bool:
    """Whether a layer sees everything where no key lists it."""
    if name == "gpt_oss":
        return bool(layer % 2)
    if name == "gemma3":
        return (layer + 1) % int(_required(keys, "sliding_window_pattern")) == 0
    return layer < int(_required(keys, "max_window_layers"))


def windows_of(kinds: list[str], window: int | None, layers: int) -> tuple[int | None, ...]:
    """Layer by layer; ModelError for a kind that is neither, or another number of them than layers."""
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ModelError(f"layer_types: expected each one of {', '.join(known)}, found {unknown[0]}")
    if len(kinds) != layers:
        raise ModelError(f"layer_types: expected one for each of {layers} layers, found {len(kinds)}")
    return tuple(known[kind] for kind in kinds)


def _eos_token_ids(keys: Keys, generation: Keys) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for found in (keys.get("eos_token_id"), generation.get("eos_token_id")):
        ids.update(dict.fromkeys(found if isinstance(found, list) else [] if found is None else [found]))
    return tuple(ids)
