"""Request-level batching: a batch runs until its last request is done, and only then the next one is formed.

Source: FasterTransformer, as the baseline of Orca (Yu et al., OSDI 2022) and of most that followed. What it wastes
shows in `batch/idle_slot_share`.

Differs from the source: nothing is padded; memory is reserved, and a request that no reservation can serve is a batch
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from schedlab.framework.request import Request
from schedlab.framework.step import Step
from schedlab.policies.common import continue_prefill, decode_all, reserve
from schedlab.policies.preemption import Preempting
from schedlab.policies.ranking import WAITING, may_be_admitted
from schedlab.policies.victims import newest


@dataclass
class StaticBatching(Preempting):
    """Takes what waits, in arrival order, up to `batch_size` requests; computes all their prompts, then decodes until
    all are done.

    Memory is reserved for prompt + `max_tokens` of each, as far as the pool goes: cap it by `workload.max_tokens`, or a
    replay reserves up to the model's limit. A request that no reservation can serve is a batch of its own.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {"waiting": "a batch ends with the longest of its answers"}

    batch_size: int = 32
    _batch: list[Request] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size < 1:
            raise ValueError(f"policy.batch_size: expected at least 1, found {self.batch_size}")

    def schedule(self, step: Step) -> None:
        self._batch = [r for r in self._batch if r.state == "running" or r.state in WAITING]
        if not self._batch:
            seats = min(self.batch_size, step.free_slots)
            self._batch = list(islice(reserve(step, step.waiting), seats))
        if not self._prefill(step) and decode_all(step, self.mode):
            step.hold()

    def _prefill(self, step: Step) -> bool:
        """Prompts of the batch, as many as the step can compute; what was preempted among them, too."""
        before = step.token_budget
        for request in self._batch:
            if not step.token_budget:
                break
            if may_be_admitted(step, request):
                step.grant(request)
            elif request.state == "running" and request in step.prefilling:
                continue_prefill(step, request, step.token_budget, self.mode, newest)
        return step.token_budget < before
