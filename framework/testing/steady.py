"""Steady adversarial load: the worst company that a request can wait in, kept up for as long as it waits.

A hot population is kept at a constant size by a closed loop, so that the queue never drains; one victim arrives among
it. Bounded waiting means that the victim ends within the horizon. Knows requests and steps; knows no policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from schedlab.framework.engine import Engine
from schedlab.framework.limits import EngineConfig
from schedlab.framework.request import EngineRequest
from schedlab.framework.testing.case import Guess, Subject, Violation, blame
from schedlab.framework.testing.executors import PacedExecutor
from schedlab.framework.testing.harness import Spec, engine_for

MS = 1_000_000
STEP_NS, TOKEN_NS = 20 * MS, MS // 10
"""A step of 20 ms and 0.1 ms a token: a large model on one accelerator, so that seconds mean what they do there."""
HORIZON = 4500
"""Steps after which a victim counts as starved, about 100 s; a decode counts as stalled after a tenth of them."""
ROOMY = EngineConfig(
    num_blocks=200, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=64, block_size=8, audit_every=1 << 60
)
START = 300 * MS
"""When the victim comes: the hot population is in full swing."""


@dataclass(frozen=True)
class Load:
    """`hot` is what keeps coming, `depth` of it at a time; `before` is there from the start; `victim` comes later."""

    hot: Spec
    victim: Spec
    depth: int = 16
    before: tuple[Spec, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)


def hot(prompt: int = 16, output: int = 4, **more: Any) -> Spec:
    return Spec("hot", 0, prompt, output, client="hot", **more)


def victim(prompt: int = 16, output: int = 4, **more: Any) -> Spec:
    return Spec("victim", START, prompt, output, **{"client": "victim", **more})


SHARED = tuple(range(11))
WAITING: dict[str, Load] = {
    "one of many equals": Load(hot(24, 8), victim(24, 8)),
    "a long prompt among short ones": Load(hot(), victim(400)),
    "a short prompt among long ones": Load(hot(200, 16), victim()),
    "a long answer among short ones": Load(hot(16, 2), victim(16, 120)),
    "a cold prompt among cached ones": Load(hot(96, 4, ids=SHARED), victim(96)),
    "a prompt of half the pool among small ones": Load(hot(100, 30), victim(900)),
    "a low priority among high ones": Load(hot(priority=5), victim(priority=0)),
    "a late deadline among early ones": Load(hot(deadline_ns=500 * MS), victim(deadline_ns=START + 5000 * MS)),
    "no deadline among early ones": Load(hot(deadline_ns=500 * MS), victim()),
    "a client that has had much among others": Load(
        hot(), victim(client="heavy"), before=tuple(Spec(f"b{i}", 0, 64, 8, client="heavy") for i in range(12))
    ),
    "beside endless answers, with room": Load(hot(16, 5000), victim(16, 2), depth=3, engine={"num_blocks": 6000}),
}
GAPS: dict[str, Load] = {
    "one prompt of the whole budget after another": Load(hot(64, 1), victim(16, 50), depth=4),
    "long prompts, one after another": Load(hot(400, 1), victim(16, 50), depth=4),
}


class Steady:
    """A closed loop: as soon as a hot request ends, the next one arrives. Its times are relative to its arrival."""

    def __init__(self, load: Load, kind: type[EngineRequest] = EngineRequest) -> None:
        self._load = load
        self._count = 0
        self._pending: list[tuple[int, int, EngineRequest]] = []
        self.ended = 0
        self.victim = load.victim.request(kind)
        for spec in load.before:
            self._push(spec)
        for _ in range(load.depth):
            self._next(0)
        heapq.heappush(self._pending, (self.victim.visible_ns, 1 << 60, self.victim))

    def _push(self, spec: Spec) -> None:
        self._count += 1
        heapq.heappush(self._pending, (spec.arrival_ns, self._count, spec.request()))

    def _next(self, now_ns: int) -> None:
        spec = self._load.hot
        deadline = None if spec.deadline_ns is None else now_ns + spec.deadline_ns
        self._push(replace(spec, name=f"hot{self._count}", arrival_ns=now_ns, deadline_ns=deadline))

    def peek(self) -> int | None:
        return self._pending[0][0] if self._pending else None

    def pop(self, now_ns: int) -> list[EngineRequest]:
        due = []
        while self._pending and self._pending[0][0] <= now_ns:
            due.append(heapq.heappop(self._pending)[2])
        return due

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        if request.client == "hot":
            self.ended += request.arrival_ns > self.victim.visible_ns
            self._next(now_ns)


class Wait(NamedTuple):
    """How long a victim was put off: steps, seconds, and how many later arrivals ended before it."""

    steps: int
    seconds: float
    overtaken: int
    load: str


def waits(subject: Subject) -> Iterator[Wait | Violation]:
    """The victim's way to its end in each load of WAITING, or a Violation of `waiting`."""
    for name, load in WAITING.items():
        yield _judged(lambda load=load, name=name: _wait(subject, load, name))  # type: ignore[misc]


def gaps(subject: Subject) -> Iterator[Wait | Violation]:
    """The victim's longest wait for a next token in each load of GAPS, or a Violation of `gap`."""
    for name, load in GAPS.items():
        yield _judged(lambda load=load, name=name: _gap(subject, load, name))  # type: ignore[misc]


def _judged(judge: Callable[[], Wait]) -> Wait | Violation:
    try:
        return judge()
    except Violation as violation:
        return violation


def _wait(subject: Subject, load: Load, name: str) -> Wait:
    source, engine = _started(subject, load)
    arrived, first = source.victim.visible_ns, engine.num_steps
    for _ in _steps(engine, HORIZON):
        if source.victim.finished_ns is not None:
            seconds = (source.victim.finished_ns - arrived) / 1e9
            return Wait(engine.num_steps - first, seconds, source.ended, name)
    raise Violation(
        "waiting",
        f"{name}: it got {source.victim.num_output_tokens} of {load.victim.output} tokens in {HORIZON} steps "
        f"({(engine.now_ns - arrived) / 1e9:.0f} s), while {source.ended} later arrivals ended",
    )


def _gap(subject: Subject, load: Load, name: str) -> Wait:
    source, engine = _started(subject, load)
    last, since, begun, worst = 0, engine.num_steps, engine.now_ns, Wait(0, 0.0, 0, name)
    for _ in _steps(engine, HORIZON):
        had = source.victim.num_output_tokens
        steps, seconds = engine.num_steps - since, (engine.now_ns - begun) / 1e9
        if had > last or source.victim.finished_ns is not None:
            worst = max(worst, Wait(steps, seconds, 0, name)) if last else worst
            last, since, begun = had, engine.num_steps, engine.now_ns
        if source.victim.finished_ns is not None:
            return worst
        if last and steps > HORIZON // 10:
            raise Violation("gap", f"{name}: the next token of one who decodes took more than {steps} steps")
    return worst


def _started(subject: Subject, load: Load) -> tuple[Steady, Engine]:
    """An engine under this load, at the boundary before which the victim arrives."""
    source = Steady(load)
    config = replace(ROOMY, **load.engine)
    with blame():
        engine = engine_for(subject.make(), source, config, PacedExecutor(STEP_NS, TOKEN_NS), Guess())
        while engine.now_ns < START:
            engine.step()
    return source, engine


def _steps(engine: Engine, count: int) -> Iterator[None]:
    for _ in range(count):
        with blame():
            engine.step()
        yield
