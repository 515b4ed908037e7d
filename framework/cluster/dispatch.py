"""Asks a router where a request goes, checks the answer, and lets the router hear what happened."""

from __future__ import annotations

import math
from collections.abc import Sequence

from schedlab.framework.cluster.fleet import AT_ONCE, Deferred, Fleet, Timing, TurnedAway
from schedlab.framework.cluster.replica import END, Replica
from schedlab.framework.cluster.router import Ended, FirstToken, Router, RouterEvent, Sent, check_router
from schedlab.framework.cluster.view import ReplicaView
from schedlab.framework.errors import PolicyError, SchedlabError, policy_fault
from schedlab.framework.request import EngineRequest, to_ns


class Dispatch:
    """A router and the fleet that it sees. Faults of the router name it.

    Replicas report their gauges every `scrape_ns`, or never where the router reads none.
    """

    def __init__(
        self, router: Router, members: Sequence[Replica], *, pool: str = "", seed: int = 0, timing: Timing = AT_ONCE
    ) -> None:
        check_router(router)
        self.router = router
        self.name = type(router).__name__
        self.members = list(members)
        self.fleet = Fleet(self.name, router.needs, members, pool, seed, timing)
        self._listens = type(router).observe is not Router.observe
        self._scrape_ns = to_ns(timing.scrape_s) if "gauges" in router.needs else math.inf
        self._scraped_ns = 0

    @property
    def next_scrape_ns(self) -> float:
        return self._scraped_ns + self._scrape_ns

    def scrape(self, until_ns: int) -> None:
        """Read the gauges at the last time at which they are due up to `until_ns`, before which nothing can change."""
        self._scraped_ns = int(until_ns // self._scrape_ns * self._scrape_ns)
        for replica in self.members:
            replica.run_until(self._scraped_ns)
            replica.report(self._scraped_ns)

    def route(self, request: EngineRequest, now_ns: int) -> Replica | Deferred | TurnedAway:
        """Ask the router. PolicyError for an answer that is none."""
        self.fleet.begin(now_ns)
        if self._listens:
            self._tell_news()
        try:
            answer = self.router.route(request, self.fleet)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "route", error) from error
        if isinstance(answer, (Deferred, TurnedAway)):
            return answer
        return self._chosen(answer, request)

    def _chosen(self, answer: object, request: EngineRequest) -> Replica:
        for view in self.fleet.replicas:
            if answer is view:
                return view.replica_of(self.fleet)
        names = ", ".join(view.name for view in self.fleet.replicas)
        raise PolicyError(self.name, f"returned {answer!r}: expected one of {names}", request.request_id)

    def sent(self, request: EngineRequest, replica: Replica) -> None:
        self._tell(Sent(request, self._view(replica)))

    def _view(self, replica: Replica) -> ReplicaView:
        return self.fleet.views[replica]

    def _tell(self, event: RouterEvent) -> None:
        if not self._listens:
            return
        try:
            self.router.observe(event)
        except (SchedlabError, AssertionError):
            raise
        except Exception as error:
            raise policy_fault(self.name, "observe", error) from error

    def _tell_news(self) -> None:
        """All that happened at all replicas and can be known by now, in order of time."""
        until_ns = self.fleet.now_ns - self.fleet.delay_ns
        news = []
        for replica in self.members:
            replica.run_until(self.fleet.now_ns)
            news += [(ns, replica.index, kind, request, replica) for ns, kind, request in replica.hear(until_ns)]
        for _, _, kind, request, replica in sorted(news, key=lambda item: item[:2]):
            view = self._view(replica)
            self._tell(Ended(request, view) if kind == END else FirstToken(request, view))
