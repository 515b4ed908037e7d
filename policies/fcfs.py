"""First come, first served, prompts first: whole prompts before any decode.

Source: the scheduler of vLLM V0 (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). vLLM V1's is `vllm_v1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedlab.framework.step import Step
from schedlab.policies.common import can_admit, continue_prefills, decode_all, remaining
from schedlab.policies.preemption import ChoosingVictims


@dataclass
class FCFS(ChoosingVictims):
    """A step computes whole prompts in arrival order or, if none fits, one token of every running request.

    A prompt above the token budget runs alone in consecutive chunks; a shorter one is never split. The decode gap is
    unbounded while prompts keep arriving.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {
        "inter_token_latency": "prompts come first, for as long as they keep arriving"
    }

    def schedule(self, step: Step) -> None:
        if step.prefilling and continue_prefills(step, step.token_budget, self.mode, self.victim):
            return
        if self._admit_whole(step):
            return
        if decode_all(step, self.mode, victims=self.victim):
            step.hold()

    def _admit_whole(self, step: Step) -> bool:
        budget = step.token_budget
        for request in step.waiting:
            split = step.token_budget < min(remaining(step, request), budget)  # though it would fit a step of its own
            if split or not can_admit(step, request):
                break
            step.grant(request)
        return step.token_budget < budget
