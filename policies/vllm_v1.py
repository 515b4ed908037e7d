"""vLLM V1's scheduler: one pass over all that runs, then admissions.

Source: `vllm.v1.core.sched.scheduler.Scheduler` of vLLM 0.31 and 0.32 (vllm.ai), with its chunked prefill and the
reservation of the whole input at admission, which are its defaults.

Differs from the source: where vLLM would run an empty step, because the first to be served preempted itself, the next
in the pass are served. Blocks can be reused once the step that computes them has run; vLLM lets a prompt reuse what was
granted before it in the same step. A larger `priority` is the more urgent, as everywhere here. Speculative decoding,
encoder inputs, LoRA, connectors and the limits on long prompts are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import admit, check_chunk
from schedlab.policies.preemption import Preempting, preempt
from schedlab.policies.priority import urgency
from schedlab.policies.ranking import RankBy, RankedQueue
from schedlab.policies.victims import running_now


@dataclass
class VLLMV1(Preempting):
    """Running requests in admission order, decodes and prompts alike, then waiting ones in `order`; `chunk_size` tokens
    in all (null: the token budget).

    Who lacks blocks preempts the last of the running, under `priority` the least urgent, in the end itself: then the
    pass stops. A step that preempted admits nobody. Admission needs free blocks for the whole input.
    """

    order: Literal["fcfs", "priority"] = "fcfs"
    chunk_size: int | None = None
    _queue: RankedQueue = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ("fcfs", "priority"):
            raise ValueError(f"policy.order: expected fcfs or priority, found {self.order!r}")
        if self.chunk_size is not None:
            check_chunk(self.chunk_size)
        self._queue = RankedQueue(RankBy(urgency))

    def schedule(self, step: Step) -> None:
        budget = step.token_budget
        floor = 0 if self.chunk_size is None else max(budget - self.chunk_size, 0)  # what a full step leaves
        if not self._serve_running(step, floor):
            return
        decodes_all = not step.prefilling and budget - step.token_budget == len(step.running)
        if not admit(step, self._waiting(step), step.token_budget - floor) and decodes_all and step.running:
            step.hold()

    def _serve_running(self, step: Step, floor: int) -> bool:
        """The pass; whether nobody was preempted."""
        budget, slots = step.token_budget, step.free_slots
        for request in step.running:
            if step.token_budget <= floor:
                break
            served = request.state != "running" or self._serve(step, request, step.token_budget - floor)
            if not served and step.token_budget < budget:
                break
        return step.free_slots == slots

    def _serve(self, step: Step, request: Request, room: int) -> bool:
        """Up to `room` tokens to `request`, while blocks are short at the expense of one victim after another; False if
        it became one.
        """
        while not step.grant(request, room):
            victim = self._last(running_now(step))
            preempt(step, victim, self.mode)
            if victim is request:
                return False
        return True

    def _last(self, running: list[Request]) -> Request:
        return max(running, key=urgency) if self.order == "priority" else running[-1]

    def _waiting(self, step: Step) -> Iterable[Request]:
        return self._queue.best_first(step) if self.order == "priority" else step.waiting
