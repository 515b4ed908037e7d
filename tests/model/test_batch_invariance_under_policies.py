"""Batch-invariant mode through the whole engine: the same logits, bit for bit, under every policy on random traces.

The pool is small, so that the policies chunk, find prefixes, preempt by recompute and by swap, and resume, each in its
own way; a policy that decides at random does so in every other way.
"""

import random

import pytest
from four import ALL

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.testing.chaos import Chaos

CONFIG = ModelConfig(
    architecture="qwen3", hidden_size=32, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, vocab_size=61, max_position_embeddings=160, qk_norm=True, dtype="float32",
)  # fmt: skip
POLICIES = {**ALL, "chaos": lambda: Chaos(0), "chaos again": lambda: Chaos(1)}


class Watched(ModelExecutor):
    """Keeps the bits of every request's logits at every position."""

    def __init__(self, **options):
        super().__init__(CONFIG, **options)
        self.bits = {}

    def logits(self, inputs):
        logits = super().logits(inputs)
        for row, grant, position in zip(logits, inputs.emitting_S, inputs.output_positions_S, strict=True):
            self.bits[inputs.requests[grant].request_id, int(position)] = row.numpy().tobytes()
        return logits


def trace(seed):
    draw = random.Random(seed)

    def tokens(count):
        return [draw.randrange(61) for _ in range(count)]

    shared = [tokens(40), tokens(24)]
    prompts = [draw.choice(shared)[: draw.choice([8, 20, 40])] + tokens(draw.randint(1, 50)) for _ in range(12)]
    return [
        EngineRequest(str(i), i * 2_000_000, len(p), TokenContent(p), recorded_output_tokens=draw.randint(1, 20))
        for i, p in enumerate(prompts)
    ]


def logits_bits(policy, seed, **options):
    executor = Watched(**options)
    config = EngineConfig(
        num_blocks=30, block_size=8, max_model_len=160, max_num_seqs=6, max_num_batched_tokens=40, swap_space_gib=0.01
    )
    requests = trace(seed)
    recorder = Recorder(Measurement(max_num_seqs=6, num_blocks=30))
    Engine(policy, executor, ListSource(requests), config, VirtualClock(), recorder).run()
    assert all(request.state == "finished" for request in requests)
    return executor.bits, recorder.close(backlog_end=0, counters={}).result["summary"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_the_same_bits_under_every_policy(seed):
    expected = None
    met = {"prefix/tokens_reused": 0, "preemptions/swap": 0, "preemptions/recompute": 0}
    for make in POLICIES.values():
        bits, summary = logits_bits(make(), seed, batch_invariant=True)
        expected = expected or bits
        assert bits == expected
        met = {key: met[key] + summary[key] for key in met}
    assert all(met.values()), met


def test_the_ordinary_mode_differs_in_the_last_bits():
    """Without it the same policies give other bits, or the test above would show nothing."""
    runs = [logits_bits(ALL[name](), 0)[0] for name in ("fcfs", "chunked_prefill")]
    assert runs[0].keys() == runs[1].keys() and runs[0] != runs[1]
