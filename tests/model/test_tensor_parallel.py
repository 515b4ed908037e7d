"""Several ranks give what one gives: shares of every architecture in threads, and real processes under the engine."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import VARIANTS, assert_same_stream, double, greedy, reference_logits, save
from four import ALL
from paged import Pages
from test_batch_invariance_under_policies import CONFIG, trace

from schedlab.experiments import engines
from schedlab.framework.clock import VirtualClock
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.model import executor as model_executor
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.hf import read_config
from schedlab.framework.model.ranks import TensorParallelExecutor
from schedlab.framework.model.tensor_parallel import Shard, check_split
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource

SPLIT = sorted(set(VARIANTS) - {"olmoe"})


class InThreads(ModelExecutor):
    """Rank 0 in the test's thread, each of the others in one of its own."""

    def __init__(self, config, degree, **options):
        self._barrier, self._shares = threading.Barrier(degree), [None] * degree
        self._others = [
            ModelExecutor(config, group=ThreadGroup(Shard(rank, degree), self), **options) for rank in range(1, degree)
        ]
        self._pool = ThreadPoolExecutor(degree - 1)
        super().__init__(config, group=ThreadGroup(Shard(0, degree), self), **options)

    def allocate(self, *sizes):
        for executor in (*self._others, super()):
            executor.allocate(*sizes)

    def copy_blocks(self, *pairs):
        for executor in (*self._others, super()):
            executor.copy_blocks(*pairs)

    def logits(self, inputs):
        running = [self._pool.submit(torch.inference_mode()(executor.logits), inputs) for executor in self._others]
        logits = super().logits(inputs)
        for other in running:
            other.result()
        return logits


class ThreadGroup:
    def __init__(self, shard, home):
        self.shard, self._home = shard, home

    def sum(self, x):
        self._home._shares[self.shard.rank] = x
        self._home._barrier.wait(60)
        total = torch.stack(self._home._shares).sum(0)
        self._home._barrier.wait(60)
        return total


@pytest.mark.parametrize("variant", SPLIT)
def test_two_ranks_of_every_architecture(variant, tmp_path):
    """Logits in float64, and a stream in float32 that is chunked, shared, swapped and brought back."""
    path = save(variant, tmp_path)
    tokens = [3 + 7 * i % 94 for i in range(21)]
    exact = reference_logits(double(variant), tokens)
    pages = Pages(InThreads(read_config(path), 2, path=path, dtype="float64"), num_blocks=128)
    ours = pages.logits(*[(pages.add(tokens[:n]), n) for n in range(1, 22)])
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)

    pages = Pages(InThreads(read_config(path), 2, path=path))
    first, second = (pages.add(tokens[: 17 + i], f"r{i}") for i in range(2))
    pages.generate(first, 5, chunk=4)
    pages.share(second, first, 3)
    pages.generate(second, 4)
    pages.swap_out(first)
    pages.step((second, 1))
    pages.swap_in(first, (second, 1))
    pages.generate(first, 7)
    for sequence in (first, second):
        n = sequence.request.num_prompt_tokens
        assert_same_stream(sequence.output, *greedy(variant, tokens[:n], len(sequence.output)))


@pytest.mark.parametrize("degree", [4, 8])
def test_more_ranks_than_key_value_heads(degree):
    """Two ranks or four then hold the same keys and values."""
    config = ModelConfig("llama", 64, 2, 8, 2, 8, 96, 61, 128, dtype="float32")
    tokens = list(range(5, 40))
    expected, ours = (
        pages.logits((pages.add(tokens), 35))
        for pages in map(Pages, (ModelExecutor(config, dtype="float64"), InThreads(config, degree, dtype="float64")))
    )
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def logits(executor, *lengths):
    pages = Pages(executor)
    return pages.logits(*((pages.add(list(range(5, 5 + n)), f"r{n}"), n) for n in lengths))


def test_batch_invariant_bits_with_ranks():
    alone, among = (
        logits(InThreads(CONFIG, 2, batch_invariant=True), 35),
        logits(InThreads(CONFIG, 2, batch_invariant=True), 9, 35, 20),
    )
    assert torch.equal(alone[0], among[1])


@pytest.mark.parametrize("weight_dtype", ["int8", "int4"])
def test_integers_are_those_of_one_rank(weight_dtype):
    config = ModelConfig("llama", 128, 2, 8, 4, 16, 256, 61, 128, dtype="float32")
    expected = logits(ModelExecutor(config, weight_dtype=weight_dtype, kernels="torch"), 35)
    ours = logits(InThreads(config, 2, weight_dtype=weight_dtype, kernels="torch"), 35)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_experts_are_on_one_rank_each():
    shares = [Shard(rank, 4)._own_experts(tuple(range(64))) for rank in range(4)]
    assert all(sum(share[e] is not None for share in shares) == 1 for e in range(64))


CHANGED = {
    "heads": ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, None, "of 6 key-value heads, found 4"),
    "attention": (
        {"num_key_value_heads": 1, "num_attention_heads": 6}, 4, None, "divisor of 6 attention heads, found 4",
    ),
    "inner": ({"intermediate_size": 97}, 2, None, "divisor of 97 inner channels, found 2"),
    "experts": (
        {"num_experts": 5, "num_experts_per_tok": 1, "moe_intermediate_size": 8}, 2, None, "of 5 experts, found 2",
    ),
    "norm": ({"wide_qk_norm": True}, 2, None, "expected 1 for llama, whose norm spans all heads, found 2"),
    "groups": ({}, 2, "int8", "whole groups of 64 of 64 columns in int8, found 2"),
    "none": ({}, 0, None, "expected at least 1, found 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_what_cannot_be_split_is_refused(case):
    changes, degree, weight_dtype, said = CHANGED[case]
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4} | changes
    config = ModelConfig(
        **{
            "architecture": "llama", "hidden_size": 64, "num_hidden_layers": 1, "head_dim": 8, "intermediate_size": 128,
            "vocab_size": 61, "max_position_embeddings": 128, **sizes,
        }
    )  # fmt: skip
    with pytest.raises(ConfigError, match=rf"engine\.tensor_parallel: .*{said}$"):
        check_split(config, degree, weight_dtype)


def run(executor):
    config = EngineConfig(
        num_blocks=30, block_size=8, max_model_len=160, max_num_seqs=6, max_num_batched_tokens=40, swap_space_gib=0.01,
        audit_every=1,
    )  # fmt: skip
    requests = [  # all at once: durations are measured, and must not decide
        EngineRequest(r.request_id, 0, r.num_prompt_tokens, r.content, recorded_output_tokens=r.recorded_output_tokens)
        for r in trace(0)
    ]
    recorder = Recorder(Measurement(max_num_seqs=6, num_blocks=30))
    Engine(ALL["fcfs/swap"](), executor, ListSource(requests), config, VirtualClock(), recorder).run()
    result = recorder.close(backlog_end=0, counters={}).result
    return [list(request.output_token_ids) for request in requests], result["digest"], result["summary"]


def test_processes_under_the_engine():
    """Tokens and decisions of one rank, with swaps; two such engines in one process; a killed rank ends its engine."""
    expected, digest, summary = run(ModelExecutor(CONFIG))
    assert summary["preemptions/swap"] > 0
    ranks, others = (TensorParallelExecutor(CONFIG, tensor_parallel=2) for _ in range(2))
    assert run(ranks)[:2] == (expected, digest)
    assert run(others)[:2] == (expected, digest)
    ranks.close()
    assert ranks._peers[0].process.returncode == 0
    others._peers[0].process.kill()
    with pytest.raises(SchedlabError, match=r"^engine\.tensor_parallel: rank 1 ended: killed by SIGKILL$"):
        run(others)
    others.close()


def test_a_rank_says_why_it_ended():
    executor = TensorParallelExecutor(CONFIG, tensor_parallel=2)
    executor._send("allocate", "many")
    with pytest.raises(SchedlabError, match=r"^engine\.tensor_parallel: rank 1 ended: TypeError: .*missing 3 required"):
        run(executor)


def test_blocks_of_all_ranks_must_fit_together(monkeypatch):
    ranks = TensorParallelExecutor(CONFIG, tensor_parallel=2)
    block = ranks.block_bytes(8)
    monkeypatch.setattr(model_executor, "available_bytes", lambda place: 11 * block)
    ranks.allocate(5, 8, 0, 4)
    with pytest.raises(ConfigError, match=r"num_blocks: 5 blocks and 1 host blocks on each of 2 ranks need .* found"):
        ranks.allocate(5, 8, 1, 4)
    ranks.close()


def test_the_busy_clock_counts_one_process():
    setup = engines.cpu("tiny", num_blocks=8, tensor_parallel=2)
    assert setup.clocks == ("wall",)
    setup.executor.close()
