"""What a source of measured kernels answers, and a step put together from its answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from schedlab.framework.cost.fit import Point
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.windows import Window, seen

BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIXED_BATCHES, MIXED_CONTEXTS = (8, 32, 64, 128), (512, 2048, 8192)
MOST_KEYS = 600_000
"""Contexts of a batch together that are asked for at most."""


class Kernels:
    """Times of one model's kernels on one device of its tensor-parallel group, in µs.

    An implementation answers from what was measured, interpolated; it refuses with a ConfigError what lies far outside,
    and never fills in what it does not have. It does *not* count what the host does between steps. All but `head_us`
    are of one layer.

    facts   : where the numbers come from: source, version, licence, backend, device
    dropped : rows left out because no device could be that fast
    """

    facts: Mapping[str, str]
    dropped: int = 0

    def answers(self, tokens: int, batch: int, context: int) -> bool:
        """Whether a step of a prompt of `tokens` and `batch` decodes of `context` lies within what was measured."""
        return True

    def projections_us(self, tokens: int) -> float:
        """The products of one layer with `tokens` rows: qkv, out, gate with up, down; or router and experts."""
        raise NotImplementedError

    def elementwise_us(self, tokens: int) -> float:
        """Norms, rope, activation and the write of keys and values."""
        raise NotImplementedError

    def prefill_attention_us(self, tokens: int) -> float:
        """A prompt of `tokens` attending to itself."""
        raise NotImplementedError

    def decode_attention_us(self, batch: int, context: int) -> float:
        """`batch` sequences of `context` tokens, one query each."""
        raise NotImplementedError

    def attention_us(self, tokens: int, batch: int, context: int) -> float:
        """Both in one step. Here one after another; a source that measured them together says so."""
        return (self.prefill_attention_us(tokens) if tokens else 0.0) + (
            self.decode_attention_us(batch, context) if batch else 0.0
        )

    def all_reduce_us(self, tokens: int) -> float:
        """One all-reduce of the hidden states of `tokens` tokens; 0 on one device."""
        raise NotImplementedError

    def head_us(self, rows: int) -> float:
        """Logits of `rows` rows."""
        raise NotImplementedError


def step_us(kernels: Kernels, num_layers: int, tokens: int, batch: int, context: int) -> float:
    """A step that prefills a prompt of `tokens` from its start and decodes `batch` sequences of `context` tokens."""
    rows = batch + (1 if tokens else 0)
    layer = (
        kernels.projections_us(tokens + batch)
        + kernels.elementwise_us(tokens + batch)
        + kernels.attention_us(tokens, batch, context)
        + 2 * kernels.all_reduce_us(tokens + batch)
    )
    return num_layers * layer + kernels.head_us(rows)


def grid(kernels: Kernels) -> Iterator[tuple[int, int, int]]:
    """(prompt tokens, batch, context) of the steps that a profile is fitted to: decodes, prefills, both."""
    steps = [(0, b, c) for b, c in product(BATCHES, CONTEXTS)] + [(tokens, 0, 0) for tokens in CHUNKS]
    steps += product(CHUNKS, MIXED_BATCHES, MIXED_CONTEXTS)
    return (step for step in steps if step[1] * step[2] <= MOST_KEYS and kernels.answers(*step))


def points(kernels: Kernels, roofline: Roofline) -> list[Point]:
    """The grid's steps and their device times."""
    layers = roofline.model.num_hidden_layers
    return [
        Point(
            work(tokens, batch, context, roofline.window), round(1e3 * step_us(kernels, layers, tokens, batch, context))
        )
        for tokens, batch, context in grid(kernels)
    ]


def work(tokens: int, batch: int, context: int, window: Window) -> Work:
    decodes = Work(tokens=batch, rows=batch, decodes=batch, decode_keys=batch * seen(context, window))
    return decodes + Work.prefill(0, tokens, window=window) if tokens else decodes
