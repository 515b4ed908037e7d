"""Tables of the rotary position embedding, and the ways in which it is stretched to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from schedlab.framework.model.config import LinearScaling, ModelConfig, RopeScaling, Scaling, YarnScaling


def rope_tables(config: ModelConfig, length: int, local: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, float32 [length, head_dim / 2]; `local`: of layers with a window.

    arXiv:2104.09864. The products are rounded to float32 as in the reference implementations: models were trained with
    that.
    """
    theta, scaling = config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta is not None:
        theta, scaling = config.local_rope_theta, None
    lanes = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = _scaled(1.0 / theta ** (lanes / config.head_dim), scaling, theta)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    size = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    return angles.cos() * size, angles.sin() * size


def _scaled(frequencies: Tensor, scaling: Scaling | None, theta: float) -> Tensor:
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    kept = _fast(frequencies, scaling) if isinstance(scaling, RopeScaling) else _many_turns(frequencies, scaling, theta)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _fast(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Share of each frequency that is kept: none of slow waves, all of fast ones (arXiv:2407.21783; Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0, 1)


def _many_turns(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    """Share of each frequency that is kept, a ramp over the pairs' numbers (arXiv:2309.00071, section 3.2)."""
    last = 2 * len(frequencies) - 1
    low, high = (
        len(frequencies) * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    return 1 - ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
