"""The CPU kernels against the float64 specification, on whatever shapes and lengths come; unowned slots are poison."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schedlab.kernels import reference, torch_backend
from schedlab.kernels.attention import PagedKeys

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def relative_error(ours, expected):
    return float((ours.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


@dataclass
class Case:
    """Sequences over a shuffled pool whose unowned slots are NaN; `lengths` are (queries, context) pairs."""

    lengths: list[tuple[int, int]]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 8
    block_size: int = 4
    dtype: torch.dtype = torch.float64
    consecutive: bool = False
    seed: int = 0

    def __post_init__(self):
        rng = torch.Generator().manual_seed(self.seed)
        blocks = [-(-context // self.block_size) for _, context in self.lengths]
        pool = list(range(sum(blocks) + 3))
        if not self.consecutive:
            random.Random(self.seed).shuffle(pool)
        shape = (len(pool), self.block_size, self.kv_heads, self.head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
        self.tables = torch.full((len(blocks), max([*blocks, 1])), len(pool) + 10**6)  # beyond the length: never read
        for row, (count, (_, context)) in enumerate(zip(blocks, self.lengths, strict=True)):
            owned = torch.tensor([pool.pop(0) for _ in range(count)], dtype=torch.int64)
            self.tables[row, :count] = owned
            positions = torch.arange(context)
            at = owned[positions // self.block_size], positions % self.block_size
            for cache in (self.k_cache, self.v_cache):
                cache[at] = torch.randn(context, *shape[2:], generator=rng, dtype=torch.float64).to(self.dtype)
        self.contexts = torch.tensor([context for _, context in self.lengths])
        self.starts = torch.tensor([0, *(q for q, _ in self.lengths)]).cumsum(0)
        heads = self.kv_heads * self.group
        self.q = torch.randn(int(self.starts[-1]), heads, self.head_dim, generator=rng, dtype=torch.float64)
        self.q = self.q.to(self.dtype)

    def prefill(self, kernels, out=None, return_lse=False, **options):
        return kernels.prefill_attention(self.q, self.starts, self.paged(**options), out=out, return_lse=return_lse)

    def decode(self, kernels, out=None, return_lse=False, **options):
        return kernels.decode_attention(self.q, self.paged(**options), out=out, return_lse=return_lse)

    def paged(self, **options):
        options = {"scale": self.head_dim**-0.5, **options}
        return PagedKeys(self.k_cache, self.v_cache, self.tables, self.contexts, **options)


lengths = st.integers(0, 40).flatmap(lambda context: st.tuples(st.integers(0, context), st.just(context)))


@st.composite
def cases(draw, pairs=lengths):
    return Case(
        draw(st.lists(pairs, min_size=1, max_size=4)),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        head_dim=draw(st.sampled_from([8, 20])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        dtype=draw(st.sampled_from([torch.float64, torch.float32, torch.float16])),
        consecutive=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


WINDOWS = st.none() | st.integers(1, 45)


@given(cases(), WINDOWS, st.sampled_from([None, 5.0]), st.booleans())
def test_prefill_attention(case, window, softcap, with_lse):
    expected, expected_lse = case.prefill(reference, window=window, softcap=softcap, return_lse=True)
    ours = case.prefill(torch_backend, window=window, softcap=softcap, return_lse=with_lse)
    if with_lse:
        ours, lse = ours
        torch.testing.assert_close(lse.double(), expected_lse.double(), rtol=1e-3, atol=1e-3)
    assert ours.isfinite().all()
    assert relative_error(ours, expected) <= TOLERANCE[case.dtype]


@given(cases(st.tuples(st.just(1), st.integers(1, 40))), WINDOWS, st.booleans())
def test_decode_attention_and_a_prefill_of_one(case, window, with_lse):
    expected = case.decode(reference, window=window)
    ours = case.decode(torch_backend, window=window, return_lse=with_lse)
    assert relative_error(ours[0] if with_lse else ours, expected) <= TOLERANCE[case.dtype]
    assert relative_error(case.prefill(torch_backend, window=window), expected) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_in_every_dtype_over_several_query_tiles(dtype):
    case = Case([(1, 90), (300, 300), (129, 400)], block_size=16, head_dim=16, dtype=dtype)
    for window in (None, 17, 200):
        ours = case.prefill(torch_backend, window=window)
        assert relative_error(ours, case.prefill(reference, window=window)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("distance", [-1, 0, 1])
@pytest.mark.parametrize("queries", [1, 4])
def test_window_counts_the_query_itself(distance, queries):
    """A huge value at distance W - 1, W or W + 1 from the last query is seen only within the window of W keys."""
    window, context = 6, 20
    case = Case([(queries, context)])
    position = context - 1 - window - distance + 1
    block, offset = case.tables[0, position // 4], position % 4
    case.v_cache[block, offset] = 1e6
    outs = [case.prefill(torch_backend, window=window)]
    if queries == 1:
        outs.append(case.decode(torch_backend, window=window))
    for out in outs:
        assert bool((out[-1].abs() > 1).all()) == (distance < 1)


def test_any_chunking_equals_one_shot():
    whole = Case([(40, 40)])
    expected = whole.prefill(torch_backend)
    for chunk in (1, 3, 16, 39):
        pieces = []
        for start in range(0, 40, chunk):
            stop = min(start + chunk, 40)
            paged = replace(whole.paged(), context_lens_N=torch.tensor([stop]))
            starts = torch.tensor([0, stop - start])
            pieces.append(torch_backend.prefill_attention(whole.q[start:stop], starts, paged))
        assert relative_error(torch.cat(pieces), expected) <= 1e-12


def test_each_head_equals_its_own_multi_head_run():
    case = Case([(5, 21), (1, 9)], group=5)
    together = case.prefill(torch_backend)
    for head in range(case.q.shape[1]):
        kv = slice(head // 5, head // 5 + 1)
        paged = replace(case.paged(), k_cache=case.k_cache[:, :, kv], v_cache=case.v_cache[:, :, kv])
        alone = torch_backend.prefill_attention(case.q[:, head : head + 1], case.starts, paged)
        assert relative_error(together[:, head : head + 1], alone) <= 1e-12


def test_sequences_without_queries_or_keys_leave_their_neighbours_alone():
    mixed = Case([(0, 8), (3, 9), (0, 0), (1, 5), (0, 4)])
    alone = Case([(3, 9)])
    assert relative_error(mixed.prefill(torch_backend), mixed.prefill(reference)) <= 1e-12
    assert mixed.prefill(torch_backend).shape[0] == 4 and alone.q.shape[0] == 3
    padded = Case([(1, 0), (1, 9)])
    out = torch.full_like(padded.q, 7.0)
    result, lse = padded.prefill(torch_backend, out=out, return_lse=True)
    assert result is out and (out[0] == 0).all() and (lse[0] == -math.inf).all()
    out = padded.decode(torch_backend, out=torch.full_like(padded.q, 7.0))
    assert (out[0] == 0).all() and relative_error(out[1], padded.decode(reference)[1]) <= 1e-12


def test_sharing_blocks_equals_copies():
    case = Case([(2, 10), (2, 10)])
    case.tables[1, :2] = case.tables[0, :2]
    expected = case.prefill(torch_backend)
    copies = Case([(2, 10), (2, 10)])
    for ours, theirs in ((copies.k_cache, case.k_cache), (copies.v_cache, case.v_cache)):
        ours[copies.tables[1, :2]] = theirs[case.tables[0, :2]]
    assert relative_error(copies.prefill(torch_backend), expected) <= 1e-12


def test_strided_queries_and_caches():
    """Q as a view of packed rows, and heads before tokens in memory (HND) by strides alone."""
    case = Case([(5, 21), (1, 9)])
    expected = case.prefill(torch_backend)
    packed = torch.cat([case.q, torch.randn(6, 4, 8, dtype=torch.float64)], dim=1)
    case.q = packed[:, :6]
    case.k_cache, case.v_cache = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (case.k_cache, case.v_cache))
    assert relative_error(case.prefill(torch_backend), expected) <= 1e-12
    out = torch.empty(6, 12, 8, dtype=torch.float64)[:, ::2]
    assert relative_error(case.prefill(torch_backend, out=out), expected) <= 1e-12


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.25])])
def test_fp8_cache_with_scales(scale):
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, 2, 8, generator=rng) for _ in range(2))
    k[3, 1, 2] = 1e6  # saturates instead of turning into NaN
    q, tables = torch.randn(9, 6, 8, generator=rng), torch.tensor([[2, 0, 1]])
    angles = torch.rand(9, 4, generator=rng)
    outs = []
    for kernels in (torch_backend, reference):
        caches = [torch.zeros(3, 4, 2, 8, dtype=torch.float8_e4m3fn) for _ in range(2)]
        slots = torch.tensor([8, 9, 10, 11, 0, 1, 2, 3, 4])
        rotated = kernels.rope_kv_write(
            q, k, v, angles.cos(), angles.sin(), *caches, slots, k_scale=scale, v_scale=scale
        )
        paged = PagedKeys(*caches, tables, torch.tensor([9]), scale=0.3, k_scale=scale, v_scale=scale)
        outs.append(kernels.prefill_attention(rotated, torch.tensor([0, 9]), paged))
        outs.append(torch.stack(caches).float())
    assert torch.equal(outs[1], outs[3]) and outs[1].isfinite().all() and outs[1].abs().max() == 448
    assert relative_error(outs[0], outs[2]) <= 2e-6


@pytest.mark.parametrize("pairs", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rope_kv_write(pairs, dtype):
    """Partial rotation copies the tail; slot -1 is rotated and written nowhere; other slots stay as they were."""
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(5, h, 8, generator=rng, dtype=torch.float64).to(dtype) for h in (6, 2, 2))
    angles = 10 * torch.rand(5, pairs, generator=rng, dtype=torch.float64)
    slots = torch.tensor([7, -1, 3, 0, -1])
    results = []
    for kernels in (torch_backend, reference):
        caches = [torch.full((3, 4, 2, 8), 9.0, dtype=dtype) for _ in range(2)]
        rotated = kernels.rope_kv_write(q.clone(), k, v, angles.cos(), angles.sin(), *caches, slots)
        results.append([rotated, *caches])
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) <= TOLERANCE[dtype]
    assert (results[0][1].flatten(0, 1)[[1, 2, 4, 5, 6, 8, 9, 10, 11]] == 9).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm_and_silu_mul(dtype):
    rng = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(7, 48, generator=rng, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randn(48, generator=rng, dtype=torch.float64).to(dtype)
    before = x.clone()
    for args in ((x, weight, 1e-5), (x, weight, 1e-5, residual)):
        ours, expected = torch_backend.rms_norm(*args), reference.rms_norm(*args)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, expected)), strict=True):
            assert relative_error(a, b) <= TOLERANCE[dtype]
    assert relative_error(torch_backend.silu_mul(x), reference.silu_mul(x)) <= TOLERANCE[dtype]
    out = torch.empty(7, 24, dtype=dtype)
    assert torch_backend.silu_mul(x, out=out) is out and torch.equal(x, before)


# ---- sampling ----


@st.composite
def draws(draw):
    rows, vocab = draw(st.integers(1, 5)), draw(st.sampled_from([2, 17, 300]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randn(rows, vocab, generator=rng) * 3
    if draw(st.booleans()):
        logits = logits.round()  # ties
    if draw(st.booleans()):
        logits[:, ::2] = -math.inf

    def of(*values):
        return torch.tensor([draw(st.sampled_from(values)) for _ in range(rows)])

    parameters = of(0.0, 0.7, 1.0, 3.0), of(0, 1, 2, 5, 1000), of(1.0, 0.9, 0.3, 1e-9)
    return logits, *parameters, of(0, 1, 2**62), of(0, 1, 1000)


@given(draws())
def test_sample(arguments):
    tokens = torch_backend.sample(*arguments)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, reference.sample(*arguments))
    alone = [int(torch_backend.sample(*(a[i : i + 1] for a in arguments))) for i in range(len(tokens))]
    assert tokens.tolist() == alone, "a row's token depends on its batch"


def test_sample_follows_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -math.inf]]).expand(4000, 5)
    fixed = torch.full((4000,), 0.8), torch.zeros(4000, dtype=torch.int64), torch.ones(4000)
    tokens = torch_backend.sample(logits, *fixed, torch.full((4000,), 11), torch.arange(4000))
    shares = torch.bincount(tokens, minlength=5) / 4000
    expected = (logits[0] / 0.8).softmax(-1)
    assert float((shares - expected).abs().max()) < 4 * math.sqrt(0.25 / 4000)


def test_greedy_takes_the_lowest_of_equal_logits_and_bad_rows_are_marked():
    logits = torch.tensor([[0.0, 5.0, 5.0], [math.nan, 1, 2], [1, math.inf, 2], [-math.inf] * 3])
    for temperature in (0.0, 1.0):
        arguments = torch.full((4,), temperature), torch.full((4,), 1), torch.ones(4)
        tokens = torch_backend.sample(logits, *arguments, torch.zeros(4).long(), torch.zeros(4).long())
        assert tokens.tolist() == [1, -1, -1, -1]


def test_top_k_keeps_exactly_k_of_equal_logits():
    logits = torch.zeros(500, 10)
    arguments = torch.ones(500), torch.full((500,), 3), torch.ones(500)
    tokens = torch_backend.sample(logits, *arguments, torch.zeros(500).long(), torch.arange(500))
    assert set(tokens.tolist()) == {0, 1, 2}
