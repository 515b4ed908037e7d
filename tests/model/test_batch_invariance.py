"""Batch-invariant mode: a request's logits are the same bits alone, in any batch, and however it was computed."""

import random

import pytest
import torch
from checkpoints import VARIANTS, double, reference_logits, save
from hypothesis import given
from hypothesis import strategies as st
from paged import Pages
from test_torch_backend import TOLERANCE, WINDOWS, cases, relative_error

from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.hf import read_config
from schedlab.kernels import reference, torch_invariant


def prompt(length, seed):
    return random.Random(seed).choices(range(3, 97), k=length)


def executor(path, dtype="float32", threads=1):
    return ModelExecutor(read_config(path), path=path, dtype=dtype, num_threads=threads, batch_invariant=True)


def logits_along(pages, tokens, grants, companions=0):
    """One request's logits after each of `grants`, beside companions that come before and after it in the batch."""
    sequence = pages.add(tokens)
    others = [pages.add(prompt(5 + 9 * i, 50 + i), f"o{i}") for i in range(companions)]
    rows = []
    for count in grants:
        sequence.tokens = tokens[: sequence.computed + count]
        beside = [(other, len(other.tokens) - other.computed) for other in others]
        at = random.Random(len(rows)).randint(0, companions)
        logits = pages.logits(*beside[:at], (sequence, count), *beside[at:])
        rows.append(logits[at])
        for other in others:
            other.tokens += prompt(1, len(other.tokens))
    for finished in (sequence, *others):
        pages.drop(finished)
    return torch.stack(rows)


LENGTH = 90
"""Tokens of a request that needs two tiles of keys."""


def assert_same_bits(pages):
    tokens = prompt(LENGTH, 1)
    singly = [40] + [1] * (LENGTH - 40)
    alone = logits_along(pages, tokens, singly)
    assert torch.equal(logits_along(pages, tokens, singly, companions=3), alone)
    for chunk in (4, 17, LENGTH):
        grants = [min(chunk, LENGTH - start) for start in range(0, LENGTH, chunk)]
        found = logits_along(pages, tokens, grants, companions=chunk % 3)
        for end, row in zip(torch.tensor(grants).cumsum(0).tolist(), found, strict=True):
            assert end < 40 or torch.equal(row, alone[end - 40])


@pytest.mark.parametrize(
    "variant", ["llama", "mistral-window", "qwen2", "qwen3", "group-7", "qwen3-moe", "gpt-oss", "gemma3"]
)
def test_bits_do_not_depend_on_batch_or_chunking(variant, tmp_path):
    assert_same_bits(Pages(executor(save(variant, tmp_path)), num_blocks=128))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_bits_do_not_depend_on_batch_or_chunking_in_other_dtypes(dtype, tmp_path):
    assert_same_bits(Pages(executor(save("llama", tmp_path), dtype), num_blocks=128))


@pytest.mark.full
def test_bits_do_not_depend_on_batch_or_chunking_with_two_threads(tmp_path):
    assert_same_bits(Pages(executor(save("llama", tmp_path), threads=2), num_blocks=128))


def test_the_ordinary_kernels_do_not_promise_it(tmp_path):
    """If they kept the bits too, the tests above would show nothing."""
    config = read_config(save("llama", tmp_path))
    with pytest.raises(AssertionError):
        assert_same_bits(Pages(ModelExecutor(config, path=tmp_path), num_blocks=128))


def test_bits_survive_hit_recompute_and_swap(tmp_path):
    pages = Pages(executor(save("llama", tmp_path)), num_blocks=256)
    tokens = prompt(90, 2)
    expected = logits_along(pages, tokens, [50] + [1] * 40)[-1]

    def last_logits(sequence, *beside):
        sequence.tokens = list(tokens)
        return pages.logits((sequence, 90 - sequence.computed), *beside)[0]

    donor = pages.add(tokens[:88], "donor")
    pages.prefill(donor, chunk=12)
    hit = pages.add(tokens, "hit")
    pages.share(hit, donor, 20)
    assert torch.equal(last_logits(hit), expected)

    swapped, other = pages.add(tokens[:70], "swapped"), pages.add(prompt(33, 3), "other")
    pages.prefill(swapped, chunk=31)
    pages.swap_out(swapped)
    pages.swap_in(swapped, (other, 12))
    assert torch.equal(last_logits(swapped, (other, 21)), expected)
    pages.drop(swapped)
    assert torch.equal(last_logits(swapped), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant, tmp_path):
    tokens = prompt(80, 4)
    pages = Pages(executor(save(variant, tmp_path), "float64"), num_blocks=64)
    ours = pages.logits((pages.add(tokens), 80))[0]
    torch.testing.assert_close(ours, reference_logits(double(variant), tokens)[-1], rtol=1e-10, atol=1e-10)


@given(cases(), WINDOWS, st.sampled_from([None, 5.0]))
def test_attention(case, window, softcap):
    expected, expected_lse = case.prefill(reference, window=window, softcap=softcap, return_lse=True)
    ours, lse = case.prefill(torch_invariant, window=window, softcap=softcap, return_lse=True)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-3, atol=1e-3)
    assert ours.isfinite().all() and relative_error(ours, expected) <= TOLERANCE[case.dtype]
