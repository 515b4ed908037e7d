"""The estimator that policies are configured with: step times of the configured model on the configured hardware.

What it computes is framework/cost/estimator.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from schedlab.experiments.engines import hardware_preset, model_preset
from schedlab.framework.cost.estimator import CostEstimator
from schedlab.framework.cost.fit import Profile
from schedlab.framework.cost.hardware import Hardware


class ConfiguredEstimator:
    """Built when it is first asked, so that a policy which never asks needs neither a model's files nor a profile."""

    def __init__(
        self,
        model: str | Mapping[str, Any],
        hardware: str | Hardware,
        *,
        weight_dtype: str = "bf16",
        kv_cache_dtype: str = "auto",
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        profile: str | Path | None = None,
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._options: dict[str, Any] = {
            "weight_dtype": weight_dtype, "kv_cache_dtype": kv_cache_dtype, "tensor_parallel": tensor_parallel,
            "expert_parallel": expert_parallel,
        }  # fmt: skip
        self._profile = profile

    @cached_property
    def _built(self) -> CostEstimator:
        shape, _ = model_preset(self._model)
        profile = None if self._profile is None else Profile.load(self._profile)
        return CostEstimator(shape, hardware_preset(self._hardware), profile=profile, **self._options)

    def step_s(
        self, prefill_tokens: int = 0, prefill_start: int = 0, decodes: int = 0, decode_context: int = 0
    ) -> float:
        return self._built.step_s(prefill_tokens, prefill_start, decodes, decode_context)

    def copy_s(self, tokens: int) -> float:
        return self._built.copy_s(tokens)
