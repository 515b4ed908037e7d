"""First come, first served, prompts first: whole prompts before any decode.

Source: the scheduler of vLLM V0 (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). vLLM V1's is `vllm_v1`.

Differs from the source: with its defaults a decode needs a free block only where it starts one, and no watermark is
kept; `reserve_decode_block=true` and `engine.watermark=0.01` are V0's rules. Who was admitted longest ago is preempted
last, whenever it arrived. A prompt above the token budget is computed in chunks, which V0 refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedlab.framework.step import Step
from schedlab.policies.common import (
    can_admit,
    continue_prefills,
    decode_all,
    decode_with_spare,
    never_short,
    remaining,
)
from schedlab.policies.preemption import ChoosingVictims


@dataclass
class FCFS(ChoosingVictims):
    """A step computes whole prompts in arrival order or, if none fits, one token of every running request.

    A prompt above the token budget runs alone in consecutive chunks; a shorter one is never split. The decode gap is
    unbounded while prompts keep arriving. `reserve_decode_block`: a decode beside others needs a free block even where
    it starts none.
    """

    no_bound_on: ClassVar[Mapping[str, str]] = {
        "inter_token_latency": "prompts come first, for as long as they keep arriving"
    }

    reserve_decode_block: bool = False

    def schedule(self, step: Step) -> None:
        if step.prefilling and continue_prefills(step, step.token_budget, self.mode, self.victim):
            return
        if self._admit_whole(step):
            return
        decodes = decode_with_spare if self.reserve_decode_block else decode_all
        if decodes(step, self.mode, None, self.victim) and (not self.reserve_decode_block or never_short(step)):
            step.hold()

    def _admit_whole(self, step: Step) -> bool:
        budget = step.token_budget
        for request in step.waiting:
            split = step.token_budget < min(remaining(step, request), budget)  # though it would fit a step of its own
            if split or not can_admit(step, request):
                break
            step.grant(request)
        return step.token_budget < budget
