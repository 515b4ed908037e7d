"""Each replica in turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.request import Request


@dataclass
class RoundRobin(Router):
    """Reads nothing."""

    _turn: int = field(default=0, init=False)

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        self._turn += 1
        return fleet.replicas[(self._turn - 1) % len(fleet.replicas)]
