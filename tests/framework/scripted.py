"""Engines whose every step is written in the test, executors whose every duration is, and a full copy of the books."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings

from schedlab import core
from schedlab.framework.clock import VirtualClock
from schedlab.framework.engine import Engine
from schedlab.framework.errors import PolicyError
from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import MaxPredictor
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.executors import JumpingExecutor, ScriptedExecutor
from schedlab.framework.testing.harness import TINY, Outcome, Spec, check_streams

__all__ = ["JumpingExecutor", "ScriptedExecutor"]

interpreted_only = pytest.mark.skipif(
    core.mode() == "native", reason="nothing of a compiled class can be replaced: test_interpreted.py runs it"
)

MS = 1_000_000
PART = settings(max_examples=settings.default.max_examples // 4)
"""For properties that run once for each of several policies."""
HOST_BLOCK_GIB = 8 * TINY.block_size / (1 << 30)
"""Swap space of one block of TINY on the stub."""


class Script(Policy):
    """Each step calls the next of `moves`, and `then` when they are used up; keeps every event it hears."""

    def __init__(self, *moves: Callable, then: Callable | None = None) -> None:
        self._moves = list(moves)
        self._then = then or serve
        self.events: list[Any] = []

    def schedule(self, step) -> None:
        (self._moves.pop(0) if self._moves else self._then)(step)

    def observe(self, event) -> None:
        self.events.append(event)


def serve(step) -> None:
    """All decodes, then prompts and waiting requests as far as they fit; if nothing does, the newest make room."""
    before = step.token_budget
    for request in step.grant_decodes():
        assert request.state == "running"
    for request in [*step.prefilling, *step.waiting]:
        if fits := step.fits(request):
            step.grant(request, fits)
    if step.token_budget < before:
        return
    oldest, *others = step.running
    while not step.fits(oldest):
        step.preempt(others.pop())
    step.grant(oldest, step.fits(oldest))


def grants(**tokens: int | None) -> Callable:
    """A move that grants each named request as many tokens (None: what remains), in this order."""

    def move(step) -> None:
        there = named(step)
        for name, count in tokens.items():
            assert step.grant(there[name], count), f"{name} was refused"

    return move


def named(step) -> dict[str, Any]:
    return {request.request_id: request for request in [*step.waiting, *step.running]}


def ids(requests: Iterable) -> list[str]:
    return [request.request_id for request in requests]


def heard(made, *kinds) -> list[tuple[str, str]]:
    """Kind and request of the events of these kinds, in order."""
    return [(type(e).__name__, e.request.request_id) for e in made.policy.events if isinstance(e, kinds)]


@dataclass
class Lab:
    """An engine to be stepped by hand."""

    engine: Engine
    policy: Policy
    recorder: Recorder
    requests: dict[str, EngineRequest]

    def __getitem__(self, name: str) -> EngineRequest:
        return self.requests[name]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.engine.step()
            self.engine.audit()

    def finish(self):
        """Run to the end; every block is back."""
        self.engine.run()
        self.engine.audit()
        ledger = self.engine.ledger
        assert ledger.cache.num_free == ledger.pool.num_blocks
        assert len(ledger.host.free) == ledger.host.num_blocks
        assert len(ledger.free_slots) == self.engine.config.max_num_seqs
        return self.tables()

    def tables(self):
        return self.recorder.close(backlog_end=self.engine.num_unfinished, counters={})


def lab(policy, requests, *, executor=None, clock=None, source=None, window=None, predictor=None, **keys) -> Lab:
    """An engine over specs or requests, on the stub and the virtual clock unless told otherwise; `keys` change TINY."""
    config: EngineConfig = replace(TINY, **keys)
    built = [request.request() if isinstance(request, Spec) else request for request in requests]
    measurement = Measurement(max_num_seqs=config.max_num_seqs, num_blocks=config.num_blocks, **(window or {}))
    recorder = Recorder(measurement)
    source = source or ListSource(sorted(built, key=lambda request: request.visible_ns))
    predictor = predictor or (MaxPredictor() if policy.needs_prediction else None)
    engine = Engine(policy, executor or StubExecutor(), source, config, clock or VirtualClock(), recorder, predictor)
    return Lab(engine, policy, recorder, {request.request_id: request for request in built})


def populated(*moves, then=None, **keys):
    """d1 and d2 decode (8 + 1 tokens in blocks of 4), p1 and p2 are half prefilled (4 of 12), w1 and w2 wait.

    24 blocks: 2 + 2 for the decodes, 1 + 1 for the prompts, 18 free. 6 slots: 2 free. `moves` decide from here on.
    """
    trace = [Spec(name, 0, 8, 8) for name in ("d1", "d2")]
    trace += [Spec(name, 0, 12, 4) for name in ("p1", "p2")] + [Spec(name, 0, 10, 4) for name in ("w1", "w2")]
    made = lab(Script(grants(d1=None, d2=None), grants(p1=4, p2=4), *moves, then=then), trace, **keys)
    made.step(2)
    return made


VIEWS = {
    "waiting": ["w1", "w2"],
    "running": ["d1", "d2", "p1", "p2"],
    "prefilling": ["p1", "p2"],
    "decoding": ["d1", "d2"],
}


def checked(made):
    """Run the moves that are left; each must have been made."""
    made.step()
    made.finish()
    check_all_tokens(made)


def check_all_tokens(made):
    """Each request generated what the stub's definition gives it."""
    check_streams(Outcome(made.engine, list(made.requests.values())))


def broken(move, rule, name=None, **keys):
    """`move` breaks a rule: the error names the policy, the request and the rule, in one line."""
    made = populated(move, **keys)
    with pytest.raises(PolicyError) as caught:
        made.engine.step()
    error = caught.value
    assert error.policy == "Script" and error.request_id == name
    subject = f" on request {name}" if name else ""
    assert rule in error.rule and str(error) == f"policy Script{subject}: {error.rule}"
    assert "\n" not in error.rule
    return error


class Told(ListSource):
    """A list that remembers whose end it was told, and adds the request `after` another at the instant of its end."""

    def __init__(self, requests, after=None):
        super().__init__(sorted(requests, key=lambda request: request.visible_ns))
        self.requests = list(requests)
        self.told: dict[str, int] = {}
        self._after = after or {}

    def add(self, request) -> None:
        pending = sorted([*self._requests[self._next :], request], key=lambda other: other.visible_ns)
        self._requests = self._requests[: self._next] + pending

    def finished(self, request, now_ns) -> None:
        self.told[request.request_id] = self.told.get(request.request_id, 0) + 1
        following = self._after.pop(request.request_id, None)
        if following is not None:
            following._arrival_ns = following.visible_ns = now_ns
            self.add(following)


def books(engine: Engine) -> dict[str, Any]:
    """Everything that the engine keeps about requests, blocks and slots, as plain values."""
    ledger = engine.ledger
    cache, decode_set = ledger.cache, ledger.decode_set
    requests = [*ledger.waiting, *ledger.running]
    hits = [cache.hit_blocks(request) for request in ledger.waiting]
    return {
        "hits": hits,
        "free": list(ledger.pool.free),
        "unowned": cache.num_unowned,
        "evictable": [(run.key, list(run.blocks), list(run.owner_lengths)) for run in cache.lru],
        "index": {key: (list(run.blocks), list(run.owner_lengths)) for key, run in cache.index.items()},
        "computing": dict(cache.computing),
        "changed": ids(cache._changed),
        "host": list(ledger.host.free),
        "slots": list(ledger.free_slots),
        "copies": (list(ledger.copies_out), list(ledger.copies_in)),
        "places": (ids(ledger.waiting), ids(ledger.running), ids(ledger.prefilling), ids(decode_set.members)),
        "context": decode_set.context,
        "requests": [
            (
                r.request_id, r.state, r.num_tokens, r.num_computed_tokens, r.num_preemptions, r.slot, r.num_published,
                list(r.block_table), list(r.host_blocks), list(r.chain.keys), r.promised_groups, r.swaps, r.lost_tokens,
            )
            for r in requests
        ],
    }  # fmt: skip


def log(policy, trace, *, ms=1, **keys):
    """What was executed: for each step the prefills (name, start, tokens) and who decoded. Steps take 1 ms."""
    executor = ScriptedExecutor(ms)
    keys = {"num_blocks": 200, "max_num_batched_tokens": 16, **keys}
    lab(policy, trace, executor=executor, honour_holds=False, **keys).finish()
    return executor.batches


def order_of(policy, trace, **keys):
    """Names in the order of their first grant, one running at a time."""
    executor = ScriptedExecutor(1)
    made = lab(policy, trace, executor=executor, **{"num_blocks": 200, "max_num_seqs": 1, **keys})
    made.finish()
    names = [name for prefills, _ in executor.batches for name, _, _ in prefills]
    return list(dict.fromkeys(names))
