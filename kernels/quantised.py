"""Matrices of integers with a scale for each group of neighbouring weights of a row: how they are made and read.

Rounding to nearest, no calibration data. int8 is symmetric; int4 has a scale and an offset, as the weights of so few
steps must reach from the least to the largest. Scales and offsets are bfloat16, and weights are rounded to what these
can say. Shape letters: O rows, K columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 64
"""Weights that share a scale: divides the width of every matrix of the usual decoders."""
KINDS = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Quantised:
    """weight = numbers * scale (+ zero), group by group.

    numbers_OK: int8, or uint8 of 0..15 for int4, one an element; scales_OG, zeros_OG: bfloat16, zeros for int4 alone.
    The last group is shorter where `group` does not divide K.
    """

    numbers_OK: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    group: int = GROUP

    @property
    def shape(self) -> torch.Size:
        return self.numbers_OK.shape

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[O, K]"""
        columns = self.shape[1]
        weight = self.numbers_OK.float() * _spread(self.scales_OG, self.group, columns)
        if self.zeros_OG is not None:
            weight += _spread(self.zeros_OG, self.group, columns)
        return weight.to(dtype)


def quantise(weight_OK: Tensor, kind: str, group: int = GROUP) -> Quantised:
    """`weight_OK` in `kind`, int8 or int4."""
    if group < 1 or group & (group - 1):
        raise ValueError(f"quantise: group must be a power of 2, got {group}")
    if kind not in KINDS:
        raise ValueError(f"quantise: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    grouped_OGK = _grouped(weight_OK.float(), group)
    columns = weight_OK.shape[1]
    if kind == "int8":
        scales_OG = _held(grouped_OGK.abs().amax(-1) / 127)
        numbers = (grouped_OGK / scales_OG.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return Quantised(_ungrouped(numbers, columns), scales_OG, None, group)
    zeros_OG = grouped_OGK.amin(-1).bfloat16()
    reach_OG = grouped_OGK.amax(-1) - zeros_OG.float()
    scales_OG = _held(reach_OG / 15)
    numbers = ((grouped_OGK - zeros_OG.float()[..., None]) / scales_OG.float()[..., None]).round().clamp(0, 15)
    return Quantised(_ungrouped(numbers.to(torch.uint8), columns), scales_OG, zeros_OG, group)


def _held(scales: Tensor) -> Tensor:
    """As bfloat16, none of them 0."""
    return scales.clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()


def _grouped(weight_OK: Tensor, group: int) -> Tensor:
    """[O, G, group]; a shorter last group is filled with its last weight, which changes neither least nor largest."""
    columns = weight_OK.shape[1]
    filled = F.pad(weight_OK[:, None], (0, -columns % group), mode="replicate")[:, 0] if columns % group else weight_OK
    return filled.view(len(weight_OK), -1, group)


def _ungrouped(numbers_OGK: Tensor, columns: int) -> Tensor:
    return numbers_OGK.flatten(1)[:, :columns].contiguous()


def _spread(values_OG: Tensor, group: int, columns: int) -> Tensor:
    """[O, K]"""
    return values_OG.float().repeat_interleave(group, dim=1)[:, :columns]
