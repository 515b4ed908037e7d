"""The replica with the least to do, blocks that its cache holds left out: the cost of NVIDIA Dynamo's KV router."""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class KvAware(Router):
    """Cost in tokens: `prefill_scale` x (to be computed there, this prompt among it, less `overlap_credit` x what is
    cached) + tokens in flight. With a `temperature` above 0, a replica is drawn by the softmax of its costs, of which
    the range counts as 1.
    """

    needs = frozenset({"load", "kv"})
    prefill_scale: float = 1.0
    overlap_credit: float = 1.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"router.temperature: expected 0 or more, found {self.temperature}")

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        costs = {replica: self._cost(replica, request) for replica in fleet.replicas}
        low, high = min(costs.values()), max(costs.values())
        if not self.temperature or low == high:
            return least(fleet.replicas, costs.__getitem__)
        weights = [math.exp((low - cost) / (high - low) / self.temperature) for cost in costs.values()]
        return fleet.rng.choices(fleet.replicas, weights)[0]

    def _cost(self, replica: ReplicaView, request: Request) -> float:
        own = request.num_prompt_tokens - self.overlap_credit * replica.cached_tokens(request)
        return self.prefill_scale * (replica.pending_prefill_tokens + own) + replica.context_tokens
