"""Batch-invariant mode on the Triton kernels: the same bits under policies that chunk, hit, preempt and resume."""

import random

import numpy as np

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.model.backend import invariant_gpu
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.graphs import called
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

MODEL = ModelConfig(
    architecture="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, intermediate_size=32, vocab_size=97, max_position_embeddings=128,
)  # fmt: skip
POLICIES = {
    "fcfs": FCFS,
    "chunked_prefill": lambda: ChunkedPrefill(chunk_size=7),
    "prefix_reuse": lambda: PrefixReuse(chunk_size=9),
}


class Watched(ModelExecutor):
    """Keeps the bits of every request's logits where they are drawn from by single steps, and every token."""

    def __init__(self, **options):
        super().__init__(MODEL, seed=3, max_model_len=64, **options)
        self.bits = {}

    def logits(self, inputs):
        logits = super().logits(inputs)
        for row, grant, position in zip(logits, inputs.emitting_S, inputs.output_positions_S, strict=True):
            self.bits[inputs.requests[grant].request_id, int(position)] = row.numpy().tobytes()
        return logits


def requests():
    draw = random.Random(1)
    system = [draw.randrange(3, 97) for _ in range(5)]
    prompts = [system + [draw.randrange(3, 97) for _ in range(own)] for own in (1, 8, 4)]
    return [EngineRequest(str(i), 0, len(p), TokenContent(p), recorded_output_tokens=5) for i, p in enumerate(prompts)]


def run(policy, **options):
    executor, offered = Watched(**options), requests()
    config = EngineConfig(
        num_blocks=6, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24, block_size=4, max_chained_steps=3
    )
    recorder = Recorder(Measurement(max_num_seqs=3, num_blocks=6))
    Engine(policy, executor, ListSource(offered), config, VirtualClock(), recorder).run()
    summary = recorder.close(backlog_end=0, counters={}).summary
    return [request.output_token_ids for request in offered], executor.bits, summary


def product(a, b, **given):
    """a @ b, each element by the same additions, as a GPU's tensor cores do; the host's library goes by its place."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def test_the_same_bits_under_every_policy_and_the_same_tokens_padded(ops, monkeypatch):
    monkeypatch.setattr(np, "matmul", product)  # what the interpreter takes for a product
    backend = invariant_gpu(ops)
    expected, met = None, {"preemptions/recompute": 0, "prefix/tokens_reused": 0, "recomputed_tokens": 0}
    for make in POLICIES.values():
        tokens, bits, summary = run(make(), backend=backend)
        expected = expected or (tokens, bits)
        assert (tokens, bits) == expected
        met = {key: value + summary[key] for key, value in met.items()}
    assert all(met.values()), met
    padded = DecodePriority(stall_tokens=5, max_prefill_streak=2, watermark_blocks=1)
    assert run(padded, recorder=called, backend=backend)[0] == expected[0]
