"""Executors whose every duration a test can say, with and without jumps. They make no tokens and know no hardware."""

from __future__ import annotations

import numpy as np

from schedlab.framework.batch import Batch
from schedlab.framework.executor import StepResult
from schedlab.framework.request import EngineRequest

MS = 1_000_000


class ScriptedExecutor:
    """Takes each step's milliseconds from `durations_ms` (the last one for ever) and keeps what it was given."""

    needs_inputs = False
    chains = True
    eos_token_ids: tuple[int, ...] = ()
    vocab_size = 1000

    def __init__(self, *durations_ms: float) -> None:
        self.durations = list(durations_ms)
        self.batches: list[tuple[list[tuple[str, int, int]], list[str]]] = []

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        pass

    def block_bytes(self, block_size: int) -> int:
        return 8 * block_size

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    def execute(self, batch: Batch) -> StepResult:
        prefills = [(prefill.request.request_id, prefill.start, prefill.tokens) for prefill in batch.prefills]
        self.batches.append((prefills, [request.request_id for request in batch.decodes]))
        ms = self.durations.pop(0) if len(self.durations) > 1 else self.durations[0]
        return StepResult(round(ms * MS))


class PacedExecutor(ScriptedExecutor):
    """`step_ns` a step and `token_ns` a token, and nothing else."""

    def __init__(self, step_ns: int, token_ns: int) -> None:
        super().__init__(0)
        self.step_ns = step_ns
        self.token_ns = token_ns

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(self.step_ns + self.token_ns * (batch.prefill_tokens + len(batch.decodes)))


class StandingCost:
    """`(base + slope * context) >> shift` ns of a step; bound by memory from `turn` tokens of context on."""

    shift = 8

    def __init__(self, base_ns: int, slope: int, turn: int) -> None:
        self.base = (base_ns << self.shift) + 128
        self.further = self.base - (3 * base_ns << self.shift) // 4
        self.slope = slope
        self.turn = turn

    def duration_ns(self, context_sum: int) -> int:
        return (self.base + self.slope * context_sum) >> self.shift

    def chain_ns(self, context_sum: int, growth: int, num_steps: int) -> int:
        contexts = [context_sum + growth * ahead for ahead in range(1, num_steps)]
        return self.duration_ns(context_sum) + sum((self.further + self.slope * c) >> self.shift for c in contexts)

    def bound(self, context_sum: int) -> str:
        return "memory" if context_sum >= self.turn else "overhead"


class JumpingExecutor(ScriptedExecutor):
    """1 ms, `token_ns` a token and `slope` / 256 ns a token of context; decode-only steps can be jumped over."""

    jumpable = True

    def __init__(self, slope: int = 0, turn: int = 1 << 60, token_ns: int = 10_000) -> None:
        super().__init__(0)
        self.slope = slope
        self.turn = turn
        self.token_ns = token_ns

    def decode_cost(self, num_decodes: int) -> StandingCost:
        return StandingCost(MS + self.token_ns * num_decodes, self.slope, self.turn)

    def execute(self, batch: Batch) -> StepResult:
        super().execute(batch)
        tokens = batch.prefill_tokens + len(batch.decodes)
        context = batch.decode_context + sum(start + count for _, start, count in batch.prefills)
        cost = self.decode_cost(tokens)
        copies = 777 * (len(batch.copies_out) + len(batch.copies_in))
        return StepResult(cost.chain_ns(context, tokens, batch.steps) + copies, None, cost.bound(context))
