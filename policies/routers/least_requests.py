"""The replica with the fewest requests in flight (join the shortest queue)."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class LeastRequests(Router):
    """Counts what was sent and has not ended."""

    needs = frozenset({"load"})

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        return least(fleet.replicas, lambda replica: replica.in_flight)
