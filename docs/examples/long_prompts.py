"""Chunked prefill under which a long prompt holds up nobody: few at a time, and a share of the step together."""

from dataclasses import dataclass

from schedlab import Policy, Request, Step
from schedlab.policies.common import continue_prefill, decode_all, fits_whole
from schedlab.policies.ranking import may_be_admitted
from schedlab.policies.victims import newest


@dataclass
class LongPrompts(Policy):
    """Of prompts above `long_tokens`, at most `max_long` are partly computed at a time, `long_chunk` tokens of each
    in a step; the others go past those that wait for their turn.
    """

    chunk_size: int = 2048
    long_tokens: int = 2048
    long_chunk: int = 1024
    max_long: int = 1

    def schedule(self, step: Step) -> None:
        before = step.token_budget
        undisturbed = decode_all(step, limit=self.chunk_size)
        room = left = min(self.chunk_size, before) - (before - step.token_budget)
        for request in step.prefilling:
            if left and request.state == "running":
                left -= continue_prefill(step, request, self.most(request, left), "recompute", newest)
        long_now = sum(self.is_long(request) and request.state == "running" for request in step.prefilling)
        for request in step.waiting if undisturbed else ():
            if not may_be_admitted(step, request) or (self.is_long(request) and long_now >= self.max_long):
                continue
            if not (left and step.free_slots and fits_whole(step, request)):
                break
            left -= step.grant(request, self.most(request, left)).tokens
            long_now += self.is_long(request)
        if undisturbed and left == room:
            step.hold()

    def most(self, request: Request, left: int) -> int:
        return min(left, self.long_chunk) if self.is_long(request) else left

    def is_long(self, request: Request) -> bool:
        return request.num_prompt_tokens > self.long_tokens
