"""What a router sees when it routes: the time, the replicas that it may choose, and what else it can answer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schedlab.framework.cluster.replica import Replica
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.content import Chain, digest
from schedlab.framework.errors import ConfigError, PolicyError
from schedlab.framework.request import NS, EngineRequest, Request, to_ns


@dataclass(frozen=True, slots=True)
class Deferred:
    """The request is to be routed again at `until_s`, seconds."""

    until_s: float


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """The request goes to no replica."""

    reason: str


@dataclass(frozen=True)
class Timing:
    """How old what a router reads may be, seconds: news of first tokens and ends (`response_delay_s`), news of the
    replicas' caches (`kv_delay_s`), and their gauges, which are read every `scrape_s`."""

    response_delay_s: float = 0.0
    kv_delay_s: float = 0.0
    scrape_s: float = 0.05

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"router.{key}: expected 0 s or more, found {value}")
        if to_ns(self.scrape_s) < 1:
            raise ConfigError(f"router.scrape_s: expected a nanosecond or more, found {self.scrape_s} s")


AT_ONCE = Timing()
"""News come as things happen."""


class Fleet:
    """The replicas of one pool, for the router named `router_name`, which declares that it reads `needs`.

    `replicas` are those that take requests, in a stable order; `rng` is a stream of its own, from the run's seed and
    the pool's name.
    """

    def __init__(
        self, router_name: str, needs: Iterable[str], members: Sequence[Replica], pool: str, seed: int, timing: Timing
    ) -> None:
        self.router_name = router_name
        self.needs = frozenset(needs)
        self.pool = pool
        self.rng = random.Random(int.from_bytes(digest(b"router", b"%d" % seed, pool.encode())[:8], "little"))
        self.now_ns = 0
        self.delay_ns, self._kv_delay_ns = to_ns(timing.response_delay_s), to_ns(timing.kv_delay_s)
        self.views = {replica: ReplicaView(replica, self) for replica in members}
        self.replicas: Sequence[ReplicaView] = tuple(self.views.values())
        self._chains: dict[int, Chain] = {}  # of the request that is being routed, by block size

    @property
    def now(self) -> float:
        """Seconds."""
        return self.now_ns / NS

    def defer(self, until: float) -> Deferred:
        """To be returned: the request comes again at `until`, seconds."""
        if not self.now < until < math.inf:
            raise PolicyError(self.router_name, f"defers to {until} s at {self.now:g} s: expected a later time")
        return Deferred(until)

    def reject(self, reason: str) -> TurnedAway:
        """To be returned: the request goes to no replica."""
        return TurnedAway(reason)

    def prefix(self, request: Request, block_size: int) -> Chain:
        """Identities of the leading parts of the prompt of the request that is being routed: equal keys stand for equal
        content after equal content. `ends` are in blocks."""
        if block_size not in self._chains:
            assert isinstance(request, EngineRequest)
            self._chains[block_size] = request.content.chain(request.num_prompt_tokens, block_size)
        return self._chains[block_size]

    # -- for the views --

    def begin(self, now_ns: int) -> None:
        """Another request is being routed."""
        self.now_ns = now_ns
        self._chains.clear()

    def look(self, replica: Replica) -> None:
        """Bring the books on `replica` up to now."""
        replica.run_until(self.now_ns)
        replica.hear(self.now_ns - self.delay_ns)

    def cached_tokens(self, replica: Replica, request: Request) -> int:
        """Whole blocks, never the last token."""
        assert replica.cache is not None
        replica.run_until(self.now_ns)
        replica.cache.hear(self.now_ns - self._kv_delay_ns)
        size = replica.engine.config.block_size
        limit = (request.num_prompt_tokens - 1) // size
        return replica.cache.cached_blocks(self.prefix(request, size), limit) * size
