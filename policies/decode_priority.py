"""Decodes always; prompts only as far as running streams and the KV cache can bear.

Source: the wish for bounded decode stalls behind prompts, as in Sarathi-Serve's stall budget (Agrawal et al., OSDI
2024) and the bounded prefill streaks that users of vLLM and SGLang ask for; the free-block watermark is that of vLLM
V0.

Differs from the source: no one source has all of it: the rules are put together here, and a stall is bounded in prompt
tokens, not in time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schedlab.framework.step import Step
from schedlab.policies.common import admit, continue_prefills, decode_all
from schedlab.policies.preemption import ChoosingVictims


@dataclass
class DecodePriority(ChoosingVictims):
    """While anybody decodes, a step adds at most `stall_tokens` of prompts, at most `max_prefill_streak` steps in a
    row, and admits only what leaves `watermark_blocks` free. With nobody decoding, prompts fill the token budget."""

    stall_tokens: int = 256
    max_prefill_streak: int = 4
    watermark_blocks: int = 8
    _streak: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stall_tokens < 1 or self.max_prefill_streak < 1 or self.watermark_blocks < 0:
            raise ValueError(
                f"policy: expected stall_tokens >= 1, max_prefill_streak >= 1, watermark_blocks >= 0; "
                f"found {self.stall_tokens}, {self.max_prefill_streak}, {self.watermark_blocks}"
            )

    def schedule(self, step: Step) -> None:
        undisturbed = decode_all(step, self.mode, victims=self.victim)
        if step.decoding and self._streak >= self.max_prefill_streak:
            self._streak = 0
            return
        room = min(self.stall_tokens, step.token_budget) if step.decoding else step.token_budget
        chunks = continue_prefills(step, room, self.mode, self.victim)
        if undisturbed:
            chunks += admit(step, step.waiting, room - chunks, self.watermark_blocks)
        if undisturbed and not chunks:
            step.hold()
        self._streak = self._streak + 1 if chunks else 0
