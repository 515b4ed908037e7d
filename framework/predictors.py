"""Output-length predictors: what `predicted_output_tokens` says."""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections import deque
from typing import Protocol

from schedlab.framework.errors import ConfigError
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


class NoisyPredictor:
    """The recorded length times a log-normal factor of median 1: `exp(sigma * z)`, z standard normal.

    z depends on `seed` and the request's name alone, so that no policy can shift it. At least 1 token; None for a live
    request. With a `sigma` of 0.5 one request in three is off by more than a factor of 1.65.
    """

    def __init__(self, sigma: float = 0.5, seed: int = 0) -> None:
        if not 0 <= sigma < math.inf:
            raise ConfigError(f"predictor.sigma: expected a number of at least 0, found {sigma}")
        self._sigma = sigma
        self._seed = seed

    def predict(self, request: EngineRequest) -> int | None:
        recorded = request.recorded_output_tokens
        if recorded is None:
            return None
        z = random.Random(f"{self._seed}/{request.logical_id}").gauss(0.0, 1.0)
        return max(round(recorded * math.exp(self._sigma * z)), 1)

    def observe(self, request: EngineRequest) -> None:
        pass


class QuantilePredictor:
    """A quantile of what the same client's last requests generated; of everybody's until it has had `min_requests`.

    Learns when a request ends by itself, from the last `window` of a client; before anybody has had `min_requests` it
    says `max_tokens`, as knowing nothing. Knows no recorded length, so it serves live requests as well.
    """

    def __init__(self, quantile: float = 0.9, window: int = 256, min_requests: int = 8) -> None:
        if not 0 <= quantile <= 1:
            raise ConfigError(f"predictor.quantile: expected a share in [0, 1], found {quantile}")
        if not 1 <= min_requests <= window:
            raise ConfigError(f"predictor: expected 1 <= min_requests <= window, found {min_requests}, {window}")
        self._quantile = quantile
        self._window = window
        self._min_requests = min_requests
        self._clients: dict[str, LastLengths] = {}
        self._everybody = LastLengths(window)

    def predict(self, request: EngineRequest) -> int | None:
        own = self._clients.get(request.client)
        for lengths in (own, self._everybody):
            if lengths is not None and len(lengths) >= self._min_requests:
                return min(lengths.quantile(self._quantile), request.max_tokens)
        return request.max_tokens

    def observe(self, request: EngineRequest) -> None:
        if request.state != "failed":
            for lengths in (self._clients.setdefault(request.client, LastLengths(self._window)), self._everybody):
                lengths.add(request.num_output_tokens)


class LastLengths:
    """The last `window` lengths, in order of time and of size."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._by_time: deque[int] = deque()
        self._by_size: list[int] = []

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, length: int) -> None:
        self._by_time.append(length)
        insort(self._by_size, length)
        if len(self._by_time) > self._window:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]

    def quantile(self, share: float) -> int:
        """The smallest length that `share` of the lengths do not exceed."""
        return self._by_size[max(math.ceil(share * len(self._by_size)) - 1, 0)]
