"""Every kernel against the float64 reference on this device, and what only a device shows: graph replay, large pools.

Errors are ||out - reference|| / ||reference||. Sampled tokens are counted where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from schedlab.experiments.device.paged_batches import FP8, Batch, Case, build, error
from schedlab.experiments.device.rows import Device, Row, count
from schedlab.kernels.quantised import KINDS, quantise
from schedlab.kernels.quantised_linear import linear

SECTION = "correctness"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "bf16, head 128, group 4": Case((), heads=32, kv_heads=8, head_dim=128, dtype=BF16),
    "fp16, head 64, window 100": Case((), heads=9, kv_heads=3, dtype=FP16, window=100),
    "bf16, head 80, softcap, head-major, packed": Case(
        (), head_dim=80, dtype=BF16, softcap=20.0, layout="HND", packed=True, index_dtype=torch.int64
    ),
    "fp32, head 64": Case(()),
    "bf16, head 128, float8 cache": Case((), head_dim=128, dtype=BF16, cache_dtype=FP8, k_scale=0.5, v_scale=2.0),
    "bf16, head 256, group 24": Case((), heads=24, kv_heads=1, head_dim=256, dtype=BF16),
}
CONTEXTS, QUERIES = (1500, 700, 1, 513, 40, 0), (600, 700, 1, 1, 0, 0)
FEW_CONTEXTS, FEW_QUERIES = (70, 1, 0), (20, 1, 0)
TOLERANCE = {BF16: 5e-3, FP16: 1e-3, FP32: 1e-5}


def tolerance(device: Device, dtype: torch.dtype) -> float:
    """The interpreter truncates bfloat16 where a GPU rounds."""
    return 1e-2 if device.interpreted and dtype == BF16 else TOLERANCE[dtype]


def _case(device: Device, name: str) -> Case:
    """One KV head is enough for the interpreter, whose time goes by programs."""
    case = CASES[name]
    return case.but(heads=case.heads // case.kv_heads, kv_heads=1) if device.interpreted else case


def attention(device: Device) -> Iterator[Row]:
    contexts, queries = (FEW_CONTEXTS, FEW_QUERIES) if device.interpreted else (CONTEXTS, QUERIES)
    for name in CASES:
        case = _case(device, name)
        for phase, counts in (("prefill", queries), ("decode", None)):
            batch = build(case.but(contexts=contexts, queries=counts), device.name)
            expected, expected_lse = batch.expected()
            out, lse = batch.run(device.ops, return_lse=True)
            most = tolerance(device, case.dtype)
            yield Row(SECTION, f"{phase} {name}", error(out, expected), "error", most=most)
            far = ((lse - expected_lse).abs() > 1e-2) & ~expected_lse.isinf()
            wrong = count(far | (lse.isinf() != expected_lse.isinf()))
            yield Row(SECTION, f"{phase} {name}, lse", wrong, "wrong", most=0)


def batch_invariance(device: Device) -> Iterator[Row]:
    """A row's bits alone, and in another batch, order and table width."""
    for phase, counts in (("prefill", (300, 7, 20)), ("decode", None)):
        contexts = (40, 7, 33) if device.interpreted else (2000, 7, 600)
        counts = counts if counts is None or not device.interpreted else (20, 7, 5)
        case = _case(device, "bf16, head 128, group 4")
        batch = build(case.but(contexts=contexts, queries=counts), device.name)
        whole = batch.run(device.ops)
        spans, differing = torch.split(whole, list(batch.counts)), 0.0
        for rows in ([0], [2, 0], [1, 2, 0]):
            selected = batch.select(rows)
            wider = selected._replace(tables=torch.nn.functional.pad(selected.tables, (0, 64)))
            expected = torch.cat([spans[n] for n in rows])
            differing += count((wider.run(device.ops) != expected).any(-1).any(-1))
        yield Row(SECTION, f"{phase} rows whose bits depend on the batch", differing, "rows", most=0)


def large_pools(device: Device) -> Iterator[Row]:
    """The last block of a pool of 2³¹ elements."""
    batch = build(Case((30,), heads=8, kv_heads=8, head_dim=64, dtype=BF16, block_size=32), device.name)
    blocks = 2**31 // batch.k_cache[0].numel() + 2
    pools = []
    for cache in (batch.k_cache, batch.v_cache):
        pools.append(torch.empty((blocks, *cache.shape[1:]), dtype=cache.dtype, device=device.name))
        pools[-1][-1:] = cache[batch.tables[0, :1].long()]
    tables = torch.full_like(batch.tables, blocks - 1)
    far = batch._replace(k_cache=pools[0], v_cache=pools[1], tables=tables)
    wrong = count(far.run(device.ops) != batch.run(device.ops))
    yield Row(SECTION, "decode from beyond 2³¹ elements", wrong, "wrong", most=0)


def graph_replay(device: Device) -> Iterator[Row]:
    """A captured decode serves longer contexts, other tables and padding rows; nothing of them was captured."""
    if device.interpreted:
        return
    case = Case((900, 20, 0), heads=8, kv_heads=2, head_dim=128, dtype=BF16, spare_columns=60)
    first = build(case, device.name)
    second = build(case.but(contexts=(300, 1700, 5), spare_columns=10, seed=1), device.name)
    width = max(first.tables.shape[1], second.tables.shape[1])
    blocks = max(len(first.k_cache), len(second.k_cache))
    static = first._replace(
        k_cache=torch.zeros(blocks, *first.k_cache.shape[1:], dtype=BF16, device=device.name),
        v_cache=torch.zeros(blocks, *first.k_cache.shape[1:], dtype=BF16, device=device.name),
        tables=torch.zeros(len(case.contexts), width, dtype=torch.int32, device=device.name),
    )
    out = torch.empty_like(static.q)
    _load(static, first)
    replay = device.captured(lambda: static.run(device.ops, out=out))
    for name, batch in (("as captured", first), ("longer", second)):
        _load(static, batch)
        replay()
        yield Row(SECTION, f"decode replayed from a graph, {name}", error(out, batch.expected()[0]), "error", most=5e-3)


def _load(static: Batch, batch: Batch) -> None:
    static.q.copy_(batch.q)
    static.contexts.copy_(batch.contexts)
    static.tables.zero_()[:, : batch.tables.shape[1]] = torch.where(batch.tables < len(batch.k_cache), batch.tables, 0)
    static.k_cache[: len(batch.k_cache)], static.v_cache[: len(batch.v_cache)] = batch.k_cache, batch.v_cache


def pointwise(device: Device) -> Iterator[Row]:
    rows, hidden = (4, 96) if device.interpreted else (300, 4096)
    for dtype in (BF16, FP32):
        x, residual, weight = (device.randn(*shape, dtype=dtype) for shape in [(rows, hidden)] * 2 + [(hidden,)])
        most = tolerance(device, dtype)
        normed, total = device.ops.rms_norm(x, weight, 1e-6, residual)
        expected, expected_total = device.reference.rms_norm(x.double(), weight, 1e-6, residual)
        yield Row(SECTION, f"rms_norm with residual, {dtype}", error(normed, expected), "error", most=most)
        yield Row(SECTION, f"rms_norm's residual, {dtype}", error(total, expected_total), "error", most=most)
        activated, expected = device.ops.silu_mul(x), device.reference.silu_mul(x.double())
        yield Row(SECTION, f"silu_mul, {dtype}", error(activated, expected), "error", most=most)
        heads, weight = x.view(rows, -1, 32)[:, 1:3], weight[:32].contiguous()
        normed = device.ops.rms_norm(heads, weight, 1e-6)
        expected = device.reference.rms_norm(heads.double(), weight, 1e-6)
        yield Row(SECTION, f"rms_norm of heads, {dtype}", error(normed, expected), "error", most=most)


def cache_writes(device: Device) -> Iterator[Row]:
    tokens = 6 if device.interpreted else 500
    packed, angles = device.randn(tokens, 12, 64), device.randn(tokens, 24, dtype=FP32) * 3
    q, k, v = packed[:, :8], packed[:, 8:10], packed[:, 10:]
    slots = torch.randperm(40 * 16, device=device.name)[:tokens]
    slots[1] = -1
    for name, dtype, scales, most in (
        ("bf16", BF16, {}, tolerance(device, BF16)),
        ("float8", FP8, {"k_scale": 0.02, "v_scale": 0.5}, 0.08 if device.interpreted else 0.03),
    ):
        caches = [torch.zeros(40, 16, 2, 64, device=device.name).to(dtype) for _ in range(2)]
        wide = [torch.zeros(40, 16, 2, 64, device=device.name, dtype=torch.float64) for _ in range(2)]
        rotated = device.ops.rope_kv_write(q, k, v, angles.cos(), angles.sin(), *caches, slots, **scales)
        inputs = q.double(), k.double(), v.double(), angles.cos(), angles.sin()
        expected = device.reference.rope_kv_write(*inputs, *wide, slots)
        exact = tolerance(device, BF16)
        yield Row(SECTION, f"rope_kv_write, {name}: queries", error(rotated, expected), "error", most=exact)
        for cache, target, key in zip(caches, wide, ("k_scale", "v_scale"), strict=True):
            found = error(cache.double() * scales.get(key, 1.0), target)
            yield Row(SECTION, f"rope_kv_write, {name}: {key[0]}", found, "error", most=most)


def float8_extremes(device: Device) -> Iterator[Row]:
    """±448 at most; what is no number stays none (the interpreter's own cast loses it)."""
    values = torch.tensor([1e6, -torch.inf, 448.0, torch.nan], device=device.name)[: 3 if device.interpreted else 4]
    v = values[:, None, None].expand(-1, 1, 16).to(BF16).contiguous()
    zeros, ones = torch.zeros_like(v), torch.ones(len(values), 8, device=device.name)
    k_cache, v_cache = (torch.zeros(1, 4, 1, 16, device=device.name).to(FP8) for _ in range(2))
    slots = torch.arange(len(values), device=device.name)
    device.ops.rope_kv_write(zeros, zeros, v, ones, ones, k_cache, v_cache, slots)
    written, expected = v_cache.float()[0, : len(values), 0, 0], values.clamp(-448, 448)
    wrong = count(~torch.isclose(written, expected, equal_nan=True))
    yield Row(SECTION, "rope_kv_write, float8: extremes", wrong, "wrong", most=0)


def sampling(device: Device) -> Iterator[Row]:
    rows, vocab = (6, 300) if device.interpreted else (256, 20_000)
    logits = device.randn(rows, vocab, dtype=FP32) * 3
    logits[0, 5:9] = 40.0
    logits[1, 3] = torch.nan

    def cycle(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device.name).repeat(rows // len(values) + 1)[:rows]

    temperatures, top_ks = cycle([0.0, 1.0, 0.7, 1.5, 1.0], FP32), cycle([0, 0, 50, 1, 7, 0, -1], torch.int64)
    top_ps = cycle([1.0, 0.9, 1.0, 0.3], FP32)
    seeds, positions = torch.arange(rows, device=device.name) * 7**20, torch.arange(rows, device=device.name)
    arguments = logits, temperatures, top_ks, top_ps, seeds, positions
    differing = count(device.ops.sample(*arguments) != device.reference.sample(*arguments))
    yield Row(SECTION, f"sample, {rows} rows of mixed parameters", differing, "differ", most=0)


def products(device: Device) -> Iterator[Row]:
    """Matrices of integers, in every class of rows; wide enough for none and narrow enough for several splits."""
    shapes = ((40, 200),) if device.interpreted else ((6144, 4096), (1000, 4160))
    for columns, depth in shapes:
        for kind in KINDS:
            weight = quantise(device.randn(columns, depth, dtype=FP32), kind)
            matrix = weight.dequantised().double()
            for dtype in (BF16, FP16, FP32):
                apply, bias = linear(weight, None), device.randn(columns, dtype=dtype)
                for rows in (1, 20) if device.interpreted else (1, 16, 33, 64, 300):
                    x = device.randn(rows, depth, dtype=dtype)
                    found = error(apply(x), x.double() @ matrix.T)
                    what = f"{kind} product, {columns} × {depth}, {rows} rows, {dtype}"
                    yield Row(SECTION, what, found, "error", most=tolerance(device, dtype))
                x = device.randn(1, depth, dtype=dtype)
                found = error(linear(weight, bias)(x), x.double() @ matrix.T + bias.double())
                what = f"{kind} product with bias, {columns} × {depth}, {dtype}"
                yield Row(SECTION, what, found, "error", most=tolerance(device, dtype))


CHECKS = (
    attention, batch_invariance, large_pools, graph_replay, pointwise, cache_writes, float8_extremes, sampling,
    products,
)  # fmt: skip


def correctness(device: Device) -> Iterator[Row]:
    for check in CHECKS:
        yield from check(device)
