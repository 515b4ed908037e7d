"""Tests of sampling, for every implementation: the importing module gives the fixture `ops`."""

from __future__ import annotations

import math

import pytest
import torch
from cases import REFERENCE
from torch import Tensor

from schedlab.kernels.dispatch import Kernels
from schedlab.kernels.reference import gumbel_noise

ROWS = 6
VOCAB = 500
SEVERAL = 5
"""Rows with seeds of their own, enough for each of two or three likely candidates to be drawn."""


def logits(rows: int = ROWS, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(
    ops: Kernels,
    logits_SV: Tensor,
    temperature: float | list[float] = 1.0,
    top_k: int | list[int] = 0,
    top_p: float | list[float] = 1.0,
    seed: int | list[int] = 0,
    position: int | list[int] = 7,
) -> Tensor:
    """Numbers stand for every row."""

    def column(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).broadcast_to(len(logits_SV)).contiguous()

    floats = column(temperature, torch.float32), column(top_p, torch.float32)
    return ops.sample(
        logits_SV,
        floats[0],
        column(top_k, torch.int64),
        floats[1],
        column(seed, torch.int64),
        column(position, torch.int64),
    )


def test_temperature_zero_is_the_lowest_index_of_the_maximum(ops: Kernels) -> None:
    x = logits()
    x[0, [400, 17, 90]] = 50.0
    x[1, 499], x[2, 0] = 50.0, 50.0
    x[3] = 1.0
    x[4, 5], x[4, 6] = -0.0, 0.0
    x[4] = torch.where(x[4] > 0, -x[4], x[4])
    x[5, VOCAB - 1] = x[5, 0] = 50.0
    assert draw(ops, x, temperature=0.0).tolist() == [17, 499, 0, 0, 5, 0]


def test_each_row_by_its_own_parameters(ops: Kernels) -> None:
    """Greedy, plain, top-k, top-p and both in one batch, the same tokens as the reference."""
    x = logits(8)
    parameters = {
        "temperature": [0.0, 1.0, 1.0, 0.7, 1.0, 1.5, 2.0, 1e-3],
        "top_k": [0, 0, 5, 1, -1, 50, 0, VOCAB + 9],
        "top_p": [1.0, 1.0, 1.0, 1.0, 0.9, 0.5, 0.0, 0.3],
        "seed": [-(2**63), 2**63 - 1, 5, 6, -7, 8, 9, 10],
        "position": [1, 2, 2**40, 4, 5, 6, 7, 8],
    }
    assert draw(ops, x, **parameters).tolist() == draw(REFERENCE, x, **parameters).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_token_is_of_the_logits_as_given(ops: Kernels, dtype: torch.dtype) -> None:
    """Ties that rounding to 16 bits makes are ties; the lowest ids of them are kept."""
    x = logits().to(dtype)
    assert draw(ops, x, top_k=20).tolist() == draw(REFERENCE, x, top_k=20).tolist()


def test_token_depends_on_nothing_else_of_the_batch(ops: Kernels) -> None:
    """The same row, parameters, seed and position: the same token alone, in any place, beside any others."""
    x = logits()
    whole = draw(ops, x, top_p=0.95, seed=list(range(ROWS)))
    assert draw(ops, x[2:3], top_p=0.95, seed=2).tolist() == whole[2:3].tolist()
    mixed = draw(
        ops, x.flip(0), temperature=[0, 0, 1, 1, 0, 0], top_k=[1, 1, 0, 0, 1, 1], top_p=0.95, seed=[0, 0, 3, 2, 0, 0]
    )
    assert mixed[[2, 3]].tolist() == whole[[3, 2]].tolist()


def test_seed_and_position_make_the_draw(ops: Kernels) -> None:
    flat = torch.zeros(ROWS, VOCAB)
    tokens = {
        tuple(draw(ops, flat, seed=seed, position=position).tolist())
        for seed, position in ((1, 2), (2, 1), (1, 3), (2, 2))
    }
    assert len(tokens) == 4


def test_top_k_keeps_exactly_k_on_ties(ops: Kernels) -> None:
    """Of equal logits the lowest ids stay, and each of them is drawn at times."""
    x = torch.full((SEVERAL, 40), -1.0)
    x[:, [30, 3, 12, 25, 39]] = 2.0
    drawn = set(draw(ops, x, top_k=3, seed=list(range(SEVERAL))).tolist())
    assert drawn == {3, 12, 25}
    assert draw(ops, x[:2], top_k=1, seed=[0, 1]).tolist() == [3, 3]


def test_top_p_keeps_exactly_the_needed_ties(ops: Kernels) -> None:
    """Four equal candidates of mass 1/4: of top_p 0.6 three are needed, those of the lowest ids."""
    x = torch.full((SEVERAL, 40), -torch.inf)
    x[:, [30, 3, 12, 25]] = 2.0
    assert set(draw(ops, x, top_p=0.6, seed=list(range(SEVERAL))).tolist()) == {3, 12, 25}
    assert draw(ops, x[:2], top_p=0.0, seed=[0, 1]).tolist() == [3, 3]


def test_top_p_is_of_what_top_k_left(ops: Kernels) -> None:
    """Masses 0.4, 0.3, 0.2, 0.1: top-k 2 leaves 4/7 and 3/7, and top-p 0.5 of those the first alone."""
    x = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log().expand(SEVERAL, 4).contiguous()
    assert set(draw(ops, x, top_k=2, top_p=0.5, seed=list(range(SEVERAL))).tolist()) == {1}
    assert set(draw(ops, x, top_p=0.5, seed=list(range(SEVERAL))).tolist()) == {1, 2}


def test_top_k_one_is_greedy(ops: Kernels) -> None:
    x = logits(3)
    assert torch.equal(draw(ops, x, top_k=1, temperature=5.0), draw(ops, x, temperature=0.0))
    assert torch.equal(draw(ops, x, top_p=1e-6, temperature=5.0), draw(ops, x, temperature=0.0))


def test_minus_infinity_is_never_drawn(ops: Kernels) -> None:
    x = torch.full((6, 30), -torch.inf)
    x[:, [4, 28]] = torch.tensor([0.0, -20.0])
    drawn = draw(ops, x, temperature=50.0, top_k=10, seed=list(range(6)))
    assert set(drawn.tolist()) == {4, 28}


def test_row_without_a_finite_maximum_yields_minus_one(ops: Kernels) -> None:
    """Greedy or not, and its neighbours are drawn as ever."""
    x = logits(6)
    x[1, 3], x[2] = torch.nan, -torch.inf
    x[3, 9] = torch.nan
    x[4, 9] = torch.inf
    tokens = draw(ops, x, temperature=[0, 0, 1, 1, 1, 1])
    assert tokens[[1, 2, 3, 4]].tolist() == [-1] * 4
    clean = logits(6)
    assert tokens[[0, 5]].tolist() == draw(ops, clean, temperature=[0, 0, 1, 1, 1, 1])[[0, 5]].tolist()


@pytest.mark.parametrize("vocab", [1, 2, 2047, 2049, 8193])
def test_vocabularies_about_the_tile(ops: Kernels, vocab: int) -> None:
    x = logits(2, vocab)
    x[0, vocab - 1] = 9.0
    x[1] = 0.0
    parameters = {"temperature": [0.0, 1.0], "top_k": max(1, vocab - 1), "seed": 4}
    assert draw(ops, x, **parameters).tolist() == draw(REFERENCE, x, **parameters).tolist()


def test_tiny_temperature_is_greedy(ops: Kernels) -> None:
    x = logits()
    for top_p in (1.0, 0.5):
        assert torch.equal(draw(ops, x, temperature=1e-40, top_p=top_p), draw(ops, x, temperature=0.0))


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 20,000 draws over 4 candidates; 21.1 is the 99.99 % quantile of 3 degrees of freedom."""
    x = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20_000, 4).contiguous() * 0.5
    counts = torch.bincount(draw(REFERENCE, x, temperature=0.5, position=list(range(20_000))), minlength=4)
    expected = torch.tensor([0.5, 0.3, 0.15, 0.05]) * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 21.1


def test_noise_is_gumbel() -> None:
    """Mean and variance of the standard Gumbel law, no correlation between neighbouring rows, positions and ids."""
    seeds, positions, ids = torch.arange(20)[:, None, None], torch.arange(20)[:, None], torch.arange(500)
    noise = gumbel_noise(seeds, positions, ids)
    spread = 1 / math.sqrt(noise.numel())
    assert abs(noise.mean() - 0.5772156649) < 5 * 1.2825 * spread
    assert abs(noise.var() - math.pi**2 / 6) < 5 * 3.5 * spread
    normed = (noise - noise.mean()) / noise.std()
    for a, b in ((normed[1:], normed[:-1]), (normed[:, 1:], normed[:, :-1]), (normed[..., 1:], normed[..., :-1])):
        assert abs((a * b).mean()) < 5 * spread


def test_noise_of_known_values() -> None:
    """Golden: the noise is part of what a seed means, so it never changes. Computed with integers of any size."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    for seed, position, token in ((0, 0, 0), (2**63 - 1, 5, 128_255), (-1, 2**40, 3)):
        key = mix((mix(seed & mask) + position) & mask)
        uniform = ((mix((key + token * 0x9E3779B97F4A7C15) & mask) >> 32) + 0.5) / 2**32
        noise = gumbel_noise(torch.tensor(seed), torch.tensor(position), torch.tensor(token))
        assert noise.item() == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)
