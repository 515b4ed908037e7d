"""Iteration-level scheduling: every step runs all decodes and whole prompts beside them, and memory is reserved.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022. Without
chunks a long prompt stalls every decode of its step; with worst-case reservation nobody is ever preempted, and the pool
is mostly reserved instead of used.

Differs from the source: a prompt above the token budget is computed in chunks, and with nobody running the first
request is admitted even where its reservation does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.step import Step
from schedlab.policies.common import continue_prefills, decode_all, remaining, reserve
from schedlab.policies.preemption import Preempting


@dataclass
class Orca(Preempting):
    """Decodes, then whole prompts in arrival order; a request is admitted if blocks for prompt + `max_tokens` can be
    reserved for it beside those of all that run.

    A prompt above the token budget is computed in chunks over consecutive steps, a shorter one never. In a replay cap
    `workload.max_tokens`, or the model's limit is reserved. With nobody running, the first is admitted in any case.
    """

    def schedule(self, step: Step) -> None:
        budget = step.token_budget
        undisturbed = decode_all(step, self.mode)
        chunks = continue_prefills(step, step.token_budget, self.mode)
        if undisturbed:
            chunks += self._admit_whole(step, budget)
            if not chunks:
                step.hold()

    def _admit_whole(self, step: Step, budget: int) -> int:
        granted = 0
        for request in reserve(step, step.waiting):
            tokens = remaining(step, request)
            if not step.free_slots or not step.token_budget or step.token_budget < tokens <= budget:
                break
            granted += step.grant(request).tokens
        return granted
