"""The replica with the fewest tokens in flight, which tells long requests from short ones."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class LeastTokens(Router):
    """`prefill_weight` counts tokens that are still to be computed first beyond once: they delay the next request."""

    needs = frozenset({"load"})
    prefill_weight: float = 0.0

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        def cost(replica: ReplicaView) -> float:
            return replica.context_tokens + self.prefill_weight * replica.pending_prefill_tokens

        return least(fleet.replicas, cost)
