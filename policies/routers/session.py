"""All requests of a session to one replica, which then has what they share in its cache."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.request import Request
from schedlab.policies.routers.common import hashed


@dataclass
class Session(Router):
    """By a hash of the program or session, of the request itself where it belongs to none. Reads nothing."""

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        return hashed(request.program or request.request_id, fleet.replicas)
