"""How near the kernels come to the ceilings of this device: copy bandwidth and the rate of a large matrix product.

Both ceilings are measured here, on random data. Decode is held against the bytes of keys and values it must read,
prefill against the arithmetic of the keys that are visible, pointwise kernels against the bytes they read and write,
products of few rows against the bytes of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import linear, scaled_dot_product_attention

from schedlab.experiments.device.rows import COPY, PRODUCT, Device, Row
from schedlab.kernels.attention import PagedKeys
from schedlab.kernels.configs import DecodeTile, LinearTile, PrefillTile
from schedlab.kernels.quantised import KINDS, quantise
from schedlab.kernels.quantised_linear import Panels, product

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def ceilings(device: Device) -> Iterator[Row]:
    """Sets the device's ceilings. Bytes copied are counted read and written."""
    device.copy_tb_s = _copy_tb_s(device)
    yield Row("ceilings", COPY, device.copy_tb_s, "TB/s")
    size = 64 if device.interpreted else 8192
    a, b = device.randn(size, size), device.randn(size, size)
    device.matmul_tflops = 2 * size**3 / device.seconds(lambda: a @ b) / 1e12
    yield Row("ceilings", PRODUCT, device.matmul_tflops, "TFLOP/s", note=f"{size} rows and columns")


def _copy_tb_s(device: Device) -> float:
    source = device.randn(1 << (10 if device.interpreted else 30))
    target = torch.empty_like(source)
    return 2 * source.nbytes / device.seconds(lambda: target.copy_(source)) / 1e12


@dataclass(frozen=True)
class Load:
    """Sequences with `contexts` keys, of which the last `queries` are computed (None: decode)."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...] | None = None
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    cache_dtype: torch.dtype = BF16
    window: int | None = None
    capacity: int = 0

    @property
    def kv_bytes(self) -> int:
        seen = sum(context if self.window is None else min(context, self.window) for context in self.contexts)
        return 2 * seen * self.kv_heads * self.head_dim * self.cache_dtype.itemsize

    @property
    def flops(self) -> float:
        """4 · D for each visible (query, key) of each head: two products of a multiplication and an addition."""
        pairs = 0
        for context, count in zip(self.contexts, self.queries or (1,) * len(self.contexts), strict=True):
            reach = self.window or context
            pairs += sum(min(position + 1, reach) for position in range(context - count, context))
        return 4.0 * self.head_dim * self.heads * pairs

    def shrunk(self) -> Load:
        """A shape that the interpreter ends in time."""
        contexts = tuple(min(context, 70) for context in self.contexts[:2])
        queries = (
            None if self.queries is None else tuple(min(q, c) for q, c in zip(self.queries, contexts, strict=False))
        )
        window = None if self.window is None else 30
        return replace(self, contexts=contexts, queries=queries, heads=4, kv_heads=1, window=window, capacity=0)


class Run:
    """The tensors of a load, its blocks scattered over the pool, and one call of attention on them."""

    def __init__(self, device: Device, load: Load) -> None:
        load = load.shrunk() if device.interpreted else load
        self.device, self.load = device, load
        blocks = [-(-context // load.block_size) for context in load.contexts]
        width = max(max(blocks), -(-load.capacity // load.block_size))
        order = torch.randperm(sum(blocks), device=device.name).to(torch.int32)
        self.tables = torch.zeros(len(blocks), width, dtype=torch.int32, device=device.name)
        for n, (row, count) in enumerate(zip(self.tables, blocks, strict=True)):
            row[:count] = order[sum(blocks[:n]) : sum(blocks[: n + 1])]
        shape = sum(blocks), load.block_size, load.kv_heads, load.head_dim
        self.k, self.v = (device.randn(*shape).to(load.cache_dtype) for _ in range(2))
        counts = load.queries or (1,) * len(blocks)
        self.q = device.randn(sum(counts), load.heads, load.head_dim)
        self.contexts = torch.tensor(load.contexts, dtype=torch.int32, device=device.name)
        self.starts = torch.tensor([0, *counts], device=device.name).cumsum(0).to(torch.int32)

    def seconds(self, tile: PrefillTile | DecodeTile | None = None) -> float:
        paged, ops = self.paged(self.load.head_dim**-0.5, self.load.window), self.device.ops
        if self.load.queries is None:
            return self.device.seconds(lambda: ops.decode_attention(self.q, paged, tile=tile))
        return self.device.seconds(lambda: ops.prefill_attention(self.q, self.starts, paged, tile=tile))

    def paged(self, scale: float, window: int | None = None) -> PagedKeys:
        return PagedKeys(self.k, self.v, self.tables, self.contexts, scale, window)

    def sdpa_seconds(self, backend: SDPBackend) -> float:
        """`scaled_dot_product_attention` on equally long sequences, their keys gathered and contiguous beforehand.

        NaN where `backend` cannot run it: the baseline is not what is checked.
        """
        try:
            with sdpa_kernel(backend):
                return self._sdpa_seconds()
        except RuntimeError:
            return float("nan")

    def _sdpa_seconds(self) -> float:
        load = self.load
        context, count = load.contexts[0], len(self.q) // len(load.contexts)
        k, v = (self._contiguous(cache) for cache in (self.k, self.v))
        q = self.q.view(len(load.contexts), count, load.heads, load.head_dim).transpose(1, 2)
        options: dict[str, Any] = {"enable_gqa": True}
        if count == context:
            options["is_causal"] = True
        elif count > 1:
            options["attn_mask"] = causal_lower_right(count, context)
            group = load.heads // load.kv_heads
            k, v, options["enable_gqa"] = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False
        return self.device.seconds(lambda: scaled_dot_product_attention(q, k, v, **options))

    def _contiguous(self, cache: Tensor) -> Tensor:
        used = self.tables[:, : -(-self.load.contexts[0] // self.load.block_size)].long()
        return cache[used].flatten(1, 2)[:, : self.load.contexts[0]].transpose(1, 2).contiguous()


RAGGED = tuple(128 * 2 ** (n % 8) for n in range(64))
DECODES = {
    "64 × 8,192": (Load((8192,) * 64), 0.80),
    "64 × 8,192, blocks of 64": (Load((8192,) * 64, block_size=64), None),
    "64 × 8,192, tables for 131,072": (Load((8192,) * 64, capacity=131_072), None),
    "64 × 8,192, float8 cache": (Load((8192,) * 64, cache_dtype=FP8), None),
    "64 × 128 to 16,384": (Load(RAGGED), None),
    "64 × 8,192, window 1,024": (Load((8192,) * 64, window=1024), None),
    "8 × 4,096": (Load((4096,) * 8), None),
    "1 × 32,768": (Load((32_768,)), 0.50),
    "1 × 1,024": (Load((1024,)), None),
    "8 × 1,024": (Load((1024,) * 8), None),
    "256 × 1,024": (Load((1024,) * 256), None),
    "255 × 1,024 and one of 131,072": (Load((131_072, *(1024,) * 255)), None),
}
PREFILLS = {
    "1 × 16,384": (Load((16_384,), (16_384,)), 350.0),
    "2,048 on 14,336": (Load((16_384,), (2048,)), 300.0),
    "64 on 30,000": (Load((30_064,), (64,)), None),
    "1 × 2,048": (Load((2048,), (2048,)), None),
    "8 × 2,048": (Load((2048,) * 8, (2048,) * 8), None),
    "1 × 16,384, heads of 64": (Load((16_384,), (16_384,), head_dim=64), None),
    "1 × 16,384, window 4,096": (Load((16_384,), (16_384,), window=4096), None),
}
BASELINES = {
    *(DECODES[name][0] for name in ("64 × 8,192", "1 × 32,768")),
    *(PREFILLS[name][0] for name in ("1 × 16,384", "2,048 on 14,336", "64 on 30,000")),
}
"""The loads that torch's attention runs too."""
SDPA = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}


def decode(device: Device) -> Iterator[Row]:
    for name, (load, least) in DECODES.items():
        run = Run(device, load)
        yield _share(device, "decode", name, run.load.kv_bytes, run.seconds(), least)
        if load in BASELINES:
            for backend, chosen in SDPA.items():
                seconds = run.sdpa_seconds(chosen)
                yield _share(device, "decode", f"{name}, sdpa by {backend}", run.load.kv_bytes, seconds, None)


def prefill(device: Device) -> Iterator[Row]:
    for name, (load, least) in PREFILLS.items():
        run = Run(device, load)
        yield _rate(device, "prefill", name, run.load.flops, run.seconds(), least)
        if load in BASELINES:
            for backend, chosen in SDPA.items():
                seconds = run.sdpa_seconds(chosen)
                yield _rate(device, "prefill", f"{name}, sdpa by {backend}", run.load.flops, seconds, None)


DECODE_TILES = [
    DecodeTile(64, 512, 4, 5), DecodeTile(64, 256, 4, 5), DecodeTile(64, 1024, 4, 5), DecodeTile(64, 512, 4, 3),
    DecodeTile(32, 512, 4, 5), DecodeTile(64, 512, 8, 5), DecodeTile(128, 512, 8, 3),
]  # fmt: skip
PREFILL_TILES = [
    PrefillTile(128, 64, 8, 5), PrefillTile(128, 64, 8, 3), PrefillTile(128, 128, 8, 3), PrefillTile(64, 64, 4, 5),
    PrefillTile(64, 128, 4, 3), PrefillTile(128, 64, 8, 7),
]  # fmt: skip


def tiles(device: Device) -> Iterator[Row]:
    """Other tiles than those of configs.py, on the main shapes: what the table should hold on this device."""
    count = 1 if device.interpreted else None
    for name in ("64 × 8,192", "1 × 32,768"):
        run = Run(device, DECODES[name][0])
        for tile in DECODE_TILES[:count]:
            yield _share(
                device, "tiles", f"decode {name}, {_numbers(tile)}", run.load.kv_bytes, run.seconds(tile), None
            )
    for name in ("1 × 16,384", "2,048 on 14,336"):
        run = Run(device, PREFILLS[name][0])
        for prefill_tile in PREFILL_TILES[:count]:
            what = f"prefill {name}, {_numbers(prefill_tile)}"
            yield _rate(device, "tiles", what, run.load.flops, run.seconds(prefill_tile), None)
    for kind in KINDS:
        matrices = Matrices(device, kind, 4096, 4096)
        for linear_tile in LINEAR_TILES[:count]:
            what = f"{kind} product 4096 × 4096, {_numbers(linear_tile)}"
            seconds = matrices.seconds(linear_tile.block_t, linear_tile)
            yield _share(device, "tiles", what, matrices.nbytes, seconds, None)


def _numbers(tile: PrefillTile | DecodeTile | LinearTile) -> str:
    return "/".join(str(getattr(tile, name)) for name in tile.__slots__)


class Matrices:
    """Enough equal matrices that none is still in a device's cache when its turn comes; `kind` None: bfloat16."""

    def __init__(self, device: Device, kind: str | None, columns: int, depth: int) -> None:
        columns, depth = (64, 128) if device.interpreted else (columns, depth)
        self.device, self.columns, self.depth = device, columns, depth
        weight = device.randn(columns, depth)
        if kind is None:
            self.nbytes = weight.nbytes
            self._all: list[Tensor | Panels] = [weight.clone() for _ in range(self._count())]
            return
        panels = Panels.of(quantise(weight, kind))
        self.nbytes = panels.nbytes
        self._all = [replace(panels, numbers_PSRW=panels.numbers_PSRW.clone()) for _ in range(self._count())]

    def _count(self) -> int:
        return 1 if self.device.interpreted else -(-(1 << 28) // self.nbytes)

    def seconds(self, rows: int, tile: LinearTile | None = None) -> float:
        x_TK = self.device.randn(rows, self.depth)

        def run() -> None:
            for weight in self._all:
                product(x_TK, weight, tile=tile) if isinstance(weight, Panels) else linear(x_TK, weight)

        return self.device.seconds(run) / len(self._all)


MATRICES = {"qkv": (6144, 4096), "gate and up": (28_672, 4096), "down": (4096, 14_336)}
LINEAR_TILES = [
    LinearTile(64, 16, 4, 5, 256), LinearTile(64, 16, 4, 5, 0), LinearTile(64, 16, 4, 5, 512),
    LinearTile(64, 16, 4, 7, 256), LinearTile(128, 16, 4, 5, 256), LinearTile(128, 64, 8, 4, 256),
    LinearTile(64, 64, 4, 4, 256), LinearTile(128, 64, 8, 4, 512),
]  # fmt: skip


def products(device: Device) -> Iterator[Row]:
    """Of quantised matrices, and of the same in bfloat16 by the library; nothing is demanded, as none was measured."""
    for name, (columns, depth) in list(MATRICES.items())[: 1 if device.interpreted else None]:
        for kind in (None, *KINDS):
            matrices = Matrices(device, kind, columns, depth)
            for rows in (1, 16, 64):
                what = f"{name}, {kind or 'bf16'}, {rows} rows"
                yield _share(device, "products", what, matrices.nbytes, matrices.seconds(rows), None)
            rows = 17 if device.interpreted else 2048
            flops = 2.0 * rows * matrices.columns * matrices.depth
            what = f"{name}, {kind or 'bf16'}, {rows:,} rows"
            yield _rate(device, "products", what, flops, matrices.seconds(rows), None)


def pointwise(device: Device) -> Iterator[Row]:
    rows, hidden, inner = (4, 64, 96) if device.interpreted else (16_384, 4096, 14_336)
    x, residual, weight = device.randn(rows, hidden), device.randn(rows, hidden), device.randn(hidden)
    seconds = device.seconds(lambda: device.ops.rms_norm(x, weight, 1e-6, residual))
    yield _share(device, "pointwise", "rms_norm with residual", 4 * x.nbytes, seconds, 0.85)
    gate_up = device.randn(rows, 2 * inner)
    out = torch.empty(rows, inner, dtype=BF16, device=device.name)
    seconds = device.seconds(lambda: device.ops.silu_mul(gate_up, out=out))
    yield _share(device, "pointwise", "silu_mul", gate_up.nbytes + out.nbytes, seconds, 0.85)
    packed, angles = device.randn(rows, 48, 128), device.randn(rows, 64, dtype=torch.float32)
    q, k, v = packed[:, :32], packed[:, 32:40], packed[:, 40:]
    caches = [torch.empty(rows // 4, 16, 8, 128, dtype=BF16, device=device.name) for _ in range(2)]
    slots = torch.randperm(rows, device=device.name)
    seconds = device.seconds(lambda: device.ops.rope_kv_write(q, k, v, angles, angles, *caches, slots))
    yield _share(device, "pointwise", "rope_kv_write", 2 * packed.nbytes + 2 * angles.nbytes, seconds, 0.85)


def sampling(device: Device) -> Iterator[Row]:
    rows, vocab = (2, 100) if device.interpreted else (64, 128_256)
    logits = device.randn(rows, vocab, dtype=torch.float32)
    longs = torch.arange(rows, device=device.name)
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0), ("plain", 1.0, 0, 1.0), ("top-k 50", 1.0, 50, 1.0), ("top-p 0.9", 1.0, 0, 0.9),
    ):  # fmt: skip
        floats = [torch.full((rows,), value, device=device.name) for value in (temperature, top_p)]
        arguments = logits, floats[0], torch.full_like(longs, top_k), floats[1], longs, longs
        seconds = device.seconds(partial(device.ops.sample, *arguments))
        yield Row("sampling", f"{name}, {rows} rows of {vocab:,}", 1e6 * seconds, "µs")


def graphs(device: Device) -> Iterator[Row]:
    """The kernels of 16 decoder layers, launched one by one and replayed from a graph: wall time of the two."""
    if device.interpreted:
        return
    for batch in (1, 8):
        layers = _layers(device, batch)
        replay = device.captured(layers)
        eager, replayed = device.wall_seconds(layers), device.wall_seconds(replay)
        note = f"{1e3 * eager:.2f} ms launched, {1e3 * replayed:.2f} ms replayed"
        yield Row("graphs", f"16 layers' kernels, batch {batch}", eager / replayed, "times", 1.3, note=note)


def _layers(device: Device, batch: int) -> Callable[[], None]:
    run = Run(device, Load((1024,) * batch))
    x, residual, weight = device.randn(batch, 4096), device.randn(batch, 4096), device.randn(4096)
    packed, angles, gate_up = device.randn(batch, 48, 128), device.randn(batch, 64), device.randn(batch, 2 * 14_336)
    q, k, v = packed[:, :32], packed[:, 32:40], packed[:, 40:]
    slots, ops, paged = torch.arange(batch, device=device.name), device.ops, run.paged(scale=0.1)

    def layers() -> None:
        for _ in range(16):
            ops.rms_norm(x, weight, 1e-6, residual)
            rotated = ops.rope_kv_write(q, k, v, angles, angles, run.k, run.v, slots)
            ops.decode_attention(rotated, paged)
            ops.rms_norm(x, weight, 1e-6, residual)
            ops.silu_mul(gate_up)

    return layers


def _share(device: Device, section: str, what: str, nbytes: int, seconds: float, least: float | None) -> Row:
    bandwidth = nbytes / seconds / 1e12
    note = f"{1e6 * seconds:,.1f} µs, {bandwidth:.2f} TB/s"
    return Row(section, what, bandwidth / device.copy_tb_s, "of copy", None if device.interpreted else least, note=note)


def _rate(device: Device, section: str, what: str, flops: float, seconds: float, least: float | None) -> Row:
    rate = flops / seconds / 1e12
    note = f"{1e6 * seconds:,.1f} µs, {rate / device.matmul_tflops:.0%} of the product"
    return Row(section, what, rate, "TFLOP/s", None if device.interpreted else least, note=note)
