"""Joint distributions of (prompt, output) lengths in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.workloads.readers import read


class Lengths(Protocol):
    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output lengths, int64 [n] each, at least 1."""


@dataclass
class Fixed:
    """Every request alike."""

    prompt: int
    output: int

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"Fixed.{name}={getattr(self, name)}, expected at least 1")

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(n, self.prompt, dtype=np.int64), np.full(n, self.output, dtype=np.int64)


@dataclass
class Uniform:
    """Prompt and output uniform on [low, high], both ends included, independent of each other."""

    prompt: Sequence[int]
    output: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            low, *rest = range_ = list(getattr(self, name)) or [0]
            if len(rest) != 1 or not 1 <= low <= rest[0]:
                raise ConfigError(f"Uniform.{name}={range_}, expected [low, high] with 1 <= low <= high")

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        (prompt_low, prompt_high), (output_low, output_high) = self.prompt, self.output
        prompt = rng.integers(prompt_low, prompt_high, n, endpoint=True)
        return prompt, rng.integers(output_low, output_high, n, endpoint=True)


@dataclass
class Lognormal:
    """Lognormal lengths of given medians and log-standard deviations, correlated on the log scale.

    Draws outside [1, limit] are drawn again, so the limits cut the distribution instead of piling up at its edge.
    """

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    correlation: float = 0.0
    prompt_limit: int = 1 << 20
    output_limit: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            median, limit, sigma = (getattr(self, f"{name}_{what}") for what in ("median", "limit", "sigma"))
            if not 1 <= median <= limit:
                raise ConfigError(f"Lognormal.{name}_median={median}, expected 1 <= median <= {name}_limit={limit}")
            if not 0 <= sigma < math.inf:
                raise ConfigError(f"Lognormal.{name}_sigma={sigma}, expected a finite number of at least 0")
        if not -1 <= self.correlation <= 1:
            raise ConfigError(f"Lognormal.correlation={self.correlation}, expected -1 to 1")

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        prompt, output = self._once(rng, n)
        while len(again := np.flatnonzero(self._outside(prompt, output))):
            prompt[again], output[again] = self._once(rng, len(again))
        return prompt, output

    def _once(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        first, second = rng.standard_normal((2, n))
        second = self.correlation * first + np.sqrt(1 - self.correlation**2) * second
        prompt = np.rint(self.prompt_median * np.exp(self.prompt_sigma * first))
        output = np.rint(self.output_median * np.exp(self.output_sigma * second))
        return prompt.astype(np.int64), output.astype(np.int64)

    def _outside(self, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
        low = np.minimum(prompt, output) < 1
        outside: np.ndarray = low | (prompt > self.prompt_limit) | (output > self.output_limit)
        return outside


@dataclass
class FromTrace:
    """Pairs drawn from a recorded trace with replacement: prompt and output stay together."""

    path: str
    format: str | None = None
    _pairs: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    def draw(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        if self._pairs is None:
            trace = read(self.path, self.format)
            self._pairs = trace.prompt_tokens, trace.output_tokens
        rows = rng.integers(0, len(self._pairs[0]), n)
        return self._pairs[0][rows], self._pairs[1][rows]
