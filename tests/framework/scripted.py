"""Engines whose every step is written in the test, executors whose every duration is, and a full copy of the books."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedlab.framework.clock import VirtualClock
from schedlab.framework.engine import Engine
from schedlab.framework.executor import StepResult
from schedlab.framework.limits import EngineConfig
from schedlab.framework.metrics import Measurement
from schedlab.framework.policy import Policy
from schedlab.framework.record import Recorder
from schedlab.framework.request import EngineRequest
from schedlab.framework.source import ListSource
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.harness import TINY, Spec

MS = 1_000_000
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
    """All decodes, then prompts and waiting requests in order as far as they fit; the newest make room if nothing does."""
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


def lab(policy: Policy, requests: Sequence[Spec | EngineRequest], *, executor=None, clock=None, source=None, window=None, **keys):
    """An engine on the stub and the virtual clock unless told otherwise; `keys` change TINY, `window` the measurement."""
    config: EngineConfig = replace(TINY, **keys)
    built = [request.request() if isinstance(request, Spec) else request for request in requests]
    measurement = Measurement(max_num_seqs=config.max_num_seqs, num_blocks=config.num_blocks, **(window or {}))
    recorder = Recorder(measurement)
    source = source or ListSource(sorted(built, key=lambda request: request.visible_ns))
    engine = Engine(policy, executor or StubExecutor(), source, config, clock or VirtualClock(), recorder)
    return Lab(engine, policy, recorder, {request.request_id: request for request in built})


class ScriptedExecutor:
    """Takes each step's milliseconds from `durations_ms` (the last one for ever) and keeps what it was given."""

    needs_inputs = False
    eos_token_ids: tuple[int, ...] = ()
    vocab_size = 1000

    def __init__(self, *durations_ms: float) -> None:
        self.durations = list(durations_ms)
        self.batches: list[tuple[list[tuple[str, int, int]], list[str]]] = []

    def allocate(self, num_blocks, block_size, num_host_blocks, max_num_seqs) -> None:
        pass

    def block_bytes(self, block_size: int) -> int:
        return 8 * block_size

    def prompt_token_ids(self, request):
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    def execute(self, batch) -> StepResult:
        prefills = [(prefill.request.request_id, prefill.start, prefill.tokens) for prefill in batch.prefills]
        self.batches.append((prefills, ids(batch.decodes)))
        ms = self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]
        return StepResult(round(ms * MS))


def books(engine: Engine) -> dict[str, Any]:
    """Everything that the engine keeps about requests, blocks and slots, as plain values."""
    ledger = engine.ledger
    cache, cohort = ledger.cache, ledger.cohort
    requests = [*ledger.waiting, *ledger.running]
    hits = [cache.hit_blocks(request) for request in ledger.waiting]
    return {
        "hits": hits,
        "free": list(ledger.pool.free),
        "unowned": cache.num_unowned,
        "evictable": [(run.key, list(run.blocks), list(run.held)) for run in cache.lru],
        "index": {key: (list(run.blocks), list(run.held)) for key, run in cache.index.items()},
        "computing": dict(cache.computing),
        "changed": ids(cache._changed),
        "host": list(ledger.host.free),
        "slots": list(ledger.free_slots),
        "copies": (list(ledger.copies_out), list(ledger.copies_in)),
        "places": (ids(ledger.waiting), ids(ledger.running), ids(ledger.prefilling), ids(cohort.members)),
        "context": cohort.context,
        "requests": [
            (
                r.request_id, r.state, r.num_tokens, r.num_computed_tokens, r.num_preemptions, r.slot, r.num_published,
                list(r.block_table), list(r.host_blocks), list(r.chain.keys), r.promised_groups, r.swaps, r.lost_tokens,
            )
            for r in requests
        ],
    }  # fmt: skip
