"""Output-length predictors: what `predicted_output_tokens` says. Knows requests; knows nothing of who reads it."""

from __future__ import annotations

from typing import Protocol

from schedlab.framework.request import EngineRequest


class Predictor(Protocol):
    """Predicts at arrival, learns at the end of each request."""

    def predict(self, request: EngineRequest) -> int | None:
        """Output tokens that `request` will generate, or None."""

    def observe(self, request: EngineRequest) -> None:
        """`request` ended with `num_output_tokens`."""


class MaxPredictor:
    """Assumes the worst case: `max_tokens`."""

    def predict(self, request: EngineRequest) -> int | None:
        return request.max_tokens

    def observe(self, request: EngineRequest) -> None:
        pass


class OraclePredictor:
    """Knows the recorded length; None for a live request. An upper bound on what prediction can give."""

    def predict(self, request: EngineRequest) -> int | None:
        return request.recorded_output_tokens

    def observe(self, request: EngineRequest) -> None:
        pass
