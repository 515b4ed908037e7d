"""How long a step would take, for policies that ask before they decide.

A policy takes an estimator in its constructor, so that what it believes about time is part of its configuration and
never read off the engine that it runs on. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import Profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import ModelShape, Roofline
from schedlab.framework.cost.windows import attention_reach, seen_at_most


class Estimator(Protocol):
    """Predicts durations in seconds; pure, so that equal questions have equal answers in every process."""

    def step_s(
        self, prefill_tokens: int = 0, prefill_start: int = 0, decodes: int = 0, decode_context: int = 0
    ) -> float:
        """A step that computes `prefill_tokens` of one prompt from position `prefill_start` on, and one token for each
        of `decodes` requests whose contexts sum to `decode_context`.
        """

    def copy_s(self, tokens: int) -> float:
        """Keys and values of `tokens` positions over the host link, one way."""


@dataclass(frozen=True, slots=True)
class LinearEstimator:
    """`step` + `token` seconds a token, wherever it stands; copies take `copied_token` seconds a position."""

    step: float
    token: float
    copied_token: float = 0.0

    def step_s(
        self, prefill_tokens: int = 0, prefill_start: int = 0, decodes: int = 0, decode_context: int = 0
    ) -> float:
        return self.step + self.token * (prefill_tokens + decodes)

    def copy_s(self, tokens: int) -> float:
        return self.copied_token * tokens


class CostEstimator:
    """The cost model of the virtual clock: the roofline of `model` on `hardware`, or a `profile` measured on it."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        *,
        weight_dtype: str = "bf16",
        kv_cache_dtype: str = "auto",
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        profile: Profile | None = None,
    ) -> None:
        roofline = Roofline(model, weight_dtype, kv_cache_dtype, tensor_parallel, expert_parallel)
        self._kv_bytes = roofline.kv_bytes_per_token
        self._window = roofline.window
        if profile is None:
            self._coefficients = Coefficients.from_roofline(roofline, hardware)
        else:
            self._coefficients = profile.coefficients_for(roofline, hardware)

    def step_s(
        self, prefill_tokens: int = 0, prefill_start: int = 0, decodes: int = 0, decode_context: int = 0
    ) -> float:
        pairs, keys = attention_reach(prefill_start, prefill_tokens, self._window) if prefill_tokens else (0, 0)
        decode_context = seen_at_most(decode_context, decodes, self._window)
        tokens, prefills = prefill_tokens + decodes, int(prefill_tokens > 0)
        rows = decodes + prefills
        shares = self._coefficients.shares_ns(tokens, rows, decodes, prefills, pairs, keys, decode_context, 0)
        return sum(shares) / 1e9

    def copy_s(self, tokens: int) -> float:
        """Without the latency that a step's copies share."""
        return self._coefficients.copied_byte_ns * self._kv_bytes * tokens / 1e9
