"""What a policy's decisions cost: microseconds of this machine a call of `schedule`. Reported, never judged."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Event, Policy
from schedlab.framework.source import ListSource
from schedlab.framework.step import Step
from schedlab.framework.testing.case import Guess, Subject, blame
from schedlab.framework.testing.executors import ScriptedExecutor
from schedlab.framework.testing.harness import Spec, engine_for

SIZES = ((16, 32), (128, 512))
"""Running and waiting requests."""


class Cost(NamedTuple):
    running: int
    waiting: int
    us: float


class Timed(Policy):
    """Hands every call on to `policy` and keeps the CPU time of each `schedule`."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs_prediction = policy.needs_prediction  # type: ignore[misc]
        self.times_ns: list[int] = []

    def schedule(self, step: Step) -> None:
        started = time.thread_time_ns()
        self.policy.schedule(step)
        self.times_ns.append(time.thread_time_ns() - started)

    def observe(self, event: Event) -> None:
        self.policy.observe(event)


def decision_costs(subject: Subject, steps: int = 60) -> list[Cost]:
    """Median microseconds of a decision with few and with many requests, all slots taken and a queue behind; sizes at
    which a policy that rejects leaves nobody are left out.
    """
    costs = [_cost(subject, running, waiting, steps) for running, waiting in SIZES]
    return [cost for cost in costs if cost is not None]


def _cost(subject: Subject, running: int, waiting: int, steps: int) -> Cost | None:
    config = EngineConfig(
        num_blocks=40 * (running + 1), max_model_len=4096, max_num_seqs=running, honour_holds=False, audit_every=1 << 60
    )
    trace = [Spec(f"r{i}", 0, 64, 500, ids=(i % 7, i % 3, i, i), id_width=16) for i in range(running + waiting)]
    timed = Timed(subject.make())
    source = ListSource([spec.request() for spec in trace])
    with blame():
        engine = engine_for(timed, source, config, ScriptedExecutor(20), Guess())
        while len(engine.ledger.running) < running and engine.num_steps < 4 * running:
            if not engine.step():
                return None
        timed.times_ns.clear()
        for _ in range(steps):
            engine.step()
    if not timed.times_ns:
        return None
    return Cost(running, waiting, statistics.median(timed.times_ns) / 1000)
