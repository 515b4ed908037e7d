"""Chunked prefill whose steps take as many prompt tokens as the tightest TPOT limit among the decodes allows."""

from bisect import bisect_right
from dataclasses import dataclass

from schedlab import Policy, Step
from schedlab.framework.cost.estimator import Estimator
from schedlab.policies.common import chunked_step


@dataclass
class SLOChunk(Policy):
    """At most `chunk_size` tokens a step, decodes included; at least `min_chunk` prompt tokens, so that prompts end."""

    estimator: Estimator
    chunk_size: int = 2048
    min_chunk: int = 64

    def schedule(self, step: Step) -> None:
        if chunked_step(step, lambda step: step.waiting, self.chunk(step)):
            step.hold()

    def chunk(self, step: Step) -> int:
        limits = [r.slo.tpot_s for r in step.decoding if r.slo is not None and r.slo.tpot_s is not None]
        if not limits or not (step.waiting or step.prefilling):
            return self.chunk_size
        decodes, context = len(step.decoding), sum(request.num_tokens for request in step.decoding)
        start = step.prefilling[0].num_computed_tokens if step.prefilling else 0
        sizes = range(self.min_chunk, max(self.chunk_size - decodes, self.min_chunk) + 1)
        in_time = bisect_right(
            sizes, min(limits), key=lambda tokens: self.estimator.step_s(tokens, start, decodes, context)
        )
        return decodes + sizes[max(in_time - 1, 0)]
