"""Profiles of microsoft/vidur (MIT), measured in 2024: mlp.csv by model, all_reduce.csv by machine, in ms.

Linears, elementwise kernels and collectives; attention where its attention.csv is there too, else by this framework's
roofline, and the profile says so.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from schedlab.experiments.studies.kernel_tables.csv_files import columns, find, needed
from schedlab.experiments.studies.kernel_tables.curves import Curve, Surface
from schedlab.experiments.studies.kernel_tables.kernels import Kernels
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError

PROJECTIONS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
SHAPE = {
    "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "n_embd": "hidden_size",
    "n_expanded_embd": "intermediate_size",
}  # fmt: skip


class Vidur(Kernels):
    """The folder PATH with mlp.csv, and where there are several devices all_reduce.csv."""

    def __init__(self, path: str, roofline: Roofline, hardware: Hardware) -> None:
        if roofline.weight_dtype not in ("bf16", "fp16"):
            raise ConfigError(f"profile import vidur: expected 16-bit weights, found {roofline.weight_dtype}")
        self.roofline, self.hardware = roofline, hardware
        self.curves = mlp(needed(path, "mlp"), roofline)
        self.all_reduce = None if roofline.tensor_parallel == 1 else all_reduce(needed(path, "all_reduce"), roofline)
        attention = find(path, "attention")
        self.attention = None if attention is None else Attention(attention, roofline)
        self.facts = {
            "source": "Vidur", "package": "profiles of microsoft/vidur", "licence": "MIT", "backend": "vllm",
            "version": "2024", "device": hardware.name, "path": path,
            "attention": "roofline" if attention is None else "measured",
        }  # fmt: skip

    def answers(self, tokens: int, batch: int, context: int) -> bool:
        rows = tokens + batch
        reduced = self.all_reduce is None or rows * self.roofline.model.hidden_size <= self.all_reduce.most
        if rows > self.curves["mlp_act"].most or not reduced:
            return False
        return self.attention is None or self.attention.answers(tokens, batch, context)

    def projections_us(self, tokens: int) -> float:
        return sum(self.curves[name](tokens) for name in PROJECTIONS)

    def elementwise_us(self, tokens: int) -> float:
        return sum(self.curves[name](tokens) for name in ELEMENTWISE)

    def prefill_attention_us(self, tokens: int) -> float:
        if self.attention is not None:
            return self.attention.prefill(tokens)
        return self._modelled(Work.prefill(0, tokens))

    def decode_attention_us(self, batch: int, context: int) -> float:
        if self.attention is not None:
            return self.attention.decode(batch, context)
        return self._modelled(Work(decode_keys=batch * context))

    def _modelled(self, work: Work) -> float:
        parts = (self.roofline.prefill_attention(work), self.roofline.decode_attention(work))
        seconds = sum(max(part.compute_s(self.hardware), part.transfer_s(self.hardware)) for part in parts)
        kernel_us = self.hardware.attention_us + self.hardware.kernel_us
        return seconds / self.roofline.model.num_hidden_layers * 1e6 + kernel_us

    def all_reduce_us(self, tokens: int) -> float:
        return 0.0 if self.all_reduce is None else self.all_reduce(tokens * self.roofline.model.hidden_size)

    def head_us(self, rows: int) -> float:
        """By the roofline: the profiles have no logits."""
        part = self.roofline.logits(Work(rows=rows))
        return max(part.compute_s(self.hardware), part.transfer_s(self.hardware)) * 1e6 + self.hardware.kernel_us


class Attention:
    """attention.csv: prompts alone, and batches of decodes."""

    def __init__(self, path: Path, roofline: Roofline) -> None:
        names = (
            "n_embd", "n_q_head", "n_kv_head", "num_tensor_parallel_workers", "batch_size", "prefill_chunk_size",
            "kv_cache_size", "is_prefill", "time_stats.attn_prefill.median", "time_stats.attn_decode.median",
        )  # fmt: skip
        table, model = columns(path, names), roofline.model
        chosen = (
            (table["n_embd"] == model.hidden_size) & (table["n_q_head"] == model.num_attention_heads)
            & (table["n_kv_head"] == model.num_key_value_heads)
            & (table["num_tensor_parallel_workers"] == roofline.tensor_parallel)
        )  # fmt: skip
        prompts = chosen & (table["is_prefill"] == "True") & (table["batch_size"] == 1) & (table["kv_cache_size"] == 0)
        decodes = chosen & (table["is_prefill"] == "False") & (table["kv_cache_size"] > 0)
        if not (prompts.any() and decodes.any()):
            degree = roofline.tensor_parallel
            raise ConfigError(f"{path}: expected prompts and decodes of this model on {degree} devices")
        prefill_us, decode_us = (table[name] * 1e3 for name in names[-2:])
        self.prefill = Curve.of(table["prefill_chunk_size"][prompts], prefill_us[prompts], power=2.0)
        batches = table["batch_size"]
        curves = {
            int(size): Curve.of(table["kv_cache_size"][rows], decode_us[rows])
            for size in np.unique(batches[decodes]) for rows in [decodes & (batches == size)]
        }  # fmt: skip
        self.decode = Surface(curves, "decodes of a step")

    def answers(self, tokens: int, batch: int, context: int) -> bool:
        return tokens <= self.prefill.most and (not batch or self.decode.answers(batch, context))


def mlp(path: Path, roofline: Roofline) -> dict[str, Curve]:
    """A curve for each kernel over tokens; ConfigError if the file is of another model or was not split so."""
    times = {name: f"time_stats.{name}.median" for name in (*PROJECTIONS, *ELEMENTWISE)}
    table = columns(path, (*times.values(), *SHAPE, "num_tokens", "num_tensor_parallel_workers"))
    for theirs, ours in SHAPE.items():
        found, expected = sorted(set(table[theirs].tolist())), getattr(roofline.model, ours)
        if found != [expected]:
            raise ConfigError(f"{path}: {theirs}: expected {expected}, the model's {ours}, found {found[0]:g}")
    chosen = table["num_tensor_parallel_workers"] == roofline.tensor_parallel
    if not chosen.any():
        known = ", ".join(f"{n:g}" for n in sorted(set(table["num_tensor_parallel_workers"].tolist())))
        raise ConfigError(f"engine.tensor_parallel: {path} has {known}, found {roofline.tensor_parallel}")
    return {
        name: Curve.of(table["num_tokens"][chosen], table[column][chosen] * 1e3)
        for name, column in times.items() if np.isfinite(table[column][chosen]).all()
    }  # fmt: skip


def all_reduce(path: Path, roofline: Roofline) -> Curve:
    """Over elements: `size` counts bytes of 16-bit elements."""
    table = columns(path, ("num_workers", "size", "collective", "time_stats.all_reduce.median"))
    chosen = (table["num_workers"] == roofline.tensor_parallel) & (table["collective"] == "all_reduce")
    if not chosen.any():
        raise ConfigError(f"{path}: expected all_reduce of {roofline.tensor_parallel} devices, found none")
    return Curve.of(table["size"][chosen] / 2, table["time_stats.all_reduce.median"][chosen] * 1e3)
