"""Where the router itself sent the same beginning before, unless that replica is too busy."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from schedlab.framework.cluster.fleet import Fleet
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request
from schedlab.policies.routers.common import least


@dataclass
class PrefixAffinity(Router):
    """By its own history, without news of any cache: of each of the last `history` parts of prompts, who had it last.

    The replica that had the longest beginning gets the request if that is at least `share` of the prompt, and if it has
    no more than `balance` times the mean of the requests in flight, or `slack` more than the fewest; else the replica
    with the fewest does. The gate is of this one replica: others that are out of balance switch nothing off.
    """

    needs = frozenset({"load"})
    share: float = 0.5
    balance: float = 1.5
    slack: int = 8
    history: int = 1 << 20
    block_size: int = 16
    _last: OrderedDict[bytes, str] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"router.share: expected more than 0, at most 1, found {self.share}")

    def route(self, request: Request, fleet: Fleet) -> ReplicaView:
        keys = fleet.prefix(request, self.block_size).keys
        chosen = self._known(keys, fleet)
        if chosen is None or not self._has_room(chosen, fleet):
            chosen = least(fleet.replicas, lambda replica: replica.in_flight)
        for key in keys:
            self._last[key] = chosen.name
            self._last.move_to_end(key)
        while len(self._last) > self.history:
            self._last.popitem(last=False)
        return chosen

    def _known(self, keys: list[bytes], fleet: Fleet) -> ReplicaView | None:
        """Who had the longest known beginning last, if it is long enough."""
        matched = 0
        while matched < len(keys) and keys[matched] in self._last:
            matched += 1
        if not matched or matched < self.share * len(keys):
            return None
        name = self._last[keys[matched - 1]]
        return next((replica for replica in fleet.replicas if replica.name == name), None)

    def _has_room(self, replica: ReplicaView, fleet: Fleet) -> bool:
        loads = [other.in_flight for other in fleet.replicas]
        return replica.in_flight <= max(self.balance * sum(loads) / len(loads), min(loads) + self.slack)
