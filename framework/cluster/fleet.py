"""What a router sees when it routes: the time, the replicas that it may choose, and what else it can answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedlab.framework.cluster.router import Deferred, Ended, FirstToken, Router, RouterEvent, TurnedAway, check_router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.content import Chain, digest
from schedlab.framework.errors import ConfigError, PolicyError, SchedlabError, policy_fault
from schedlab.framework.request import NS, EngineRequest, Request, to_ns

if TYPE_CHECKING:
    from schedlab.framework.cluster.replica import Replica


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
    """The replicas of one pool and their router.

    `replicas` are those that take requests, in a stable order; `rng` is a stream of its own, from the run's seed and
    the pool's name.
    """

    def __init__(
        self, router: Router, replicas: Sequence[Replica], *, pool: str = "", seed: int = 0, timing: Timing = AT_ONCE
    ) -> None:
        check_router(router)
        self.router = router
        self.router_name = type(router).__name__
        self.needs = frozenset(router.needs)
        self.reads_load = "load" in self.needs
        self.pool = pool
        self.rng = random.Random(int.from_bytes(digest(b"router", b"%d" % seed, pool.encode())[:8], "little"))
        self.now_ns = 0
        self.members = list(replicas)
        self._views = {replica: ReplicaView(replica, self) for replica in replicas}
        self.replicas: Sequence[ReplicaView] = tuple(self._views.values())
        self._delay_ns, self._kv_delay_ns = to_ns(timing.response_delay_s), to_ns(timing.kv_delay_s)
        self._listens = type(router).observe is not Router.observe
        self._chains: dict[int, Chain] = {}  # of the request that is being routed, by block size

    @property
    def now(self) -> float:
        """Seconds."""
        return self.now_ns / NS

    def defer(self, until: float) -> Deferred:
        """To be returned: the request comes again at `until`, seconds."""
        if not until > self.now:
            raise PolicyError(self.router_name, f"defers to {until:g} s at {self.now:g} s: expected a later time")
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

    def cached_tokens(self, replica: Replica, request: Request) -> int:
        """For the view of `replica`: whole blocks, never the last token."""
        assert replica.cache is not None
        replica.run_until(self.now_ns)
        replica.cache.hear(self.now_ns - self._kv_delay_ns)
        size = replica.engine.config.block_size
        limit = (request.num_prompt_tokens - 1) // size
        return replica.cache.cached_blocks(self.prefix(request, size), limit) * size

    # -- the clock's side --

    def route(self, request: EngineRequest, now_ns: int) -> Replica | Deferred | TurnedAway:
        """Ask the router. PolicyError for an answer that is none."""
        self.now_ns = now_ns
        self._chains.clear()
        if self._listens:
            self._tell_news()
        try:
            answer = self.router.route(request, self)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.router_name, "route", error) from error
        if isinstance(answer, (Deferred, TurnedAway)):
            return answer
        if not isinstance(answer, ReplicaView) or not any(answer is view for view in self.replicas):
            names = ", ".join(view.name for view in self.replicas)
            raise PolicyError(self.router_name, f"returned {answer!r}: expected one of {names}", request.request_id)
        return answer._replica

    def look(self, replica: Replica) -> None:
        """Bring the books on `replica` up to now."""
        replica.run_until(self.now_ns)
        if not self._listens:
            replica.hear(self.now_ns - self._delay_ns)

    def view(self, replica: Replica) -> ReplicaView:
        return self._views[replica]

    def tell(self, event: RouterEvent) -> None:
        """Let the router hear of `event`."""
        if not self._listens:
            return
        try:
            self.router.observe(event)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.router_name, "observe", error) from error

    def _tell_news(self) -> None:
        """All that happened at all replicas and can be known by now, in order of time."""
        for replica in self.members:
            replica.run_until(self.now_ns)
        until = self.now_ns - self._delay_ns
        news = [(ns, r.index, kind, request) for r in self.members for ns, kind, request in r.hear(until)]
        for _, index, kind, request in sorted(news, key=lambda item: item[:2]):
            view = self._views[self._by_index(index)]
            self.tell(Ended(request, view) if kind else FirstToken(request, view))

    def _by_index(self, index: int) -> Replica:
        return next(replica for replica in self.members if replica.index == index)
