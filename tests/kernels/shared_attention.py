"""Tests of attention, for every implementation: the importing module gives the fixture `ops`.

Each is a fault that paged attention kernels have had somewhere, and what is right instead.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import FP8, TOLERANCE, Case, build, check, error
from hypothesis import given
from hypothesis import strategies as st

from schedlab.kernels.dispatch import Kernels

RAGGED = Case(contexts=(200, 77, 1, 130, 40), queries=(70, 77, 1, 1, 0))
DECODE = Case(contexts=(600, 1, 130, 0, 513))
SHORT_PREFILL = Case(contexts=(90, 77, 5), queries=(40, 77, 1))
SHORT_DECODE = Case(contexts=(90, 1, 0, 33))
NARROW = {"heads": 2, "kv_heads": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [RAGGED, DECODE], ids=["prefill", "decode"])
def test_ragged_batch(ops: Kernels, case: Case, dtype: torch.dtype) -> None:
    """One shot, chunk on a long context, single queries, a sequence without queries, lengths about tile and split."""
    check(ops, case.but(dtype=dtype, **NARROW))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 12, 24])
def test_query_heads_of_a_group(ops: Kernels, group: int) -> None:
    """A group above or beside a power of two must not bleed into the next KV head."""
    case = Case(contexts=(37,), heads=2 * group, kv_heads=2, head_dim=32, dtype=torch.float16)
    check(ops, case)
    check(ops, case.but(queries=(9,)))


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 112, 128, 192, 256])
def test_head_size(ops: Kernels, head_dim: int) -> None:
    """Lanes that pad a head to a power of two are neither read past the row nor stored."""
    case = Case(contexts=(37, 9), head_dim=head_dim, dtype=torch.float32 if head_dim <= 128 else torch.float16)
    check(ops, case)
    check(ops, case.but(queries=(20, 9)))


@pytest.mark.parametrize("block_size", [1, 8, 48, 64, 256])
def test_block_size(ops: Kernels, block_size: int) -> None:
    case = Case(contexts=(100, 3, 64), block_size=block_size, **NARROW)
    check(ops, case)
    check(ops, case.but(queries=(40, 3, 1)))


@pytest.mark.parametrize("window", [1, 2, 31, 64, 65, 1000])
def test_window_counts_the_query_itself(ops: Kernels, window: int) -> None:
    """W keys, self included, in prefill as in decode: the key before them is huge and must not be seen."""
    case = Case(contexts=(150, 20), queries=(1, 1), window=window)
    batch = build(case)
    for n, context in enumerate(case.contexts):
        if context > window:
            block, offset = divmod(context - 1 - window, case.block_size)
            batch.k_cache[batch.tables[n, block], offset] = 1e4 * batch.q[n, ::2].sign()
            batch.v_cache[batch.tables[n, block], offset] = 1e6
    expected, _ = batch.expected()
    assert expected.abs().max() < 100, "the reference sees the huge key"
    assert error(batch.run(ops), expected) <= TOLERANCE[case.dtype]
    assert error(batch._replace(starts=None).run(ops), expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("window", [5, 100])
def test_rows_whose_first_tiles_are_masked(ops: Kernels, window: int) -> None:
    """-inf - -inf is NaN: a row that sees nothing of the first tile its tile of rows visits stays right."""
    check(ops, Case(contexts=(300, 257), queries=(140, 60), window=window, dtype=torch.float16, **NARROW))
    check(ops, Case(contexts=(700, 513), window=window, **NARROW))


def test_query_without_keys_is_zero(ops: Kernels) -> None:
    """More queries than context: rows before position 0 see no key and give 0, and -inf as their lse."""
    batch = build(Case(contexts=(3, 0, 5), queries=(7, 2, 5)))
    out, lse = batch.run(ops, return_lse=True)
    expected, expected_lse = batch.expected()
    assert error(out, expected) <= 2e-6
    assert (out[:4] == 0).all() and (out[7:9] == 0).all()
    assert torch.equal(lse.isinf(), expected_lse.isinf())


def test_context_of_zero_pads_a_decode_batch(ops: Kernels) -> None:
    """A padding row becomes exactly 0, over whatever stood there; its neighbours do not notice."""
    batch = build(Case(contexts=(40, 0, 33, 0)))
    out = torch.full_like(batch.q, torch.nan)
    batch.run(ops, out=out)
    assert (out[[1, 3]] == 0).all()
    assert error(out[[0, 2]], batch.select([0, 2]).run(ops)) <= 1e-6


@pytest.mark.parametrize("case", [RAGGED, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"softcap": 0.5, "scale": 40.0}, {"window": 33}], ids=str)
def test_lse(ops: Kernels, case: Case, options: dict) -> None:
    """The natural log of the sum of exponentials, after scale and soft cap, without the keys outside the window."""
    batch = build(case.but(**options, **NARROW))
    out, lse = batch.run(ops, return_lse=True)
    expected, expected_lse = batch.expected()
    seen = ~expected_lse.isinf()
    assert error(out, expected) <= TOLERANCE[case.dtype]
    assert torch.equal(lse.isinf(), ~seen) and (lse[~seen] < 0).all()
    assert (lse[seen] - expected_lse[seen]).abs().max() <= 1e-5 * (1 + expected_lse[seen].abs().max())


def test_cascade_by_lse(ops: Kernels) -> None:
    """Two halves of the context, weighted by their lse, are the whole: what a shared prefix is merged with."""
    whole = build(Case(contexts=(96,)))
    split = 48 // 16
    first = whole._replace(tables=whole.tables[:, :split], contexts=torch.tensor([48]))
    second = whole._replace(tables=whole.tables[:, split:], contexts=torch.tensor([48]))
    (out_a, lse_a), (out_b, lse_b) = first.run(ops, return_lse=True), second.run(ops, return_lse=True)
    weight = torch.sigmoid(lse_a - lse_b)[..., None]
    assert error(out_a * weight + out_b * (1 - weight), whole.expected()[0]) <= 2e-6


def test_chunks_equal_one_shot(ops: Kernels) -> None:
    """Any cut of a prompt gives the same rows, down to a single query, and a single query equals decode."""
    batch = build(Case(contexts=(100,), queries=(100,), **NARROW))
    whole = batch.run(ops)
    pieces = []
    for start, stop in ((0, 1), (1, 33), (33, 97), (97, 99), (99, 100)):
        bounds = torch.tensor([0, stop - start])
        pieces.append(batch._replace(q=batch.q[start:stop], contexts=torch.tensor([stop]), starts=bounds).run(ops))
    assert error(torch.cat(pieces), whole) <= 2e-6
    decoded = batch._replace(q=batch.q[99:], starts=None).run(ops)
    assert error(decoded, whole[99:]) <= 2e-6


@pytest.mark.parametrize("case", [SHORT_PREFILL, SHORT_DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "HND"},
        {"packed": True},
        {"layout": "HND", "packed": True, "index_dtype": torch.int64, "spare_columns": 9, "dtype": torch.float16},
    ],
    ids=["HND", "packed", "all"],
)
def test_strides(ops: Kernels, case: Case, options: dict) -> None:
    check(ops, case.but(**options))


@pytest.mark.parametrize("case", [SHORT_PREFILL, SHORT_DECODE], ids=["prefill", "decode"])
def test_out_of_any_stride(ops: Kernels, case: Case) -> None:
    batch = build(case)
    wide = torch.full((len(batch.q), case.heads + 3, case.head_dim), 7.0)
    out = wide[:, 2:-1]
    result = batch.run(ops, out=out)
    assert result.data_ptr() == out.data_ptr()
    assert error(out, batch.expected()[0]) <= 2e-6
    assert (wide[:, :2] == 7).all() and (wide[:, -1] == 7).all()


@pytest.mark.parametrize("queries", [None, (30, 17)], ids=["decode", "prefill"])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_float8_cache_scales_apply_once(ops: Kernels, queries: tuple | None, as_tensor: bool) -> None:
    case = Case(contexts=(70, 17), queries=queries, dtype=torch.float16, cache_dtype=FP8, k_scale=0.25, v_scale=3.0)
    batch = build(case)
    if as_tensor:
        batch.options.update(k_scale=torch.tensor(0.25), v_scale=torch.tensor([3.0]))
    assert error(batch.run(ops), batch.expected()[0]) <= TOLERANCE[case.dtype]
    batch.options.update(k_scale=None, v_scale=None)
    assert error(batch.run(ops), batch.expected()[0]) <= TOLERANCE[case.dtype]


def test_shared_blocks_equal_copies(ops: Kernels) -> None:
    """Sequences that share prefix blocks get what they would from blocks of their own."""
    batch = build(Case(contexts=(64, 64)))
    owner, other = batch.tables[0, :3].clone(), batch.tables[1, :3]
    for cache in (batch.k_cache, batch.v_cache):
        cache[other] = cache[owner]
    copies = batch.run(ops)
    batch.tables[1, :3] = owner
    assert error(batch.run(ops), copies) <= 1e-7


@pytest.mark.parametrize("case", [SHORT_PREFILL, SHORT_DECODE], ids=["prefill", "decode"])
def test_large_scores(ops: Kernels, case: Case) -> None:
    """Scores in the thousands: the peak is subtracted before anything is exponentiated."""
    batch = build(case.but(scale=100.0, **NARROW))
    out, (expected, _) = batch.run(ops), batch.expected()
    assert out.isfinite().all() and error(out, expected) <= 1e-3, "a float32 score of 4,000 is good to about 2e-4"


@pytest.mark.parametrize("options", [{}, {"softcap": 1e6}, {"window": 40}], ids=str)
def test_equal_keys_give_the_mean_at_any_score(ops: Kernels, options: dict) -> None:
    """Weights add up to 1 where scores are so large that their log-sum-exp is rounded by more than a weight's error."""
    for score in (1e4, 1e5):
        batch = build(Case(contexts=(70, 33), queries=(70, 1), **options, **NARROW))
        for cache in (batch.k_cache, batch.v_cache):
            cache[:] = 1.0
        batch = batch._replace(q=torch.full_like(batch.q, score / batch.options["scale"] / batch.q.shape[-1]))
        for out in (batch.run(ops), batch.run(ops, return_lse=True)[0]):
            assert (out - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": 33}], ids=str)
def test_what_a_query_does_not_see_does_not_spoil_it(ops: Kernels, which: str, options: dict) -> None:
    """NaN from position 80 on: the rows before it are what they were, those from it on are NaN, as they should be."""
    if ops.name == "triton" and which == "v_cache":
        pytest.skip("the Triton kernels multiply a tile's values whole, hidden ones by 0")
    batch = build(Case(contexts=(150,), queries=(150,), **options, **NARROW))
    clean, clean_lse = batch.run(ops, return_lse=True)
    getattr(batch, which)[batch.tables[0, 80 // 16 : 10].long()] = torch.nan
    out, lse = batch.run(ops, return_lse=True)
    for result in (out, batch.run(ops)):
        assert error(result[:80], clean[:80]) <= 1e-6
        assert result[80:].isnan().all()
    assert (lse[:80] - clean_lse[:80]).abs().max() <= 1e-5


@pytest.mark.parametrize("case", [Case(contexts=(), queries=()), Case(contexts=(5,), queries=(0,))])
def test_nothing_to_do(ops: Kernels, case: Case) -> None:
    batch = build(case)
    assert batch.run(ops).shape == batch.q.shape


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    contexts = draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    decode = draw(st.booleans())
    queries = None if decode else tuple(draw(st.integers(0, context)) for context in contexts)
    return Case(
        contexts=tuple(contexts),
        queries=queries,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 24, 64])),
        block_size=draw(st.sampled_from([1, 4, 16, 20])),
        window=draw(st.none() | st.integers(1, 100)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        packed=draw(st.booleans()),
        spare_columns=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 9)),
    )


@given(case=ragged())
def test_any_ragged_batch(ops: Kernels, case: Case) -> None:
    batch = build(case)
    out, lse = batch.run(ops, return_lse=True)
    expected, expected_lse = batch.expected()
    assert error(out, expected) <= 2e-6
    assert torch.equal(lse.double().isinf(), expected_lse.isinf())


def test_softcap_saturates(ops: Kernels) -> None:
    """Huge scores under a cap are the cap: equal weights, not inf / inf."""
    batch = build(Case(contexts=(20,), softcap=2.0, scale=1e4))
    batch.k_cache[batch.tables[0, :2].long()] = 1.0
    batch = batch._replace(q=torch.ones_like(batch.q))
    out, lse = batch.run(ops, return_lse=True)
    assert (lse - (2.0 + math.log(20))).abs().max() <= 1e-5
    assert error(out, batch.expected()[0]) <= 2e-6
