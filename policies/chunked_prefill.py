"""Stall-free batching: decodes first, then prompts in chunks that fill what is left of the step.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024. With
`chunk_size` equal to the token budget this is vLLM V1's default.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.policy import Policy
from schedlab.framework.step import PreemptMode, Step
from schedlab.policies.common import admit, check_mode, continue_prefills, decode_all


@dataclass
class ChunkedPrefill(Policy):
    """`chunk_size` caps the tokens of a step, decodes included."""

    chunk_size: int = 512
    preempt_mode: PreemptMode = "recompute"

    def __post_init__(self) -> None:
        check_mode(self.preempt_mode)
        if self.chunk_size < 1:
            raise ValueError(f"policy.chunk_size: expected at least 1 token, found {self.chunk_size}")

    def schedule(self, step: Step) -> None:
        budget = min(self.chunk_size, step.token_budget)
        used = step.token_budget
        undisturbed = decode_all(step, self.preempt_mode, self.chunk_size)
        room = budget - (used - step.token_budget)
        chunks = continue_prefills(step, room, self.preempt_mode)
        if undisturbed:
            chunks += admit(step, step.waiting, room - chunks)
            if not chunks:
                step.hold()
