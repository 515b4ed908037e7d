"""Layer tables of casys-kaist/LLMServingSim (MIT): one model on one device, whole kernels of a vLLM server, in µs.

`dense` by layer and tokens, `per_sequence` by layer and sequences, `attention` by prompt chunk, its earlier tokens,
decodes and their context, prompt and decodes together in one kernel. They do not name the model: the user does.
"""

from __future__ import annotations

import math

import numpy as np

from schedlab.experiments.studies.kernel_tables.csv_files import columns, needed
from schedlab.experiments.studies.kernel_tables.curves import REACH, Curve, Surface, neighbours
from schedlab.experiments.studies.kernel_tables.kernels import Kernels
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.errors import ConfigError

PROJECTIONS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
ELEMENTWISE = (("layernorm", 2), ("rotary_emb", 1), ("act_fn", 1))
ONCE = ("embedding", "final_layernorm")


class LLMServingSim(Kernels):
    """The tables at PATH: files of a folder, or those whose names begin with it."""

    def __init__(self, path: str, roofline: Roofline, hardware: Hardware) -> None:
        dtypes = (roofline.weight_dtype, roofline.kv_cache_dtype)
        if dtypes != ("bf16", "bf16") or roofline.tensor_parallel != 1:
            found = f"{dtypes[0]}, {dtypes[1]} and {roofline.tensor_parallel}"
            expected = "bf16 weights and cache on 1 device"
            raise ConfigError(f"profile import llmservingsim: expected {expected}, found {found}")
        self.layers = layers(path, "dense", "tokens", (*PROJECTIONS, *ONCE, *(name for name, _ in ELEMENTWISE)))
        self.per_sequence = layers(path, "per_sequence", "sequences", ("lm_head", "sampler"))
        self._attention(path)
        self.facts = {
            "source": "LLMServingSim", "package": "tables of casys-kaist/LLMServingSim", "licence": "MIT",
            "backend": "vllm", "version": "unknown", "device": hardware.name, "path": path,
        }  # fmt: skip

    def answers(self, tokens: int, batch: int, context: int) -> bool:
        if tokens + batch > self.layers["act_fn"].most or (batch and not self.decode.answers(batch, context)):
            return False
        return not (tokens and batch) or tokens <= max(self.mixed) * REACH

    def projections_us(self, tokens: int) -> float:
        return sum(self.layers[name](tokens) for name in PROJECTIONS)

    def elementwise_us(self, tokens: int) -> float:
        optional = self.layers["qk_norm"](tokens) if "qk_norm" in self.layers else 0.0
        return sum(count * self.layers[name](tokens) for name, count in ELEMENTWISE) + optional

    def prefill_attention_us(self, tokens: int) -> float:
        return self.prefill(tokens)

    def decode_attention_us(self, batch: int, context: int) -> float:
        return self.decode(batch, context)

    def attention_us(self, tokens: int, batch: int, context: int) -> float:
        """As measured: a kernel that does both takes up to twice as long as two that do one each."""
        if not (tokens and batch):
            return super().attention_us(tokens, batch, context)
        around = neighbours(sorted(self.mixed), tokens, "prompt tokens beside decodes")
        return math.exp(sum(weight * math.log(self.mixed[at](batch, context)) for at, weight in around))

    def all_reduce_us(self, tokens: int) -> float:
        return 0.0

    def head_us(self, rows: int) -> float:
        """Logits and sampling, and what a step does once before and after its layers."""
        return sum(curve(rows) for curve in self.per_sequence.values()) + sum(self.layers[name](rows) for name in ONCE)

    def _attention(self, path: str) -> None:
        names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
        chunk, earlier, batch, context, us = columns(needed(path, "attention"), names).values()
        alone = (batch == 0) & (earlier == 0) & (chunk > 0)
        self.prefill = Curve.of(chunk[alone], us[alone], power=2.0)
        self.decode = surface(batch, context, us, (chunk == 0) & (batch > 0) & (context > 0))
        both = (chunk > 0) & (earlier == 0) & (batch > 0) & (context > 0)
        at = {int(size): both & (chunk == size) for size in np.unique(chunk[both])}
        full = max((len(np.unique(batch[rows])) for rows in at.values()), default=0)
        self.mixed = {
            size: surface(batch, context, us, rows)
            for size, rows in at.items() if len(np.unique(batch[rows])) == full
        }  # fmt: skip
        if not (alone.any() and self.decode.curves and self.mixed):
            raise ConfigError(f"{needed(path, 'attention')}: expected prompts alone, decodes alone and both together")


def surface(batch: np.ndarray, context: np.ndarray, us: np.ndarray, rows: np.ndarray) -> Surface:
    curves = {
        int(size): Curve.of(context[of_size], us[of_size])
        for size in np.unique(batch[rows]) for of_size in [rows & (batch == size)]
    }  # fmt: skip
    return Surface(curves, "decodes of a step")


def layers(path: str, name: str, size: str, expected: tuple[str, ...]) -> dict[str, Curve]:
    """A curve for each layer of a file; ConfigError if one of `expected` is missing."""
    file = needed(path, name)
    table = columns(file, ("layer", size, "time_us"))
    names = table["layer"]
    curves = {
        str(layer): Curve.of(table[size][rows], table["time_us"][rows])
        for layer in np.unique(names) for rows in [names == layer]
    }  # fmt: skip
    if missing := [layer for layer in expected if layer not in curves]:
        raise ConfigError(f"{file}: expected the layer {missing[0]}, found {', '.join(curves)}")
    return curves
