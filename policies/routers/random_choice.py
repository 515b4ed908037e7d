"""Any replica, equally likely."""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.request import Request


@dataclass
class RandomChoice(Router):
    """Reads nothing; another seed of the run draws others."""

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        return fleet.replicas[fleet.rng.randrange(len(fleet.replicas))]
