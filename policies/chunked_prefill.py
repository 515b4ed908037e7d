"""Stall-free batching: decodes first, then prompts in chunks that fill what is left of the step.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024. With
`chunk_size` equal to the token budget this is vLLM V1's default.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.step import Step
from schedlab.policies.common import check_chunk, chunked_step
from schedlab.policies.preemption import ChoosingVictims


@dataclass
class ChunkedPrefill(ChoosingVictims):
    """`chunk_size` caps the tokens of a step, decodes included."""

    chunk_size: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)

    def schedule(self, step: Step) -> None:
        if chunked_step(step, lambda step: step.waiting, self.chunk_size, self.mode, self.victim):
            step.hold()
