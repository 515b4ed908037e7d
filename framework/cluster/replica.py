"""One engine of a fleet: what was routed to it, the steps it has run, and what they did that nobody was told yet."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedlab.framework.cluster.load import Load
from schedlab.framework.cluster.reports import CacheIndex, Gauges
from schedlab.framework.engine import Engine
from schedlab.framework.jump import can_jump
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.digest import Decodes, Grants, Pairs
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.writer import RunWriter
from schedlab.framework.source import Source

if TYPE_CHECKING:
    from schedlab.framework.cost.estimator import Estimator

FIRST_TOKEN, END = 0, 1
"""Kinds of news."""


class GrantNotes(Recorder):
    """A recorder that also notes whose prompts the last steps computed: only these can have emitted a first token."""

    meets_clients = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.granted: list[str] = []

    def decision(
        self, index: int, now_ns: int, preempted: Pairs, grants: Grants, decodes: Decodes, decodes_at: int,
        refusals: Pairs, idle_until_ns: int | None, starts: Any = (), rejected: Pairs = (),
    ) -> None:  # fmt: skip
        self.granted += [name for name, _ in grants]
        super().decision(
            index, now_ns, preempted, grants, decodes, decodes_at, refusals, idle_until_ns, starts, rejected
        )


class ReplicaRecorder(GrantNotes):
    """In memory."""


class ReplicaWriter(GrantNotes, RunWriter):
    """Into a run directory."""


class ReplicaQueue:
    """What was routed to a replica and not yet taken by its engine: the engine's source.

    `coming` says before when nothing else can be routed, as far as is known; None: nothing is known to come. `ended` is
    told of every end.
    """

    def __init__(self, coming: Callable[[], int | None], ended: Callable[[EngineRequest, int], None]) -> None:
        self._due: deque[tuple[int, EngineRequest]] = deque()
        self._coming = coming
        self._ended = ended

    def put(self, request: EngineRequest, now_ns: int) -> None:
        """`request` arrives at `now_ns`; no earlier than what was put before."""
        self._due.append((now_ns, request))

    @property
    def due_ns(self) -> float:
        """When the first of them arrives; infinite if there is none."""
        return self._due[0][0] if self._due else math.inf

    def peek(self) -> int | None:
        return self._due[0][0] if self._due else self._coming()

    def pop(self, now_ns: int) -> list[EngineRequest]:
        taken = []
        while self._due and self._due[0][0] <= now_ns:
            taken.append(self._due.popleft()[1])
        return taken

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        self._ended(request, now_ns)


@dataclass(frozen=True)
class ReplicaSetup:
    """What a replica is, beside its engine. `build` makes this from the source that it will serve; `hardware` is named,
    and `estimator` tells how long its steps take."""

    name: str
    build: Callable[[Source], Engine]
    hardware: str = ""
    estimator: Estimator | None = None


class Replica:
    """An engine with its queue. News are (ns, kind, request), in order of time; they may be stamped later than the last
    event of the fleet, as a step commits when it ends."""

    def __init__(
        self, index: int, setup: ReplicaSetup, coming: Callable[[], int | None], needs: frozenset[str], look_ahead: bool
    ) -> None:
        self.index = index
        self.name = setup.name
        self.setup = setup
        self.queue = ReplicaQueue(coming, self.note_end)
        self.engine = setup.build(self.queue)
        self.load = Load()
        self.news: deque[tuple[int, int, EngineRequest]] = deque()
        self.on_end: Callable[[Replica, EngineRequest, int], None] = _nobody
        self._unstarted: dict[str, EngineRequest] = {}
        self._granted: list[str] = getattr(self.engine.recorder, "granted", [])
        self._quiet_ns = 0.0
        self._looks_ahead = look_ahead and "gauges" not in needs and _can_look_ahead(self.engine)
        self.cache = CacheIndex(self.engine) if "kv" in needs else None
        self.gauges = Gauges.of(self.engine, 0)
        self._reports = "gauges" in needs
        self._before = self.gauges

    # -- running --

    @property
    def next_ns(self) -> float:
        """When its next step begins; infinite if none does."""
        due = self.queue.due_ns
        return min(self.engine.wakes_ns(), due if due == math.inf else max(due, self.engine.now_ns))

    def expect(self, request: EngineRequest) -> None:
        """`request` is routed here."""
        if request.first_token_ns is None:
            self._unstarted[request.request_id] = request
        self.load.send(request)

    def put(self, request: EngineRequest, now_ns: int) -> None:
        """`request` arrives here."""
        self._quiet_ns = 0.0
        self.queue.put(request, now_ns)

    def forget(self, request: EngineRequest, now_ns: int) -> None:
        """`request` was routed here and ended before it arrived."""
        self._unstarted.pop(request.request_id, None)
        self.news.append((now_ns, END, request))

    def reserve(self, request: EngineRequest) -> bool:
        """Take blocks for what `request` has computed elsewhere; False if there are too few now."""
        self._quiet_ns = 0.0
        return self.engine.reserve(request)

    def stop_at(self, now_ns: int) -> None:
        """The step that is on, which began at `now_ns`, is not followed by others before the fleet goes on."""
        self.engine.horizon_ns = now_ns

    def run_until(self, horizon_ns: float) -> None:
        """Run every step that begins before `horizon_ns`."""
        if horizon_ns <= self._quiet_ns:
            return
        while self.next_ns < horizon_ns:
            self._step(horizon_ns)
        self._look_ahead()

    def step(self, horizon_ns: float) -> None:
        """One step, or a stretch of them up to `horizon_ns`."""
        self._step(horizon_ns)
        self._look_ahead()

    def run_out(self) -> None:
        """Nothing will be routed here any more: run to the end."""
        while self.engine.step():
            self._gather()
            if self.cache is not None:
                self.cache.collect()

    def _step(self, horizon_ns: float) -> None:
        if self._reports:
            self._before = Gauges.of(self.engine, self.engine.now_ns)
        self.engine.step(horizon_ns)
        self._gather()
        if self.cache is not None:
            self.cache.collect()

    def report(self, now_ns: int) -> None:
        """Its gauges are read now: while a step is on, as they were when it began."""
        engine = self.engine
        gauges = Gauges.of(engine, now_ns) if engine.now_ns <= now_ns else replace(self._before, as_of_ns=now_ns)
        self.gauges = gauges

    def _gather(self) -> None:
        """First tokens of the step that has just run."""
        if not self._granted:
            return
        for name in self._granted:
            request = self._unstarted.get(name)
            if request is not None and request.first_token_ns is not None:
                self._note_first_token(request)
        self._granted.clear()

    def hear(self, until_ns: float) -> list[tuple[int, int, EngineRequest]]:
        """The router hears of what happened up to `until_ns`: the books on this replica are set right by it."""
        heard = []
        while self.news and self.news[0][0] <= until_ns:
            heard.append(item := self.news.popleft())
            _, kind, request = item
            (self.load.end if kind == END else self.load.first_token)(request)
        return heard

    def _note_first_token(self, request: EngineRequest) -> None:
        assert request.first_token_ns is not None
        del self._unstarted[request.request_id]
        self.news.append((request.first_token_ns, FIRST_TOKEN, request))

    def note_end(self, request: EngineRequest, now_ns: int) -> None:
        """`request` left."""
        if request.first_token_ns is not None and request.request_id in self._unstarted:
            self._note_first_token(request)
        self._unstarted.pop(request.request_id, None)
        self.news.append((now_ns, END, request))
        self.on_end(self, request, now_ns)

    # -- looking ahead --

    @property
    def quiet_ns(self) -> float:
        """No end, no first token and no change of its cache comes before this time, unless something is routed here."""
        return max(self._quiet_ns, self.next_ns)

    def _look_ahead(self) -> None:
        """While a hold stands and free blocks suffice, the first end is (ticks to it) x (cost of a tick) away at least:
        a tick never costs less than the one before."""
        self._quiet_ns = 0.0
        engine = self.engine
        until = engine.standing_until if self._looks_ahead else None
        if until is None or self.queue.due_ns != math.inf:
            return
        decode_set, ledger, now = engine.ledger.decode_set, engine.ledger, engine.now_ns
        last, n = decode_set.next_finish(), len(decode_set.members)
        if last is None or n * ((last - decode_set.tick) // ledger.block_size + 1) > len(ledger.pool.free):
            return
        tick_ns = engine.executor.decode_cost(n).duration_ns(decode_set.context + n)  # type: ignore[attr-defined]
        self._quiet_ns = min(now + (last - decode_set.tick) * tick_ns, until, engine.next_event_ns())


def _nobody(replica: Replica, request: EngineRequest, now_ns: int) -> None:
    """Nobody is told of an end."""


def _can_look_ahead(engine: Engine) -> bool:
    """Where standing steps are jumped over one by one: a chain's tokens come together, later than their ticks."""
    config = engine.config
    return (
        config.fast_forward and config.honour_holds and config.max_chained_steps == 1
        and can_jump(engine.clock, engine.executor)
    )  # fmt: skip
