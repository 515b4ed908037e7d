"""FastServe's skip-join multi-level feedback queue: quanta of time, and no prediction of lengths.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023, as its scheduler is written in
LLMServe/FastServe.

Differs from the source: prompts are computed in chunks of what the token budget leaves; promotion is looked for at
every step instead of every thousandth; keys and values go to the host when their place is needed, never ahead of it,
and come back with the request that they belong to; who waits displaces lower levels only, not those behind it on its
own; those that were served together stay in their order, which the source turns round at every step. Time of service
is a step's duration by the engine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.policy import Aborted, Arrived, Event, Finished, Rejected
from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import can_admit, decode_all, grant_with_preemption
from schedlab.policies.preemption import Preempting, preempt
from schedlab.policies.ranking import may_be_admitted
from schedlab.policies.victims import running_now

NS = 1_000_000_000


@dataclass(slots=True)
class Standing:
    """Where a request stands: its level, its place there, and its service on it. Times are nanoseconds."""

    level: int
    place: int
    served_ns: int
    used_ns: int = 0


@dataclass
class FastServe(Preempting):
    """A step serves the first `max_batch_size` requests by level, those served last first within one, then by arrival.

    Level i has a quantum of `base_quantum_s` * 2^i. A request joins the first whose quantum its prompt, alone, is
    estimated to fit, and goes one down when it was served there for more than the quantum. After
    `promote_after_s` without service it is on level 0. Who is not among the first keeps slot and blocks until one of a
    higher level, or a running one before it, needs them: then the last in line gives way, to the host with
    `swap_space_gib`.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {
        "waiting": "who sank has a quantum every `promote_after_s` while others keep coming"
    }

    estimator: Estimator
    max_batch_size: int = 64
    base_quantum_s: float = 0.01
    promote_after_s: float = 3.0

    preempt_mode: Literal["recompute", "swap", "auto"] = field(default="swap", kw_only=True)
    _standings: dict[Request, Standing] = field(default_factory=dict, init=False, repr=False)
    _batch: list[Request] = field(default_factory=list, init=False, repr=False)
    _asked_ns: int = field(default=0, init=False, repr=False)
    _back: int = field(default=0, init=False, repr=False)
    _front: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        estimator = self.estimator
        if estimator is None:  # a base's default
            raise ValueError("policy.estimator: FastServe needs an estimator of step times, found none")
        super().__post_init__()
        self.estimator = estimator  # asked in any mode
        if not (self.max_batch_size >= 1 and 0 < self.base_quantum_s < math.inf and self.promote_after_s > 0):
            raise ValueError(
                f"policy: expected max_batch_size >= 1, base_quantum_s > 0, promote_after_s > 0; "
                f"found {self.max_batch_size}, {self.base_quantum_s}, {self.promote_after_s}"
            )

    def quantum_ns(self, level: int) -> int:
        return round(self.base_quantum_s * NS) << level

    def observe(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._join(event.request)
        elif isinstance(event, Finished | Aborted | Rejected):
            self._standings.pop(event.request, None)

    def _join(self, request: Request) -> None:
        """Skip the levels whose quantum is shorter than the prompt takes."""
        prompt_ns, level = self.estimator.step_s(request.num_prompt_tokens) * NS, 0
        while self.quantum_ns(level) < prompt_ns:
            level += 1
        self._back += 1
        self._standings[request] = Standing(level, self._back, round(request.arrival_s * NS))

    def schedule(self, step: Step) -> None:
        self._account(round(step.now * NS))
        decoding = step.decoding
        if not (step.waiting or step.prefilling or len(decoding) > self.max_batch_size):
            self._batch = list(decoding)
            if decode_all(step, self.mode, victims=self._behind):
                step.hold(self._first_to_sink())
            self._batch = [request for request in self._batch if request.state == "running"]
        else:
            self._serve_first(step)

    def _account(self, now_ns: int) -> None:
        """What the last step took was service of its batch; who had none for too long is promoted."""
        for request in reversed(self._batch):
            standing = self._standings.get(request)
            if standing is not None:
                self._count(standing, now_ns)
        self._asked_ns, starved = now_ns, now_ns - round(self.promote_after_s * NS)
        for standing in self._standings.values():
            if standing.level and standing.served_ns <= starved:
                standing.level = 0
                self._to_front(standing)

    def _count(self, standing: Standing, now_ns: int) -> None:
        standing.used_ns += now_ns - self._asked_ns
        standing.served_ns = now_ns
        if standing.used_ns > self.quantum_ns(standing.level):
            standing.level += 1
            standing.used_ns = 0
        self._to_front(standing)

    def _to_front(self, standing: Standing) -> None:
        self._front -= 1
        standing.place = self._front

    def _first_to_sink(self) -> float:
        """When the first of the batch will have used up its quantum; seconds on the engine's clock."""
        standings = [self._standings[request] for request in self._batch]
        left_ns = min(self.quantum_ns(standing.level) - standing.used_ns for standing in standings)
        return (self._asked_ns + left_ns) / NS

    def _rank(self, request: Request) -> tuple[int, int]:
        standing = self._standings[request]
        return standing.level, standing.place

    def _serve_first(self, step: Step) -> None:
        """The first in line; a waiting one that does not fit, or a running one that displaced another, ends
        admission.
        """
        self._batch, admitting = [], True
        line = sorted([*step.running, *step.waiting], key=self._rank)
        for i, request in enumerate(line):
            if len(self._batch) == self.max_batch_size or not step.token_budget:
                break
            behind = (victim for victim in reversed(line[i + 1 :]) if victim.state == "running")
            if request.state == "running":
                slots = step.free_slots
                served = self._go_on(step, request, behind)
                admitting &= step.free_slots == slots
            else:
                served = admitting = admitting and self._enter(step, request, behind)
            if served:
                self._batch.append(request)

    def _go_on(self, step: Step, request: Request, behind: Iterator[Request]) -> bool:
        """What the budget leaves to a running request, at the expense of those `behind` it, the last first."""
        room = step.fits(request) or step.token_budget
        return bool(grant_with_preemption(step, request, behind, room, self.mode))

    def _enter(self, step: Step, request: Request, behind: Iterator[Request]) -> bool:
        """The same to a waiting one, at the expense of lower levels."""
        level = self._standings[request].level
        while may_be_admitted(step, request) and not can_admit(step, request):
            victim = next(behind, None)
            if victim is None or self._standings[victim].level <= level:
                return False
            preempt(step, victim, self.mode)
        return may_be_admitted(step, request) and bool(step.grant(request))

    def _behind(self, step: Step, request: Request) -> list[Request]:
        """Running requests that come after `request`, the last first."""
        bar = self._rank(request)
        return sorted([r for r in running_now(step) if self._rank(r) > bar], key=self._rank, reverse=True)
