"""Small kernel tables with known answers, as the public sources lay them out."""

from __future__ import annotations

import csv
import gzip
from dataclasses import replace
from itertools import product
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from schedlab.experiments import engines

SIZES = (64, 128, 256, 512)
TOKENS = (1, 2, 8, 64, 512, 4096, 16384)
LENGTHS = (16, 128, 1024, 8192, 16384)
MODEL = replace(
    engines.model_preset("tiny")[0], hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=64, intermediate_size=256, vocab_size=512, tie_word_embeddings=False,
)  # fmt: skip


def product_us(m: float, n: float, k: float) -> float:
    """A power of each size: a straight line between logarithms, so that interpolation is exact."""
    return 2.0 * m**0.5 * (n * k) ** 0.25


def prefill_us(tokens: float) -> float:
    return 3.0 * tokens**0.5


def decode_us(batch: float, context: float) -> float:
    return 1.5 * batch**0.5 * context**0.25


def windowed_us(batch: float, context: float) -> float:
    return 0.5 * decode_us(batch, context)


def experts_us(tokens: float) -> float:
    return 7.0 * tokens**0.25


def all_reduce_us(elements: float) -> float:
    return 4.0 * elements**0.1


def aiconfigurator(root: Path, version: str = "0.2.0") -> Path:
    """systems/ below `root`, of an H100 and one version of vllm."""
    data = root / "systems" / "data" / "h100_sxm"
    gemm = list(product(TOKENS, SIZES, SIZES))
    write(data / "gemm" / "vllm" / version / "gemm_perf.parquet", {
        **{name: [row[i] for row in gemm] for i, name in enumerate("mnk")}, "gemm_dtype": ["bfloat16"] * len(gemm),
        "latency": [product_us(*row) / 1e3 for row in gemm],
    })  # fmt: skip
    attention = data / "attention" / "vllm" / version
    heads = {"num_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "kv_cache_dtype": "bfloat16", "window_size": 0}
    prompts = [{**heads, "batch_size": 1, "isl": n, "latency": prefill_us(n) / 1e3} for n in LENGTHS]
    decodes = [
        {**heads, "batch_size": b, "step": c - 1, "latency": decode_us(b, c) / 1e3}
        for b, c in product((1, 8, 64, 256), LENGTHS)
    ]  # fmt: skip
    windowed = {"window_size": 32}
    prompts += [{**row, **windowed, "latency": row["latency"] / 2} for row in prompts]
    decodes += [{**row, **windowed, "latency": row["latency"] / 2} for row in decodes]
    write(attention / "context_attention_perf.parquet", columns_of(prompts))
    write(attention / "generation_attention_perf.parquet", columns_of(decodes))
    experts = {"hidden_size": 128, "inter_size": 64, "topk": 2, "num_experts": 64, "moe_tp_size": 1, "moe_ep_size": 1}
    kinds = [("bfloat16", "power_law_1.2", 1), ("bfloat16", "balanced", 9), ("fp8", "power_law_1.2", 3),
             ("fp8_block", "power_law_1.2", 2)]  # fmt: skip
    write(data / "moe" / "vllm" / version / "moe_perf.parquet", columns_of([
        {**experts, "moe_dtype": dtype, "distribution": routing, "num_tokens": n,
         "latency": times * experts_us(n) / 1e3}
        for dtype, routing, times in kinds for n in TOKENS
    ]))  # fmt: skip
    sizes = [2**i for i in range(6, 24)]
    write(data / "comm" / "vllm" / version / "custom_allreduce_perf.parquet", {
        "num_gpus": [2] * len(sizes), "message_size": sizes, "kernel_source": ["graph"] * len(sizes),
        "latency": [all_reduce_us(size) / 1e3 for size in sizes],
    })  # fmt: skip
    return root


def columns_of(rows: list[dict]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def write(path: Path, columns: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def write_csv(path: Path, rows: list[dict]) -> None:
    with (gzip.open if path.suffix == ".gz" else open)(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def llmservingsim(folder: Path) -> Path:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "layernorm", "rotary_emb", "act_fn", "embedding",
             "final_layernorm")  # fmt: skip
    write_csv(folder / "dense.csv.gz", [
        {"layer": name, "tokens": n, "time_us": (i + 1) * n**0.5} for i, name in enumerate(names) for n in TOKENS
    ])  # fmt: skip
    write_csv(folder / "per_sequence.csv", [
        {"layer": name, "sequences": n, "time_us": 10 * n**0.5} for name in ("lm_head", "sampler") for n in TOKENS
    ])  # fmt: skip
    alone = [(n, 0, 0, 0, prefill_us(n)) for n in LENGTHS]
    decodes = [(0, 0, b, c, decode_us(b, c)) for b, c in product((1, 8, 64), LENGTHS)]
    both = [(n, 0, b, c, 2 * (n * b) ** 0.25 * c**0.25) for n in LENGTHS for b, c in product((1, 8, 64), LENGTHS)]
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    write_csv(folder / "attention.csv", [dict(zip(names, row, strict=True)) for row in alone + decodes + both])
    return folder


def vidur(folder: Path, **shape: int) -> Path:
    ops = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "input_layernorm",
           "post_attention_layernorm", "attn_rope", "mlp_act", "add")  # fmt: skip
    model = {"n_head": 2, "n_kv_head": 1, "n_embd": 128, "n_expanded_embd": 256, **shape}
    write_csv(folder / "mlp.csv", [
        {**{f"time_stats.{op}.median": (i + 1) * n**0.5 / 1e3 for i, op in enumerate(ops)}, **model, "num_tokens": n,
         "num_tensor_parallel_workers": 1}
        for n in TOKENS
    ])  # fmt: skip
    return folder
