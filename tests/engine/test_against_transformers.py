"""The real engine on CPU, under every policy, generates what `transformers` generates greedily in float32.

The pool is small enough that prompts are split, prefixes are found, and requests are preempted by recompute and by
swap, and resumed. Equal means equal tokens, or a top-2 logit gap of the reference below 1e-4 at the first difference,
in at most 1 request of 64.
"""

import random
import statistics
from collections import Counter
from functools import cache
from itertools import zip_longest

import pytest
import torch
from checkpoints import reference, save
from four import ALL, EVERY, FOUR

from schedlab.framework.clock import VirtualClock
from schedlab.framework.columns import Columns
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.hf import read_config
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource

OUTPUT, REQUESTS, GAP = 64, 24, 1e-4


def prompts(vocab_size=97):
    """Prompts that share beginnings of several blocks, of 9 to 60 tokens."""
    draw = random.Random(0)
    systems = [[draw.randrange(3, vocab_size) for _ in range(24)] for _ in range(3)]
    made = []
    for i in range(REQUESTS):
        own = [draw.randrange(3, vocab_size) for _ in range(draw.randint(5, 36))]
        made.append(systems[i % 3][: draw.choice([4, 16, 24])] + own)
    return made


SHORT = {
    "llama": [*ALL], "qwen2": [*FOUR], "qwen3-moe": ["chunked_prefill"], "gpt-oss": ["fcfs/swap"],
    "gemma3": ["prefix_reuse"],
}  # fmt: skip
"""Policies by family: swapping is the engine's, not the model's. The long version has every policy, and the others."""
OTHERS = ["mixtral", "olmoe", "granite-moe"]
FAMILIES = [*SHORT, *(pytest.param(family, marks=pytest.mark.full) for family in OTHERS)]
RUNS = [(family, name) for family, names in SHORT.items() for name in names] + [
    pytest.param(family, name, marks=pytest.mark.full)
    for family in ("qwen3-moe", "gpt-oss", "gemma3", *OTHERS) for name in EVERY if name not in SHORT.get(family, ())
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """A family's directory and what the reference generates, made once: it takes longer than a test."""

    @cache
    def made(family):
        directory = save(family, tmp_path_factory.mktemp(family))
        return directory, [greedy(reference(family), prompt) for prompt in prompts()]

    return made


def greedy(model, prompt):
    """64 greedy tokens and the logit gap between the first and the second choice at each."""
    ids, gaps = torch.tensor([prompt]), []
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, use_cache=True,
    )  # fmt: skip
    for logits in output.logits:
        top = logits[0].topk(2).values
        gaps.append(float(top[0] - top[1]))
    return output.sequences[0, len(prompt) :].tolist(), gaps


def generate(directory, policy, num_blocks=40):
    requests = [
        EngineRequest(str(i), i * 1_000_000, len(p), TokenContent(p), recorded_output_tokens=OUTPUT)
        for i, p in enumerate(prompts())
    ]
    executor = ModelExecutor(read_config(directory), path=directory)
    config = EngineConfig(
        num_blocks=num_blocks, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=48, block_size=8,
        swap_space_gib=0.01, audit_every=10,
    )  # fmt: skip
    recorder = Recorder(Measurement(max_num_seqs=8, num_blocks=num_blocks))
    Engine(policy, executor, ListSource(requests), config, VirtualClock(), recorder).run()
    return requests, recorder.close(backlog_end=0, counters={})


def differing(requests, expected):
    """Requests whose tokens differ where the reference was not in doubt, and how many differ where it was."""
    wrong, doubtful = [], 0
    for request, (tokens, gaps) in zip(requests, expected, strict=True):
        pairs = enumerate(zip_longest(request.output_token_ids, tokens))  # a request that failed ends early
        first = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if first is not None and gaps[first] < GAP:
            doubtful += 1
        elif first is not None:
            wrong.append(request.request_id)
    return wrong, doubtful


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_streams_wander(checkpoint_of, family):
    _, expected = checkpoint_of(family)
    assert statistics.median(len(set(tokens)) for tokens, _ in expected) >= 16


@pytest.mark.parametrize(("family", "policy"), RUNS)
def test_every_policy_generates_the_reference(checkpoint_of, family, policy):
    directory, expected = checkpoint_of(family)
    requests, tables = generate(directory, EVERY[policy]())
    wrong, doubtful = differing(requests, expected)
    assert not wrong and doubtful * 64 <= REQUESTS + 63
    assert all(request.state == "finished" for request in requests)
    summary = tables.result["summary"]
    assert summary["prefix/tokens_reused"] > 0
    assert summary["preemptions/swap" if policy.endswith("swap") else "preemptions/recompute"] > 0
    grants = Counter(name for row in tables.decisions["grants"] for name, _ in row)
    split = any(grants[request.request_id] > 1 + request.num_preemptions for request in requests)
    assert split or policy.startswith("fcfs"), "no prompt was computed in chunks"


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_off_by_one_in_a_block_table_is_seen(checkpoint_of, family, monkeypatch):
    directory, expected = checkpoint_of(family)
    refresh = Columns.refresh

    def shifted(self, request):
        refresh(self, request)
        row = self.block_tables[request.slot, : len(request.block_table)]
        row[:] = (row + 1) % 40

    monkeypatch.setattr(Columns, "refresh", shifted)
    requests, _ = generate(directory, ALL["chunked_prefill"]())
    assert len(differing(requests, expected)[0]) > REQUESTS // 2
