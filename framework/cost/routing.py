"""How many experts of a layer a step reads: the expectation over tokens that choose theirs independently.

A token leaves expert e out with probability 1 - q_e, where the q_e add up to the experts that a token chooses, so that
T tokens choose it with probability 1 - (1 - q_e)^T. Expert e is as popular as (e + 1)^-skew: 0 is an even choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Routing:
    """`num_experts` of a layer, `chosen` by a token; no experts at all in a dense model."""

    num_experts: int = 0
    chosen: int = 0
    skew: float = 0.0

    def distinct(self, tokens: int) -> float:
        """Expected number of experts that `tokens` tokens choose among them."""
        return _distinct(self, tokens)

    def distinct_of(self, tokens_N: np.ndarray) -> np.ndarray:
        """The same of each of several numbers of tokens, float64 [N]."""
        values, place = np.unique(tokens_N, return_inverse=True)
        return np.array([_distinct(self, int(value)) for value in values])[place]


DENSE = Routing()
"""No experts."""


@lru_cache(maxsize=65536)
def _distinct(routing: Routing, tokens: int) -> float:
    return float((1 - (1 - _probabilities(routing)) ** tokens).sum())


@lru_cache(maxsize=64)
def _probabilities(routing: Routing) -> np.ndarray:
    """q_e: proportional to popularity, but never more than 1; what is cut off goes to the others."""
    popularity = np.arange(1, routing.num_experts + 1) ** -float(routing.skew)
    certain = 0  # experts that every token chooses: the most popular ones
    while certain < routing.chosen:
        rest = popularity[certain:] * (routing.chosen - certain) / popularity[certain:].sum()
        if rest[0] <= 1:
            break
        certain += 1
    left = popularity[certain:]
    return np.concatenate([np.ones(certain), left * (routing.chosen - certain) / left.sum()])
