"""Batch-invariant mode: a request's logits are the same bits alone, in any batch, and however it was computed."""

import random

import pytest
import torch
from checkpoints import VARIANTS, double, reference_logits, save
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import Pages
from test_torch_backend import TOLERANCE, WINDOWS, cases, relative_error

from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.executor import ModelExecutor
from schedlab.kernels import reference, torch_invariant


def prompt(length, seed):
    return random.Random(seed).choices(range(3, 97), k=length)


def executor(path, dtype="float32", threads=1):
    return ModelExecutor(ModelConfig.from_hf(path), path=path, dtype=dtype, num_threads=threads, batch_invariant=True)


def logits_of_every_step(pages, tokens, grants=None, companions=()):
    """One request's logits, a row an emitted position, computed by `grants` beside growing companions."""
    sequence = pages.add(tokens)
    others = [pages.add(prompt(5 + 9 * i, 50 + i), f"o{i}") for i in range(3)] if companions else []
    rows = []
    for count in grants or [1] * len(tokens):
        sequence.tokens = tokens[: sequence.computed + count]
        beside = [(other, len(other.tokens) - other.computed) for other in others]
        for other in others:
            other.tokens += prompt(1, len(other.tokens))
        at = companions and random.Random(count + len(rows)).randrange(len(beside) + 1)
        batch = [*beside[:at], (sequence, count), *beside[at:]] if companions else [(sequence, count)]
        emitting = [i for i, (s, n) in enumerate(batch) if s.computed + n == len(s.tokens)]
        logits = pages.logits(*batch)
        rows.append(logits[emitting.index(batch.index((sequence, count)))])
    for finished in (sequence, *others):
        pages.drop(finished)
    return torch.stack(rows)


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("float32", 2), ("float64", 1), ("bfloat16", 1)])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3", "group-7"])
def test_bits_do_not_depend_on_batch_or_chunking(variant, dtype, threads, tmp_path):
    pages = Pages(executor(save(variant, tmp_path), dtype, threads), num_blocks=256)
    tokens = prompt(150, 1)  # over two tiles of keys
    alone = logits_of_every_step(pages, tokens)
    for chunk in (4, 16, 17, 150):
        grants = [min(chunk, 150 - start) for start in range(0, 150, chunk)]
        ends = torch.tensor(grants).cumsum(0) - 1
        for companions in (False, True):
            assert torch.equal(logits_of_every_step(pages, tokens, grants, companions), alone[ends])
    assert torch.equal(logits_of_every_step(pages, tokens, companions=True), alone)


def test_bits_survive_hit_recompute_and_swap(tmp_path):
    pages = Pages(executor(save("llama", tmp_path)), num_blocks=256)
    tokens = prompt(90, 2)
    expected = logits_of_every_step(pages, tokens)[-1]

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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases(), WINDOWS, st.sampled_from([None, 5.0]))
def test_attention(case, window, softcap):
    expected, expected_lse = case.prefill(reference, window=window, softcap=softcap, return_lse=True)
    ours, lse = case.prefill(torch_invariant, window=window, softcap=softcap, return_lse=True)
    torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-3, atol=1e-3)
    assert ours.isfinite().all() and relative_error(ours, expected) <= TOLERANCE[case.dtype]


def test_it_is_refused_elsewhere_than_on_the_cpu(tmp_path):
    from schedlab.framework.errors import ConfigError

    config = ModelConfig.from_hf(save("llama", tmp_path))
    with pytest.raises(ConfigError, match="batch_invariant"):
        ModelExecutor(config, device="cuda", batch_invariant=True)
