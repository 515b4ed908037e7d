"""Stall-free batching: decodes first, then prompts in chunks that fill what is left of the step.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024.

Differs from the source: with its defaults a decode needs a free block only where it starts one
(`reserve_decode_block=true`: always), blocks of a prompt are taken chunk by chunk, and no watermark is kept; `sarathi`
has these rules. vLLM V1's scheduler, which treats decodes and chunks alike,
is `vllm_v1`: with `chunk_size` equal to the token budget both decide the same as long as the pool has room.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedlab.framework.step import Step
from schedlab.policies.common import (
    PromptLimits,
    check_chunk,
    chunked_step,
    decode_all,
    decode_with_spare,
    never_short,
)
from schedlab.policies.preemption import ChoosingVictims


@dataclass
class ChunkedPrefill(ChoosingVictims):
    """`chunk_size` caps the tokens of a step, decodes included.

    `long_prefill_token_threshold`: tokens of one prompt in a step at most, so that a long prompt leaves room for those
    behind it. `max_num_partial_prefills`: prompts that are partly computed at a time; one that would be another waits,
    and those behind it that can be computed whole in the step go first. Named as in vLLM; null: no limit.
    """

    chunk_size: int = 512
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    reserve_decode_block: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk_size)
        for key in ("long_prefill_token_threshold", "max_num_partial_prefills"):
            if (limit := getattr(self, key)) is not None and limit < 1:
                raise ValueError(f"policy.{key}: expected null or at least 1, found {limit}")

    def schedule(self, step: Step) -> None:
        limits = PromptLimits(self.long_prefill_token_threshold, self.max_num_partial_prefills)
        decodes = decode_with_spare if self.reserve_decode_block else decode_all
        alone = chunked_step(step, lambda step: step.waiting, self.chunk_size, self.mode, self.victim, limits, decodes)
        if alone and (not self.reserve_decode_block or never_short(step)):
            step.hold()
