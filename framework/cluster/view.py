"""A replica as a router sees it: read-only, and only what the router declares that it reads."""

from __future__ import annotations

from typing import Protocol

from schedlab.framework.cluster.load import Load
from schedlab.framework.cluster.replica import Replica
from schedlab.framework.cluster.reports import Gauges
from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.errors import PolicyError
from schedlab.framework.request import Request


class Eyes(Protocol):
    """Whose view it is: a router by its name and what it reads, and how what it reads comes up to date."""

    router_name: str
    needs: frozenset[str]

    def look(self, replica: Replica) -> None: ...

    def cached_tokens(self, replica: Replica, request: Request) -> int: ...


class ReplicaView:
    """Three sources, never mixed: the router's own books (`load`), the replica's last report (`gauges`) and the news of
    its cache (`kv`). What it is made of is always known, and how many requests the router has sent there.
    """

    __slots__ = ("_fleet", "_reads_load", "_replica", "block_size", "hardware", "max_num_seqs", "name", "num_blocks")

    def __init__(self, replica: Replica, fleet: Eyes) -> None:
        config = replica.engine.config
        self._replica = replica
        self._fleet = fleet
        self._reads_load = "load" in fleet.needs
        self.name = replica.name
        self.hardware = replica.setup.hardware
        self.num_blocks = config.num_blocks
        self.max_num_seqs = config.max_num_seqs
        self.block_size = config.block_size

    @property
    def estimator(self) -> Estimator:
        """How long steps take there. PolicyError where nothing models them."""
        estimator = self._replica.setup.estimator
        if estimator is None:
            raise PolicyError(self._fleet.router_name, f"asks the estimator of {self.name}, which has none")
        return estimator

    @property
    def num_routed(self) -> int:
        """Requests that were sent there so far."""
        return self._replica.load.num_routed

    @property
    def in_flight(self) -> int:
        """Requests that were sent there and have not ended, as far as is known by now."""
        return self._load("in_flight").in_flight

    @property
    def pending_prefill_tokens(self) -> int:
        """Tokens to be computed of requests that were sent there and have no first token yet."""
        return self._load("pending_prefill_tokens").pending_prefill_tokens

    @property
    def context_tokens(self) -> int:
        """Tokens of requests that were sent there and have not ended, as of the sending."""
        return self._load("context_tokens").context_tokens

    @property
    def waiting(self) -> int:
        """Requests in its queue when it last reported."""
        return self._gauges("waiting").waiting

    @property
    def running(self) -> int:
        """Requests that ran when it last reported."""
        return self._gauges("running").running

    @property
    def free_blocks(self) -> int:
        """KV blocks that could be had when it last reported, cached ones that nobody owned among them."""
        return self._gauges("free_blocks").free_blocks

    @property
    def as_of_s(self) -> float:
        """When it last reported, seconds."""
        return self._gauges("as_of_s").as_of_ns / 1e9

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of the prompt that its cache holds, by the news of it that have come."""
        self._check("kv", "cached_tokens")
        return self._fleet.cached_tokens(self._replica, request)

    def replica_of(self, fleet: Eyes) -> Replica:
        """Whose view it is, for the fleet that made it alone."""
        assert fleet is self._fleet
        return self._replica

    def _load(self, name: str) -> Load:
        if not self._reads_load:
            self._check("load", name)
        self._fleet.look(self._replica)
        return self._replica.load

    def _gauges(self, name: str) -> Gauges:
        self._check("gauges", name)
        return self._replica.gauges

    def _check(self, need: str, name: str) -> None:
        if need not in self._fleet.needs:
            raise PolicyError(self._fleet.router_name, f"reads {name} of a replica: `needs` must declare {need!r}")

    def __repr__(self) -> str:
        return f"<Replica {self.name}>"
