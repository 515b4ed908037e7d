"""The better of a few replicas drawn at random (Mitzenmacher, 2001): nearly as good as looking at all of them, and far
better where what is known of their load is old."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class PowerOfTwo(Router):
    """Of `choices` replicas, the one with the fewest requests in flight."""

    needs = frozenset({"load"})
    choices: int = 2

    def __post_init__(self) -> None:
        if self.choices < 1:
            raise ConfigError(f"router.choices: expected 1 or more, found {self.choices}")

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        drawn = fleet.rng.sample(range(len(fleet.replicas)), min(self.choices, len(fleet.replicas)))
        return least([fleet.replicas[i] for i in sorted(drawn)], lambda replica: replica.in_flight)
