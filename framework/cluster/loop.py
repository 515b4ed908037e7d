"""The order of events of a fleet: arrivals are routed, replicas run, and what they did becomes known at its stamp.

Before an event, every replica that may matter to it runs each step that begins before it. A replica runs by itself as
far as nothing can reach it: to the next arrival and, where ends bring arrivals, to the earliest possible end elsewhere.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from schedlab.framework.cluster.dispatch import Dispatch
from schedlab.framework.cluster.fleet import AT_ONCE, Deferred, Timing, TurnedAway
from schedlab.framework.cluster.replica import Replica, ReplicaSetup
from schedlab.framework.cluster.router import Router
from schedlab.framework.cluster.transfer import Transfer
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import EngineRequest, to_ns
from schedlab.framework.source import Source


class Listener(Protocol):
    """Told what happens to requests at the level of the fleet."""

    def routed(self, request: EngineRequest, replica: Replica | None, now_ns: int) -> None:
        """`request` went to `replica`; None: the router turned it away."""

    def left(self, request: EngineRequest) -> None:
        """`request` was the first part of one that goes on elsewhere, and ended."""

    def transferred(self, transfer: Transfer) -> None:
        """Keys and values have come over a link."""

    def ended(self, request: EngineRequest) -> None:
        """`request` reached its final state."""


END, RETRY, HANDOFF, LOADED, RECEIVE = range(5)
"""Kinds of events in the order in which those of one instant happen; arrivals come after them."""


@dataclass(frozen=True)
class PoolSetup:
    """Replicas that one router chooses among."""

    setups: Sequence[ReplicaSetup]
    router: Router
    timing: Timing = AT_ONCE


class Cluster:
    """Runs replicas behind a router over a source.

    `closed_loop` says that ends may bring arrivals; without it, replicas that no router reads never wait for each
    other. `look_ahead=False` asks every replica at every event: the same decisions at more cost.
    """

    def __init__(
        self,
        setups: Sequence[ReplicaSetup],
        router: Router,
        source: Source,
        listener: Listener,
        *,
        closed_loop: bool = True,
        seed: int = 0,
        timing: Timing = AT_ONCE,
        look_ahead: bool = True,
        pool: str = "",
    ) -> None:
        if not setups:
            raise ConfigError(f"cluster.{pool or 'replicas'}: expected at least one replica, found none")
        self._source = source
        self._listener = listener
        self._closed_loop = closed_loop
        self._events: list[tuple[int, int, int, int, EngineRequest]] = []  # (ns, kind, replica, number, request)
        self._sequence = 0
        self._begun_ns = -math.inf  # when the step began that runs now
        self._at_once: list[tuple[int, EngineRequest]] = []  # what the step that runs now brought as it began
        self._in_flight: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.now_ns = 0
        self.replicas: list[Replica] = []
        self._starts: list[float] = []
        self._bounds: list[float] = []
        self._pools: list[Dispatch] = []
        self._dispatch = self._add_pool(PoolSetup(setups, router, timing), pool, seed, look_ahead)

    def _add_pool(self, pool: PoolSetup, name: str, seed: int, look_ahead: bool) -> Dispatch:
        needs, first = frozenset(pool.router.needs), len(self.replicas)
        members = [Replica(first + i, setup, self._coming, needs, look_ahead) for i, setup in enumerate(pool.setups)]
        for replica in members:
            replica.on_end = self._note_end
        self.replicas += members
        self._starts += [replica.next_ns for replica in members]
        self._bounds = list(self._starts)
        self._pools.append(Dispatch(pool.router, members, pool=name, seed=seed, timing=pool.timing))
        return self._pools[-1]

    def run(self, between: Callable[[int], None] | None = None) -> None:
        """To the end of the source and of all that was routed; `between` is called after each event."""
        while (now := self._next_event()) != math.inf:
            self.now_ns = int(now)
            self._happen(self.now_ns)
            if between is not None:
                between(self.now_ns)
        for replica in self.replicas:
            replica.run_out()

    # -- time --

    def _next_event(self) -> float:
        """When the next arrival or event of the fleet is. In a closed loop replicas run until no end can come before
        it."""
        while True:
            coming = self._coming()
            now = math.inf if coming is None else coming
            first = min(self._starts) if self._closed_loop else now
            if self._scrape(min(now, first)):
                continue
            if first >= now:
                return now
            self._run_one(self._starts.index(first), min(now, self._next_scrape_ns()))

    def _next_scrape_ns(self) -> float:
        return min([pool.next_scrape_ns for pool in self._pools])

    def _scrape(self, until_ns: float) -> bool:
        """Read what gauges are due up to `until_ns`; whether any were."""
        if until_ns == math.inf or until_ns < self._next_scrape_ns():
            return False
        for pool in self._pools:
            if pool.next_scrape_ns <= until_ns:
                pool.scrape(int(until_ns))
        return True

    def _run_one(self, index: int, event_ns: float) -> None:
        """The replica that is furthest behind runs as far as neither an event nor an end elsewhere can reach it."""
        bounds, replica = self._bounds, self.replicas[index]
        bounds[index], self._begun_ns = math.inf, self._starts[index]
        replica.step(min(event_ns, *bounds))
        self._begun_ns = -math.inf
        for kind, request in self._at_once:
            self._push(int(self._starts[index]), kind, index, request)
        self._at_once.clear()
        self._look_at(replica)

    def _look_at(self, replica: Replica) -> None:
        """What it does next may have changed."""
        self._starts[replica.index], self._bounds[replica.index] = replica.next_ns, replica.quiet_ns

    def _coming(self) -> int | None:
        """When the next arrival or event is that is known; in a closed loop, ends may still bring earlier ones."""
        arrival = self._source.peek()
        if not self._events:
            return arrival
        return self._events[0][0] if arrival is None else min(arrival, self._events[0][0])

    # -- events --

    def _happen(self, now_ns: int) -> None:
        """What is due at `now_ns`: ends and retries in order, then what arrives."""
        if self._events and self._events[0][0] <= now_ns:
            _, kind, index, _, request = heapq.heappop(self._events)
            self._happened(kind, index, request, now_ns)
            return
        for request in self._source.pop(now_ns):
            self._arrive(request, now_ns)
        if self._coming() is None:
            self._last_arrival()

    def _happened(self, kind: int, index: int, request: EngineRequest, now_ns: int) -> None:
        """An event of `kind`, at the replica of `index`."""
        if kind == END:
            self._source.finished(request, now_ns)
        else:
            assert kind == RETRY
            self._route(request, now_ns)

    def _arrive(self, request: EngineRequest, now_ns: int) -> None:
        """`request` comes from the source."""
        self._route(request, now_ns)

    def _last_arrival(self) -> None:
        """The trace has ended, as far as is known: what each replica has served by now is what shares are judged by."""
        for replica in self.replicas:
            if replica.queue.due_ns == math.inf:
                replica.run_until(self.now_ns)
                replica.engine.note_last_arrival()

    def _route(self, request: EngineRequest, now_ns: int, dispatch: Dispatch | None = None) -> None:
        answer = (dispatch or self._dispatch).route(request, now_ns)
        if isinstance(answer, Deferred):
            self.counts["deferred"] += 1
            self._push(to_ns(answer.until_s), RETRY, -1, request)
        elif isinstance(answer, TurnedAway):
            self._turn_away(request, answer.reason, now_ns)
        else:
            self._send(request, answer, now_ns)

    def _send(self, request: EngineRequest, replica: Replica, now_ns: int) -> None:
        self._enter(request)
        replica.run_until(now_ns)  # so that no more waits in its queue than has arrived since
        replica.expect(request)
        replica.put(request, now_ns)
        self._look_at(replica)
        self._listener.routed(request, replica, now_ns)
        self._dispatch.sent(request, replica)

    def _enter(self, request: EngineRequest) -> None:
        if request.request_id in self._in_flight:
            raise ConfigError(f"request {request.request_id}: a request of this name is already in the fleet")
        self._in_flight.add(request.request_id)

    def _turn_away(self, request: EngineRequest, reason: str, now_ns: int) -> None:
        request.mirror("rejected", request.num_tokens, 0)
        request.finished_ns, request.reason = now_ns, reason
        self._listener.routed(request, None, now_ns)
        self._end(request, now_ns)

    def _note_end(self, replica: Replica, request: EngineRequest, now_ns: int) -> None:
        self._in_flight.remove(request.request_id)
        if not self._closed_loop:
            self._end(request, now_ns)
        elif now_ns > self._begun_ns:
            self._listener.ended(request)
            self._push(now_ns, END, replica.index, request)
        else:  # it ended on arrival, and what that brings may arrive at the same instant
            self._end(request, now_ns)
            while (arrival := self._source.peek()) is not None and arrival <= now_ns:
                for other in self._source.pop(now_ns):
                    self._arrive(other, now_ns)

    def _end(self, request: EngineRequest, now_ns: int) -> None:
        self._listener.ended(request)
        self._source.finished(request, now_ns)

    def _push(self, ns: int, kind: int, index: int, request: EngineRequest) -> None:
        heapq.heappush(self._events, (ns, kind, index, self._sequence, request))
        self._sequence += 1
