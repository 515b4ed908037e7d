"""Populations of shared prefixes: which block ids a synthetic prompt begins with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.workloads.trace import BlockIds

FRESH = 1 << 40
"""Ids from here on stand for blocks that nobody shares."""


@dataclass
class SystemPrompts:
    """`count` system prompts of `tokens` tokens (one number, or a range) before the drawn prompt, chosen by Zipf's law.

    share : part of the requests that have one;  zipf : exponent, 0 for equally popular;  block_size : tokens an id
    stands for: only whole blocks are shared.
    """

    count: int
    tokens: int | Sequence[int]
    zipf: float = 1.0
    share: float = 1.0
    block_size: int = 16

    def __post_init__(self) -> None:
        low, high = self._range()
        expected = {
            "count": ("at least 1", self.count >= 1),
            "tokens": ("at least 1, or [low, high]", 1 <= low <= high),
            "zipf": ("a finite number of at least 0", 0 <= self.zipf < math.inf),
            "share": ("0 to 1", 0 <= self.share <= 1),
            "block_size": ("at least 1", self.block_size >= 1),
        }
        for key, (wanted, holds) in expected.items():
            if not holds:
                raise ConfigError(f"SystemPrompts.{key}={getattr(self, key)}, expected {wanted}")

    def _range(self) -> tuple[int, int]:
        return (self.tokens, self.tokens) if isinstance(self.tokens, int) else (self.tokens[0], self.tokens[1])


class PrefixSpace:
    """The ids of one population: the k-th system prompt's are the same in every request."""

    def __init__(self, prompts: SystemPrompts) -> None:
        self._prompts = prompts
        low, high = prompts._range()
        self._tokens = np.linspace(low, high, prompts.count).astype(np.int64)  # all lengths of the range, in turn
        weights = 1.0 / np.arange(1, prompts.count + 1) ** prompts.zipf
        self._popularity = np.cumsum(weights / weights.sum())
        blocks = -(-self._tokens // prompts.block_size)
        self._first_id = np.concatenate([[0], np.cumsum(blocks)[:-1]])
        self._next_fresh = FRESH

    @property
    def width(self) -> int:
        return self._prompts.block_size

    def tokens(self, which: np.ndarray) -> np.ndarray:
        """Length of the chosen system prompts, int64; 0 for none."""
        return np.where(which >= 0, self._tokens[which], 0)

    def shared_ids(self, which: int) -> list[int]:
        """Ids of the whole blocks of a system prompt."""
        if which < 0:
            return []
        first = int(self._first_id[which])
        return list(range(first, first + int(self._tokens[which]) // self.width))

    def choose(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Which system prompt each of n requests has, int64 [n]; -1 for none."""
        which = np.searchsorted(self._popularity, rng.random(n), side="right")
        return np.where(rng.random(n) < self._prompts.share, np.minimum(which, self._prompts.count - 1), -1)

    def draw(self, rng: np.random.Generator, prompt_tokens: np.ndarray) -> tuple[np.ndarray, BlockIds]:
        """Whole prompt lengths and ids of requests whose own part is `prompt_tokens` long, int64 [n]."""
        width, which = self.width, self.choose(rng, len(prompt_tokens))
        system = self.tokens(which)
        total = system + prompt_tokens
        counts = -(-total // width)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        shared = place < np.repeat(system // width, counts)
        values = np.where(shared, place + np.repeat(self._first_id[which], counts), 0)
        fresh = int(offsets[-1] - shared.sum())
        values[~shared] = np.arange(self._next_fresh, self._next_fresh + fresh)
        self._next_fresh += fresh
        return total, BlockIds(offsets, values, width)
