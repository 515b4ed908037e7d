"""The engine on the Triton kernels: the steps of a GPU, run by the interpreter, draw the torch backend's tokens.

Also its decode steps padded to a few sizes and chained, as they are captured there.

A tiny model under a policy that chunks prompts beside decodes, in a pool small enough to preempt, with prompts that
share their beginnings. Equal means equal tokens, or a top-2 logit gap of the torch backend below 1e-4 at the first
difference.
"""

import random
import statistics
from dataclasses import replace

import pytest
import torch

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.model.backend import Backend, quantised_gpu
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.linear import plain
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.kernels.dispatch import kernels
from schedlab.policies.chunked_prefill import ChunkedPrefill

GAP = 1e-4
OUTPUT = 8
BLOCKS = 9
MODEL = ModelConfig(
    architecture="qwen3",
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=64,
    vocab_size=97,
    max_position_embeddings=128,
    qk_norm=True,
)
GEMMA = replace(
    MODEL, architecture="gemma3", activation="gelu_tanh", sandwich_norms=True, norm_offset=1.0, local_rope_theta=1e3,
    layer_windows=(7, None), attention_multiplier=0.3, embedding_multiplier=48**0.5,
)  # fmt: skip


def requests():
    draw = random.Random(1)
    system = [draw.randrange(3, 97) for _ in range(9)]
    prompts = [system + [draw.randrange(3, 97) for _ in range(own)] for own in (1, 9, 4, 6)]
    return [
        EngineRequest(str(i), 0, len(p), TokenContent(p), recorded_output_tokens=OUTPUT) for i, p in enumerate(prompts)
    ]


class Watched(ModelExecutor):
    """Keeps each drawn token's top-2 gap, and the kinds of steps that were run."""

    def __init__(self, model=MODEL, **options):
        super().__init__(model, seed=3, max_model_len=64, **options)
        self.gaps = {}
        self.mixed_steps = 0

    def logits(self, inputs):
        logits = super().logits(inputs)
        top = logits.topk(2).values
        drawn = zip(
            inputs.emitting_S.tolist(),
            inputs.output_positions_S.tolist(),
            (top[:, 0] - top[:, 1]).tolist(),
            strict=True,
        )
        for grant, position, gap in drawn:
            self.gaps[inputs.requests[grant].request_id, position] = gap
        counts = inputs.query_starts_N1[1:] - inputs.query_starts_N1[:-1]
        self.mixed_steps += bool((counts == 1).any() and (counts > 1).any())
        return logits


def run(steps=1, seqs=3, **options):
    executor, offered = Watched(**options), requests()
    config = EngineConfig(
        num_blocks=BLOCKS, max_model_len=64, max_num_seqs=seqs, max_num_batched_tokens=8, block_size=4, audit_every=10,
        max_chained_steps=steps,
    )  # fmt: skip
    recorder = Recorder(Measurement(max_num_seqs=seqs, num_blocks=BLOCKS))
    Engine(ChunkedPrefill(chunk_size=8), executor, ListSource(offered), config, VirtualClock(), recorder).run()
    return offered, executor, recorder.close(backlog_end=0, counters={}).result["summary"]


class Counting:
    """A recorder that calls what it is given, and counts the steps and those of them that are not full."""

    steps = padded = 0

    def __call__(self, steps):
        return [self.counted(step) for step in steps]

    def counted(self, step):
        def replay():
            self.steps += 1
            self.padded += bool((step.__self__._filled["contexts"] == 0).any())
            step()

        return replay


@pytest.mark.parametrize("padded, steps", [(False, 1), (True, 4)])
def test_tokens_are_those_of_the_torch_backend(padded, steps, ops):
    compare(padded, steps, Backend(ops, plain, RaggedBatch.of), None)


def test_tokens_of_layers_that_differ_are_those_of_the_torch_backend(ops):
    """Windows and rotations by layer, sandwich norms and another activation, in padded and chained steps."""
    compare(True, 4, Backend(ops, plain, RaggedBatch.of), None, model=GEMMA)


@pytest.mark.parametrize("kind, padded, steps", [("int8", False, 1), ("int4", True, 4)])
def test_tokens_of_quantised_weights_are_those_of_the_torch_backend(kind, padded, steps, ops):
    """The same integers, read and packed by each engine for itself; what is not a product runs on torch, as it may."""
    compare(padded, steps, quantised_gpu(kernels("cpu", "torch"), torch.device("cpu"), torch.float32, kind), kind)


def compare(padded, steps, backend, weight_dtype, model=MODEL):
    expected, torch_executor, summary = run(kernels="torch", weight_dtype=weight_dtype, model=model)
    assert summary["preemptions/recompute"] > 0 and summary["prefix/tokens_reused"] > 0
    assert torch_executor.mixed_steps > 0
    assert statistics.median(len(set(request.output_token_ids)) for request in expected) >= OUTPUT / 2

    recorder = Counting() if padded else None
    actual, executor, _ = run(steps, 4 if padded else 3, recorder=recorder, backend=backend, model=model)
    assert executor._backend is backend
    assert recorder is None or (recorder.steps > OUTPUT / 2 and recorder.padded)
    for request, other in zip(actual, expected, strict=True):
        pairs = zip(request.output_token_ids, other.output_token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        gap = torch_executor.gaps.get((other.request_id, other.num_prompt_tokens + (first or 0)))
        assert first is None or gap < GAP, f"request {request.request_id} differs at output {first}, gap {gap}"
