"""What a router is: one method that picks a replica for a request, one that hears what happened, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from schedlab.framework.cluster.fleet import Deferred, Fleet, TurnedAway
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import Request


@dataclass(frozen=True, slots=True)
class Sent:
    """`request` was routed to `replica`."""

    request: Request
    replica: ReplicaView


@dataclass(frozen=True, slots=True)
class FirstToken:
    """`replica` emitted the first token of `request`."""

    request: Request
    replica: ReplicaView


@dataclass(frozen=True, slots=True)
class Ended:
    """`request` left `replica`, however it ended."""

    request: Request
    replica: ReplicaView


@dataclass(frozen=True, slots=True)
class Joined:
    """`replica` takes requests from now on."""

    replica: ReplicaView


@dataclass(frozen=True, slots=True)
class Left:
    """`replica` takes no request any more."""

    replica: ReplicaView


RouterEvent = Sent | FirstToken | Ended | Joined | Left


NEEDS = frozenset({"load", "kv", "gauges"})


class Router:
    """Picks the replica that serves a request.

    A subclass is usually a dataclass whose fields are its knobs, and so its YAML. It may keep state of its own; it
    reads time from `fleet.now`, draws from `fleet.rng` alone, and must be deterministic: no sets in decisions, no
    `id()`.
    Once routed, a request stays where it is: what runs there next is the replica's policy's to say.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What of a replica it reads: `load` (the router's own counts), `kv` (`cached_tokens`), `gauges` (what the replica
    last reported). Reading anything else is a PolicyError; a router that reads nothing costs no synchronisation.
    """

    def route(self, request: Request, fleet: Fleet) -> ReplicaView | Deferred | TurnedAway:
        """One of `fleet.replicas`, or what `fleet.defer` or `fleet.reject` returns."""
        raise NotImplementedError

    def observe(self, event: RouterEvent) -> None:
        """Hear what happened, in order of time and not later than the next call of `route`. Must not decide."""


def check_router(router: Router) -> None:
    """ConfigError for what is no router, or declares a need that does not exist."""
    name = type(router).__name__
    if not isinstance(router, Router):
        raise ConfigError(f"router {name}: expected a subclass of schedlab's Router")
    if unknown := sorted(set(router.needs) - NEEDS):
        raise ConfigError(f"router {name}.needs: expected some of {', '.join(sorted(NEEDS))}, found {unknown[0]!r}")
