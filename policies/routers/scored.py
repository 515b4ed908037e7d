"""A weighted sum of scores between 0 and 1, as the pickers of llm-d's inference scheduler use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least

Scorer = Callable[[Sequence[ReplicaView], Request], Sequence[float]]


def fewest(values: Sequence[float]) -> list[float]:
    """1 for the lowest, 0 for the highest, in proportion between; 1 for all where they are equal."""
    low, high = min(values), max(values)
    return [1.0 if low == high else (high - value) / (high - low) for value in values]


SCORERS: Mapping[str, Scorer] = {
    "kv": lambda replicas, request: [r.cached_tokens(request) / request.num_prompt_tokens for r in replicas],
    "queue": lambda replicas, request: fewest([r.waiting for r in replicas]),
    "memory": lambda replicas, request: [r.free_blocks / r.num_blocks for r in replicas],
    "load": lambda replicas, request: fewest([r.in_flight for r in replicas]),
}
"""`kv` is the cached share of the prompt, `queue` and `load` are relative to the other replicas, `memory` is the free
share of the blocks."""


def scored(fleet: Fleet, request: Request, weights: Mapping[str, float]) -> ReplicaView:
    """The replica with the highest sum of weighted scores: `scored(fleet, request, {"kv": 2, "queue": 1})`."""
    replicas = fleet.replicas
    scores = [(weight, SCORERS[name](replicas, request)) for name, weight in weights.items()]
    totals = {r: sum(weight * values[i] for weight, values in scores) for i, r in enumerate(replicas)}
    return least(replicas, lambda replica: -totals[replica])


@dataclass
class Scored(Router):
    """`weights` of SCORERS."""

    needs = frozenset({"load", "kv", "gauges"})
    weights: dict[str, float] = field(default_factory=lambda: {"kv": 2.0, "queue": 1.0})

    def __post_init__(self) -> None:
        for name in self.weights:
            if name not in SCORERS:
                raise ConfigError(f"router.weights: expected some of {', '.join(SCORERS)}, found {name}")

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        return scored(fleet, request, self.weights)
