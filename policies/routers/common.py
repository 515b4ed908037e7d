"""What routers share: ties that spread, and stable hashing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.content import digest


def least(replicas: Sequence[ReplicaView], cost: Callable[[ReplicaView], float]) -> ReplicaView:
    """The cheapest. Ties go to the one that was sent the fewest requests, then to the first: a cost that is zero
    between requests sends not all of them to one replica."""
    return min(replicas, key=lambda replica: (cost(replica), replica.num_routed))


def hashed(name: str, replicas: Sequence[ReplicaView]) -> ReplicaView:
    """The one whose name scores highest with `name` (rendezvous hashing): when a replica leaves, only what was its own
    goes elsewhere.
    """
    return max(replicas, key=lambda replica: digest(b"rendezvous", name.encode(), replica.name.encode()))
