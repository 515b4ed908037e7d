"""Kernel tables of the PyPI package aiconfigurator-core (Apache-2.0).

Parquet files systems/data/DEVICE/{gemm,attention,moe,comm}/BACKEND/VERSION/*.parquet. Times are in ms; the
`message_size` of an all-reduce counts elements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from schedlab.experiments.studies.kernel_tables.curves import Curve, Surface, neighbours
from schedlab.experiments.studies.kernel_tables.kernels import Kernels
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError

PACKAGE = "aiconfigurator-core"
HOW = f"pip install --no-deps --target DIR {PACKAGE}, then path=DIR"
BACKENDS = ("vllm", "trtllm", "sglang")
GEMM_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4", "int8": "int8_wo", "int4": "int4_wo"}
KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
EXPERT_DTYPES = {
    "bf16": ("bfloat16",), "fp8": ("fp8", "fp8_block"), "fp4": ("nvfp4",), "mxfp4": ("w4a16_mxfp4",),
    "int4": ("int4_wo",),
}  # fmt: skip
"""The tables' names; a server takes the faster of two."""
ROUTING = "power_law_1.2"
"""How unevenly tokens chose experts in the rows that are taken; others are `balanced` and `power_law_1.01`."""
SUFFIXES = ("", "_sxm")
ELEMENTWISE_US = 6.0
"""Five small kernels a layer, each a little over 1 µs within a CUDA graph: assumed, for the tables have none."""
ELEMENTWISE_EFFICIENCY = 0.8
"""Share of the memory's bandwidth that they reach: the package's own correction of a device's datasheet."""


class AIConfigurator(Kernels):
    """The tables of one device under one backend, for one model in one split."""

    def __init__(self, root: Path, roofline: Roofline, hardware: Hardware, backend: str, version: str | None) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"import.backend: expected one of {', '.join(BACKENDS)}, found {backend}")
        self.roofline, self.hardware = roofline, hardware
        device = device_folder(root, hardware.name)
        self.gemm_file = newest(device / "gemm" / backend, "gemm_perf.parquet", version)
        attention = device / "attention" / backend
        self.prefill = self._attention(newest(attention, "context_attention_perf.parquet", version), "isl", 2.0)
        self.decode = self._attention(newest(attention, "generation_attention_perf.parquet", version), "step", 1.0)
        self.experts = None
        if roofline.sparse_layers:
            self.experts = self._experts(newest(device / "moe" / backend, "moe_perf.parquet", version))
        self.products = {"head": self._gemm("bf16")}
        self.products["layer"] = self._gemm(roofline.weight_dtype)
        collectives = device / "comm" / backend
        alone = roofline.tensor_parallel == 1
        self.all_reduce = None if alone else self._all_reduce(newest(collectives, "custom_allreduce_perf.parquet"))
        self.facts = {
            "source": PACKAGE, "package": package_version(root), "licence": "Apache-2.0", "backend": backend,
            "version": self.gemm_file.parent.name, "device": device.name,
        } | ({} if self.experts is None else {"routing": ROUTING})  # fmt: skip

    # ---- what a layer asks ----

    def answers(self, tokens: int, batch: int, context: int) -> bool:
        reduced = (tokens + batch) * self.roofline.model.hidden_size
        if self.all_reduce is not None and reduced > self.all_reduce.most:
            return False
        if self.experts is not None and tokens + batch > self.experts.most:
            return False
        prompt = not tokens or all(surface.answers(1, tokens) for surface, _ in self.prefill)
        return prompt and (not batch or all(surface.answers(batch, context) for surface, _ in self.decode))

    def projections_us(self, tokens: int) -> float:
        q, kv, mlp, hidden = (
            self.roofline.q_size, self.roofline.kv_size, self.roofline.mlp_size, self.roofline.model.hidden_size
        )  # fmt: skip
        shapes = [(q + 2 * kv, hidden), (hidden, q)] + ([(2 * mlp, hidden), (hidden, mlp)] if mlp else [])
        products = sum(self.products["layer"](tokens, n, k) for n, k in shapes)
        if self.experts is None:
            return products
        router = self.products["head"](tokens, self.roofline.model.num_experts, hidden)
        return products + router + self.experts(tokens)

    def elementwise_us(self, tokens: int) -> float:
        r = self.roofline
        moved = r.activations(Work(tokens=tokens)).bytes + r.kv_write(Work(tokens=tokens)).bytes
        rate = self.hardware.peak_bandwidth("memory") * ELEMENTWISE_EFFICIENCY
        return ELEMENTWISE_US + moved / r.model.num_hidden_layers / rate * 1e6

    def prefill_attention_us(self, tokens: int) -> float:
        return sum(share * surface(1, tokens) for surface, share in self.prefill)

    def decode_attention_us(self, batch: int, context: int) -> float:
        return sum(share * surface(batch, context) for surface, share in self.decode)

    def all_reduce_us(self, tokens: int) -> float:
        return 0.0 if self.all_reduce is None else self.all_reduce(tokens * self.roofline.model.hidden_size)

    def head_us(self, rows: int) -> float:
        """A vocabulary wider than the table's widest product is taken as several that follow one another."""
        head, vocab = self.products["head"], self.roofline.vocab_size
        pieces = -(-vocab // head.n[-1])
        return pieces * head(rows, -(-vocab // pieces), self.roofline.model.hidden_size)

    # ---- tables ----

    def _gemm(self, weight_dtype: str) -> Products:
        name = GEMM_DTYPES.get(weight_dtype)
        columns, dtypes = self._gemm_columns
        chosen = dtypes == name
        if not chosen.any():
            known = ", ".join(ours for ours, theirs in GEMM_DTYPES.items() if (dtypes == theirs).any())
            raise ConfigError(f"engine.weight_dtype: {self.gemm_file} has {known}, found {weight_dtype}")
        m, n, k, ms = (column[chosen] for column in columns)
        arithmetic = (weight_dtype,) if weight_dtype in ("fp8", "fp4") else ()
        possible = 2 * m * n * k <= self.hardware.peak_flops((*arithmetic, "bf16")) * ms * 1e-3
        self.dropped += int((~possible).sum())
        return Products.of(m[possible], n[possible], k[possible], ms[possible] * 1e3)

    @cached_property
    def _gemm_columns(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        table = read(self.gemm_file, ("m", "n", "k", "latency", "gemm_dtype"))
        numbers = tuple(np.asarray(table[name], dtype=float) for name in ("m", "n", "k", "latency"))
        return numbers, np.asarray(table["gemm_dtype"])

    def _experts(self, path: Path) -> Curve:
        """All experts of one layer, by tokens, of exactly this model's sizes and split."""
        r, model = self.roofline, self.roofline.model
        sizes = {
            "hidden_size": model.hidden_size, "inter_size": model.moe_intermediate_size,
            "topk": model.num_experts_per_tok, "num_experts": model.num_experts,
            "moe_tp_size": r.tensor_parallel if r.expert_parallel == 1 else 1, "moe_ep_size": r.expert_parallel,
        }  # fmt: skip
        table = read(path, (*sizes, "moe_dtype", "distribution", "num_tokens", "latency"))
        alike = np.logical_and.reduce([table[name] == size for name, size in sizes.items()])
        alike &= table["distribution"] == ROUTING
        chosen = alike & np.isin(table["moe_dtype"], EXPERT_DTYPES.get(r.expert_dtype, ()))
        if chosen.any():
            return Curve.of(table["num_tokens"][chosen], table["latency"][chosen] * 1e3)
        found = ", ".join(sorted(set(table["moe_dtype"][alike].tolist()))) or "no dtype"
        raise ConfigError(
            f"kernel tables: {path}: expected {model.num_experts_per_tok} of {model.num_experts} experts of "
            f"{model.hidden_size} by {model.moe_intermediate_size} on {max(r.tensor_parallel, r.expert_parallel)} "
            f"devices, {'sliced' if r.expert_parallel == 1 else 'whole'}, in {r.expert_dtype}, found {found} of them"
        )

    def _attention(self, path: Path, size: str, power: float) -> list[tuple[Surface, float]]:
        """Curves over lengths by batch, at exactly this model's heads of one device: for each window, and the share of
        layers that have it."""
        r, model = self.roofline, self.roofline.model
        names = ("batch_size", size, "num_heads", "num_key_value_heads", "head_dim", "kv_cache_dtype", "latency")
        table = read(path, names, optional=("window_size",))
        heads = model.num_attention_heads // r.tensor_parallel
        kv_heads = max(model.num_key_value_heads // r.tensor_parallel, 1)
        stored = np.where(table["num_key_value_heads"] == 0, table["num_heads"], table["num_key_value_heads"])
        alike = (
            (table["num_heads"] == heads) & (stored == kv_heads) & (table["head_dim"] == model.head_dim)
            & (table["kv_cache_dtype"] == KV_DTYPES.get(r.kv_cache_dtype))
        )  # fmt: skip
        lengths = table[size] + (1 if size == "step" else 0)  # of a decode the tokens before its own are given
        surfaces = []
        for window, layers in Counter(model.windows).items():
            chosen = alike & (table.get("window_size", 0) == (window or 0))
            if not chosen.any():
                raise ConfigError(
                    f"kernel tables: {path} has no row of {heads} query and {kv_heads} key-value heads "
                    f"of {model.head_dim}, keys and values in {r.kv_cache_dtype}, "
                    + ("without a window" if window is None else f"with a window of {window}")
                )
            by_batch = _by_batch(table["batch_size"], lengths, table["latency"], chosen, power)
            share = layers / model.num_hidden_layers
            surfaces.append((Surface(by_batch, f"sequences of a batch in {path.name}"), share))
        return surfaces

    def _all_reduce(self, path: Path) -> Curve:
        table = read(path, ("num_gpus", "message_size", "latency", "kernel_source"))
        devices, degree = np.asarray(table["num_gpus"]), self.roofline.tensor_parallel
        graphs = np.array(["graph" in str(source) for source in table["kernel_source"]])
        chosen = devices == degree
        if graphs.any():  # what a server replays; eager launches are dearer
            chosen &= graphs
        if not chosen.any():
            known = ", ".join(str(n) for n in sorted(set(devices.tolist())))
            raise ConfigError(f"engine.tensor_parallel: {path} has {known} devices, found {degree}")
        return Curve.of(np.asarray(table["message_size"])[chosen], np.asarray(table["latency"])[chosen] * 1e3)


def _by_batch(
    batches: np.ndarray, lengths: np.ndarray, ms: np.ndarray, chosen: np.ndarray, power: float
) -> dict[int, Curve]:
    """A curve over lengths for each batch among the `chosen` rows."""
    return {
        int(b): Curve.of(lengths[rows], ms[rows] * 1e3, power)
        for b in np.unique(batches[chosen])
        for rows in [chosen & (batches == b)]
    }


class Products:
    """Times of products of [tokens, k] by [k, n]: a curve over tokens a measured shape, bilinear between shapes."""

    def __init__(self, curves: Mapping[tuple[int, int], Curve]) -> None:
        self.curves = curves
        self.n, self.k = (sorted({shape[axis] for shape in curves}) for axis in (0, 1))
        self._known: dict[tuple[int, int], list[tuple[Curve, float]]] = {}

    @classmethod
    def of(cls, m: np.ndarray, n: np.ndarray, k: np.ndarray, us: np.ndarray) -> Products:
        order = np.lexsort((m, k, n))
        m, n, k, us = m[order], n[order], k[order], us[order]
        starts = np.flatnonzero(np.r_[True, (np.diff(n) != 0) | (np.diff(k) != 0)])
        stops = np.r_[starts[1:], len(m)]
        return cls({
            (int(n[a]), int(k[a])): Curve.of(m[a:b], us[a:b]) for a, b in zip(starts, stops, strict=True)
        })  # fmt: skip

    def __call__(self, tokens: int, n: int, k: int) -> float:
        """µs."""
        if (n, k) not in self._known:
            self._known[n, k] = self._around(n, k)
        return math.exp(sum(weight * curve.log_at(tokens) for curve, weight in self._known[n, k]))

    def _around(self, n: int, k: int) -> list[tuple[Curve, float]]:
        corners = [
            ((a, b), wa * wb)
            for a, wa in neighbours(self.n, n, "columns of a product")
            for b, wb in neighbours(self.k, k, "rows of a weight")
        ]  # fmt: skip
        if missing := [shape for shape, _ in corners if shape not in self.curves]:
            raise ConfigError(f"kernel tables: no product of {missing[0][1]} by {missing[0][0]} was measured")
        return [(self.curves[shape], weight) for shape, weight in corners]


# ---- where files are ----


def find_root(path: str | None) -> Path:
    """The folder `systems`: of the installed package, or below `path`."""
    if path is None:
        spec = find_spec("aiconfigurator_core")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"profile import aiconfigurator: {PACKAGE} is not installed: {HOW}")
        return Path(spec.submodule_search_locations[0]) / "systems"
    base = Path(path)
    for root in (base, base / "systems", base / "aiconfigurator_core" / "systems"):
        if (root / "data").is_dir():
            return root
    raise ConfigError(f"import.path: expected the folder of {PACKAGE}, found no systems/data in {path}: {HOW}")


def package_version(root: Path) -> str:
    """The version in the name of the package's dist-info folder; "unknown" where the tables lie alone."""
    found = sorted(root.parent.parent.glob("aiconfigurator_core-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"


def device_folder(root: Path, hardware: str) -> Path:
    for suffix in SUFFIXES:
        if (folder := root / "data" / f"{hardware}{suffix}").is_dir():
            return folder
    known = ", ".join(sorted(entry.name for entry in (root / "data").iterdir()))
    raise ConfigError(f"hardware={hardware}: expected a device of {root / 'data'}: {known}")


def newest(folder: Path, name: str, version: str | None = None) -> Path:
    """The file `name` of `version`, or of the newest that has it; ConfigError if there is none."""
    known = sorted((path.parent.name for path in folder.glob(f"*/{name}")), key=Version)
    if not known:
        raise ConfigError(f"kernel tables: {folder} has no {name}: {folder.parent.name} is of {listing(folder.parent)}")
    if version is not None and version not in known:
        raise ConfigError(f"import.version: {folder} has {', '.join(known)}, found {version}")
    return folder / (version or known[-1]) / name


def listing(folder: Path) -> str:
    return ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else "nothing"


def read(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Columns of a parquet file as arrays; those that are `optional` where they are there."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError("profile import aiconfigurator reads parquet: pip install 'schedlab[parquet]'") from None
    try:
        known = parquet.read_schema(path).names
        if missing := [name for name in columns if name not in known]:
            raise ConfigError(f"kernel tables: {path}: expected the column {missing[0]}, found {', '.join(known)}")
        names = [*columns, *(name for name in optional if name in known)]
        table = parquet.read_table(path, columns=names)
    except FileNotFoundError:
        raise ConfigError(f"kernel tables: {path}: no such file") from None
    except (OSError, ArrowInvalid) as error:
        found = str(error).splitlines()[0]
        raise ConfigError(f"kernel tables: {path}: expected a parquet file, found: {found}") from None
    return {name: table[name].to_numpy() for name in names}
