"""Tables of the rotary position embedding. Knows positions and frequencies, not who is rotated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from schedlab.framework.model.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * frequency, float32 [length, head_dim / 2]. arXiv:2104.09864.

    The products are rounded to float32 as in the reference implementations: models were trained with that.
    """
    lanes = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (lanes / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Slow waves are slowed by `factor`, fast ones kept, those between blended (arXiv:2407.21783; Llama 3.1's code)."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
