"""Logits and greedy streams against transformers, for each architecture and each way a request can be computed."""

import random
import statistics

import pytest
import torch
from checkpoints import VARIANTS, assert_same_stream, double, greedy, reference, reference_logits, save
from paged import Pages

from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.hf import read_config

EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folders = {}

    def saved(variant):
        if variant not in folders:
            folders[variant] = save(variant, tmp_path_factory.mktemp(variant))
        return folders[variant]

    return saved


def executor(path, dtype="float32"):
    return ModelExecutor(read_config(path), path=path, dtype=dtype)


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 97), k=length)


@EVERY_VARIANT
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-5), ("float64", 1e-10)])
def test_logits_of_every_position(variant, dtype, tolerance, directory):
    """Prefixes of one prompt in one batch, so that every position's logits come out."""
    tokens = prompt(21)
    expected = reference_logits(double(variant), tokens)
    pages = Pages(executor(directory(variant), dtype), num_blocks=128)
    ours = pages.logits(*[(pages.add(tokens[:n]), n) for n in range(1, 22)])
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)


@EVERY_VARIANT
def test_float32_is_as_near_to_float64_as_transformers(variant, directory):
    tokens = prompt(40, seed=1)
    exact = reference_logits(double(variant), tokens)[-1]
    theirs = (reference_logits(reference(variant), tokens)[-1] - exact).abs().max()
    pages = Pages(executor(directory(variant)))
    ours = (pages.logits((pages.add(tokens), 40))[0] - exact).abs().max()
    assert ours < max(10 * float(theirs), 1e-5)


@EVERY_VARIANT
def test_streams_one_shot_and_chunked(variant, directory):
    pages = Pages(executor(directory(variant)))
    expected = greedy(variant, prompt(19), 24)
    for chunk in (None, 1, 4, 5, 16):
        sequence = pages.add(prompt(19))
        assert_same_stream(pages.generate(sequence, 24, chunk), *expected)
        pages.drop(sequence)


@EVERY_VARIANT
def test_streams_after_hit_recompute_and_swap(variant, directory):
    """Two requests share a prefix; one is recomputed and one swapped half-way, both in batches with a third."""
    pages = Pages(executor(directory(variant)))
    shared = prompt(12, seed=2)
    first, second, third = (pages.add(shared + prompt(3 + i, seed=3 + i), f"r{i}") for i in range(3))
    pages.generate(first, 5)
    pages.share(second, first, 3)
    pages.generate(second, 8, chunk=2)
    pages.drop(first)
    pages.step((third, 7))
    pages.swap_out(second)
    pages.step((first, 11), (third, len(third.tokens) - 7))
    pages.swap_in(second, (first, len(first.tokens) - 11), (third, 1))
    while len(first.output) < 24:
        pages.step((second, 1), (first, 1), (third, 1))
    for sequence in (first, second, third):
        n = sequence.request.num_prompt_tokens
        assert_same_stream(sequence.output, *greedy(variant, sequence.tokens[:n], len(sequence.output)))


def test_streams_wander(directory):
    """The reference streams are not degenerate, so their equality says something."""
    streams = [greedy("llama", prompt(9 + i, seed=i), 64)[0] for i in range(5)]
    assert statistics.median(len(set(stream)) for stream in streams) >= 16


def test_an_off_by_one_in_a_block_table_changes_the_stream(directory):
    expected, _ = greedy("llama", prompt(19), 24)
    pages = Pages(executor(directory("llama")))
    donor = pages.add(prompt(19, seed=9))
    pages.prefill(donor)
    sequence = pages.add(prompt(19))
    pages.prefill(sequence)
    sequence.blocks[1] = donor.blocks[1]
    assert pages.generate(sequence, 23) != expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints(dtype, tmp_path):
    """Weights stored in 16 bits and computed in float32 are the reference's own 16-bit weights in float32."""
    save("qwen3", tmp_path, dtype)
    tokens = prompt(17)
    model = type(reference("qwen3")).from_pretrained(tmp_path, dtype=torch.float32).eval()
    pages = Pages(executor(tmp_path))
    ours = pages.logits((pages.add(tokens), 17))[0]
    torch.testing.assert_close(ours, reference_logits(model, tokens)[-1], rtol=5e-5, atol=5e-5)


def test_computing_in_bfloat16_is_near(directory):
    tokens = prompt(17)
    pages = Pages(executor(directory("llama"), "bfloat16"))
    ours = pages.logits((pages.add(tokens), 17))[0]
    exact = reference_logits(double("llama"), tokens)[-1]
    assert float((ours - exact).norm() / exact.norm()) < 0.05


def test_sharded_checkpoint(tmp_path):
    save("llama-tied", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = prompt(17)
    pages = Pages(executor(tmp_path))
    ours = pages.logits((pages.add(tokens), 17))[0]
    expected = reference_logits(reference("llama-tied"), tokens)[-1]
    torch.testing.assert_close(ours, expected, rtol=5e-5, atol=5e-5)
