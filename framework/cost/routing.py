"""How many experts of a layer a step reads: the expectation over tokens that choose theirs independently.

A token leaves expert e out with probability 1 - q_e, where the q_e add up to the experts that a token chooses, so that
T tokens choose it with probability 1 - (1 - q_e)^T. Expert e is as popular as (e + 1)^-skew: 0 is an even choice.

Under expert parallelism whole experts are dealt out to devices in turn, expert e to device e mod n, and a step waits
for the device with the most popular ones, which is the first. Chance differences between devices are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True, slots=True)
class Routing:
    """`num_experts` of a layer, `chosen` by a token; no experts at all in a dense model.

    The experts lie on `devices`, to which the tokens of `sources` engines like this one come, each with as many.
    """

    num_experts: int = 0
    chosen: int = 0
    skew: float = 0.0
    devices: int = 1
    sources: int = 1

    @property
    def busiest(self) -> float:
        """Experts of the busiest device that each token of one source makes it compute, those of the others counted."""
        return self.sources * float(_probabilities(self)[:: self.devices].sum())

    @property
    def distinct_of_one(self) -> float:
        """`distinct(1)`, which is a whole number where one device holds all experts."""
        return self.chosen if self.devices == 1 else self.distinct(1)

    def distinct(self, tokens: int) -> float:
        """Expected number of experts of the busiest device that are chosen if every source has `tokens` tokens."""
        return _distinct(self, tokens)

    def distinct_of(self, tokens_N: np.ndarray) -> np.ndarray:
        """The same of each of several numbers of tokens, float64 [N]."""
        values, place = np.unique(tokens_N, return_inverse=True)
        return np.array([_distinct(self, int(value)) for value in values])[place]


DENSE = Routing()
"""No experts."""


@lru_cache(maxsize=65536)
def _distinct(routing: Routing, tokens: int) -> float:
    held = _probabilities(routing)[:: routing.devices]
    return float((1 - (1 - held) ** (tokens * routing.sources)).sum())


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
