"""How many keys queries see: all before them, the last ones alone, or the one or the other by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np

Count = TypeVar("Count", int, np.ndarray)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Layers of different windows, (window, number of such layers) each; a mean over them is a whole number."""

    shares: tuple[tuple[int | None, int], ...]

    def mean(self, of: Callable[[int | None], Count]) -> Count:
        """The mean over the layers of what a layer of a window has, half a unit rounded up."""
        layers = sum(count for _, count in self.shares)
        total: Any = 2 * sum(count * of(window) for window, count in self.shares) + layers
        mean: Count = total // (2 * layers)
        return mean


Window: TypeAlias = int | Mixed | None
"""Keys that a query sees at most, its own included; None for all."""


def layers_window(windows: tuple[int | None, ...]) -> Window:
    """Of a model whose layers have these."""
    shares = Counter(windows)
    return windows[0] if len(shares) == 1 else Mixed(tuple(shares.items()))


def attention_reach(start: int, count: int, window: Window = None) -> tuple[int, int]:
    """(query, key) pairs and distinct keys of `count` causal queries from `start`, each seeing a `window` at most.

    A query sees its own key and those before it.
    """
    if isinstance(window, Mixed):
        pairs = window.mean(lambda one: attention_reach(start, count, one)[0])
        return pairs, window.mean(lambda one: attention_reach(start, count, one)[1])
    stop = start + count
    pairs = count * start + count * (count + 1) // 2
    if window is None or stop <= window:
        return pairs, stop
    full = min(count, stop - window)  # the last `full` queries see a whole window
    pairs = full * window + (count - full) * start + (count - full) * (count - full + 1) // 2
    return pairs, min(stop, window - 1 + count)


def seen(context: int, window: Window) -> int:
    """Keys that one query reads at the end of `context`."""
    if isinstance(window, Mixed):
        return window.mean(lambda one: seen(context, one))
    return context if window is None else min(context, window)


def seen_at_most(context: Count, queries: Count, window: Window) -> Count:
    """The same of `queries` whose contexts sum to `context`, if each is as long as a window or none is."""
    if isinstance(window, Mixed):
        return window.mean(lambda one: seen_at_most(context, queries, one))
    least: Count = context if window is None else np.minimum(context, window * queries)
    return least
