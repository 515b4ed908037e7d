"""Tiny random models of transformers, as objects and as checkpoints: the independent reference of these tests."""

from __future__ import annotations

import copy
import math
from functools import cache
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional as F

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _grouped(groups: int) -> dict:
    return {"num_attention_heads": 2 * groups, "num_key_value_heads": 2, "hidden_size": 24 * groups}


VARIANTS = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "qwen2-layers": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-layers": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": LAYERS}),
    "yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "hidden_size": 72}),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "hidden_size": 72,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.25,
            "logits_scaling": 6.0,
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 7}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 7,
            "layer_types": LAYERS,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    **{f"group-{g}": ("Llama", _grouped(g)) for g in (1, 2, 5, 7, 8)},
}


@cache
def reference(variant: str) -> transformers.PreTrainedModel:
    """A random model in float32 whose greedy streams wander: weights as large as their inputs, uneven norms."""
    family, changes = VARIANTS[variant]
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**{**SHAPE, **copy.deepcopy(changes)}, use_cache=False)
    if family == "GptOss":
        config._attn_implementation = "eager"  # the one that has sinks
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if "num_experts_per_tok" in changes:
        model.set_experts_implementation("eager")  # which takes float64 too
    generator = torch.Generator().manual_seed(len(variant))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                size = 1.6 if "q_norm" in name or "k_norm" in name else 1.0  # they undo the gain of queries and keys
                parameter.copy_(size * (1 + 0.2 * noise) - float(family == "Gemma3"))
            else:
                gain = 2.0 if "q_proj.weight" in name or "k_proj.weight" in name else 1.0
                parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
    return model


def save(variant: str, directory: Path, dtype: torch.dtype = torch.float32, **kwargs) -> Path:
    family = VARIANTS[variant][0]
    made = getattr(transformers, f"{family}ForCausalLM")(reference(variant).config).to(dtype)
    made.load_state_dict(reference(variant).state_dict())
    made.save_pretrained(directory, **kwargs)
    return directory


def reference_logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), attention_mask=None).logits[0]


@cache
def double(variant: str) -> nn.Module:
    """The model in float64 with float64 norms, which transformers computes in float32 whatever the model's dtype."""
    model = copy.deepcopy(reference(variant)).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_of(module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _router_of(module, VARIANTS[variant][1].get("norm_topk_prob", variant != "olmoe"))
    return model


def _norm_of(module: nn.Module):
    offset, eps = (1.0, module.eps) if hasattr(module, "eps") else (0.0, module.variance_epsilon)
    return lambda x: F.rms_norm(x, module.weight.shape, module.weight + offset, eps)


def _router_of(module: nn.Module, renormalises: bool):
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), module.weight, getattr(module, "bias", None))
        weights, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True) if renormalises else weights, chosen

    return forward


def greedy(variant: str, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The reference's next `count` tokens, and the gap between its two largest logits at each."""
    tokens, gaps = list(prompt), []
    for _ in range(count):
        best = reference_logits(reference(variant), tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], gaps


def assert_same_stream(ours: list[int], expected: list[int], gaps: list[float]) -> None:
    """Equal, or different from a place on where float32 could not tell the two likeliest tokens apart."""
    assert len(ours) == len(expected)
    for ours_i, expected_i, gap in zip(ours, expected, gaps, strict=True):
        if ours_i != expected_i:
            assert gap < 1e-4, f"{ours} is not {expected}"
            return
