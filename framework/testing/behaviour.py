"""What a policy must do on every trace: keep the rules, serve everybody their tokens, and get on.

Knows requests and boundaries; knows nothing of how traces are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schedlab.framework.batch import Batch
from schedlab.framework.engine import Engine
from schedlab.framework.executor import StepResult
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.stub import StubExecutor
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.harness import Outcome, check_streams, run

MAX_NAPS = 3000
"""Boundaries at which a policy may idle in a row."""
MAX_TURNS = 4
"""Preemptions that one request may suffer while nobody arrives or leaves, unless it gains two tokens by each turn."""


class CountingStub(StubExecutor):
    """The stub, counting the steps that it executes."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def execute(self, batch: Batch) -> StepResult:
        self.steps += 1
        return super().execute(batch)


@dataclass(slots=True)
class Turns:
    """A request's preemptions and furthest computed token when somebody last arrived or left."""

    preemptions: int
    mark: int


class Watch:
    """Called after every boundary: Violation of `livelock` or `churn`."""

    def __init__(self, executor: CountingStub) -> None:
        self._executor = executor
        self._marks: dict[EngineRequest, int] = {}
        self._turns: dict[EngineRequest, Turns] = {}
        self._population: list[EngineRequest] = []
        self._best = -1
        self._best_step = 0
        self._naps = 0
        self._steps = 0

    def __call__(self, engine: Engine) -> None:
        population = list(engine._requests.values())
        self._look(population)
        if population != self._population:
            self._population = population
            self._turns = {r: Turns(r.num_preemptions, self._marks[r]) for r in population}
            self._best_step, self._best = self._executor.steps, sum(self._marks.values())
        self._progress(engine)
        for request in population:
            self._churn(request)

    def _look(self, population: list[EngineRequest]) -> None:
        for request in population:
            self._marks[request] = max(self._marks.get(request, 0), request.num_computed_tokens)

    def _progress(self, engine: Engine) -> None:
        self._naps = self._naps + 1 if self._executor.steps == self._steps else 0
        self._steps = self._executor.steps
        if self._naps > MAX_NAPS:
            raise Violation("livelock", f"idled at {self._naps} boundaries in a row with {self._who()} to serve")
        total = sum(self._marks.values())
        if total > self._best:
            self._best, self._best_step = total, self._steps
        elif self._steps - self._best_step > 200 + 2 * engine.config.pool_tokens:
            idle = self._steps - self._best_step
            raise Violation("livelock", f"{idle} steps in which none of {self._who()} got further than before")

    def _churn(self, request: EngineRequest) -> None:
        before = self._turns[request]
        times, gained = request.num_preemptions - before.preemptions, self._marks[request] - before.mark
        if times < MAX_TURNS or gained >= 2 * times:
            return
        others = [r for r in self._population if r is not request and self._was_preempted(r)]
        how = f"in turns with {', '.join(r.request_id for r in others)}" if others else "and admitted again"
        raise Violation(
            "churn",
            f"{request.request_id} was preempted {times} times {how} while nobody arrived or left, "
            f"and got {gained} tokens further",
        )

    def _was_preempted(self, request: EngineRequest) -> bool:
        return request.num_preemptions > self._turns[request].preemptions

    def _who(self) -> str:
        return ", ".join(request.request_id for request in self._population[:4])


def behave(
    subject: Subject,
    case: Case,
    references: Mapping[str, Callable[[], Policy]] | None = None,
    on_step: Callable[[Engine], None] | None = None,
) -> Outcome:
    """Run the case, audited and watched to its end; every stream is the stub's own and that of each reference.

    `on_step` is called after every boundary. Violation of `rules`, `stalls`, `audit`, `livelock`, `churn` or `streams`.
    """
    executor = CountingStub()
    watch = Watch(executor)

    def look(engine: Engine) -> None:
        if on_step is not None:
            on_step(engine)
        watch(engine)

    policy = subject.make()
    knobs = _knobs(policy)
    outcome = subject.run(case, policy=policy, executor=executor, on_step=look)
    if changed := [name for name, value in _knobs(policy).items() if value != knobs[name]]:
        raise Violation("rules", f"changed its own knob {changed[0]} from {knobs[changed[0]]}; keep state beside knobs")
    try:
        check_streams(outcome)
    except AssertionError as error:
        raise Violation("streams", str(error)) from error
    for name, make in (references or {}).items():
        _compare(outcome, run(make(), case.trace, **case.engine), name)
    return outcome


def _knobs(policy: Policy) -> dict[str, str]:
    """Plain values that a policy was made with, as text: they are what a configuration says, for the whole run."""
    known = getattr(policy, "__dataclass_fields__", {}).values()
    values = {field.name: getattr(policy, field.name) for field in known if field.init and hasattr(policy, field.name)}
    return {name: repr(value) for name, value in values.items() if isinstance(value, (int, float, str, type(None)))}


def _compare(outcome: Outcome, reference: Outcome, name: str) -> None:
    for request_id, tokens in outcome.streams.items():
        expected = reference.streams[request_id]
        ended = {o.by_name[request_id].state for o in (outcome, reference)} == {"finished"}
        common = len(tokens) if ended else min(len(tokens), len(expected))
        if tokens[:common] != expected[:common] or (ended and len(tokens) != len(expected)):
            raise Violation("streams", f"{request_id} generated other tokens than under {name}")
