"""Keys and values of sequences out of paged caches, by torch: whose blocks they are in, and how to gather them.

Shape letters: N sequences, G of them gathered together, B blocks of a table's row, H key-value heads, C keys of one
sequence, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from schedlab.kernels.attention import Scale

GATHERED_KEYS = 2048
"""Keys gathered at once for several sequences."""


class PagedSequence(NamedTuple):
    """Rows `start..stop` of the queries, which see keys from position `first_key` to `context`."""

    number: int
    start: int
    stop: int
    first_key: int
    context: int

    @property
    def first_row(self) -> int:
        """Position of the first query; negative if there are more queries than keys."""
        return self.context - (self.stop - self.start)


def sequences(starts: list[int], contexts: list[int], window: int | None) -> list[PagedSequence]:
    """Where each sequence's queries and the keys that any of them sees are."""
    found = []
    for n, context in enumerate(contexts):
        num_rows = starts[n + 1] - starts[n]
        first_key = 0 if window is None else max(0, context - num_rows - window + 1)
        found.append(PagedSequence(n, starts[n], starts[n + 1], first_key if num_rows else context, context))
    return found


def groups(among: list[PagedSequence]) -> Iterator[list[PagedSequence]]:
    """Neighbours whose keys are gathered by one call: few enough to be in the processor's cache when they are read."""
    group: list[PagedSequence] = []
    keys = 0
    for sequence in among:
        if group and keys + sequence.context - sequence.first_key > GATHERED_KEYS:
            yield group
            group, keys = [], 0
        group.append(sequence)
        keys += sequence.context - sequence.first_key
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences whose keys are gathered by one call, side by side from `low` to `high`, shorter ones filled up.

    rows_G     : which sequences; a slice where they are neighbours
    blocks     : int64 [G * B], those without keys 0
    unused     : int64, of the G * B * block_size gathered rows those that are no keys between `low` and `high`
    mask_G11C  : what is added to scores, None if every row is a key
    first      : the first of the blocks if they are consecutive, and all rows of them between `low` and `high` are keys
    """

    rows_G: Tensor | slice
    blocks: Tensor
    count: int
    low: int
    high: int
    unused: Tensor
    mask_G11C: Tensor | None
    first: int | None

    def of(self, cache: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
        """The rows of one cache, [G, Hkv, C, D], zero where there is no key: it may hold anything, and 0 * NaN is
        NaN."""
        if self.first is None:
            pages = cache.index_select(0, self.blocks)
        else:
            pages = cache[self.first : self.first + len(self.blocks)]
        rows_RHD = _dequantised(pages.flatten(0, 1), dtype, scale)
        if len(self.unused):
            rows_RHD.index_fill_(0, self.unused, 0)
        return rows_RHD.view(self.count, -1, *rows_RHD.shape[1:])[:, self.low : self.high].transpose(1, 2)


def padded(
    block_tables_NB: Tensor, context_lens_N: Tensor, window: int | None, block_size: int, dtype: torch.dtype
) -> list[Padded]:
    """Sequences of one query in groups of similar lengths, at most GATHERED_KEYS keys unless it is one sequence.

    All layers of a step that see a window of one size ask for the same, so the last answer for it is kept beside what
    it was for.
    """
    tables_NB, contexts_N, options = block_tables_NB.numpy(), context_lens_N.numpy(), (window, block_size, dtype)
    last = _last.get(options)
    if last is None or not last.of(tables_NB, contexts_N):
        groups = list(_padded_groups(tables_NB, contexts_N, window, block_size, dtype))
        if len(_last) >= KEPT:
            _last.clear()
        _last[options] = last = _Answer(tables_NB.copy(), contexts_N.copy(), groups)
    return last.groups


class _Answer(NamedTuple):
    tables_NB: np.ndarray
    contexts_N: np.ndarray
    groups: list[Padded]

    def of(self, tables_NB: np.ndarray, contexts_N: np.ndarray) -> bool:
        return np.array_equal(self.contexts_N, contexts_N) and np.array_equal(self.tables_NB, tables_NB)


KEPT = 4
"""Answers at once: a model has windows of two sizes at most, and a process seldom two models."""
_last: dict[tuple[int | None, int, torch.dtype], _Answer] = {}


def _padded_groups(
    tables_NB: np.ndarray, contexts_N: np.ndarray, window: int | None, block_size: int, dtype: torch.dtype
) -> Iterator[Padded]:
    firsts_N = np.zeros_like(contexts_N) if window is None else np.maximum(contexts_N - window, 0)
    blocks_N = -(-contexts_N // block_size) - firsts_N // block_size
    order_N = np.argsort(blocks_N, kind="stable")
    start, num_sequences = 0, len(contexts_N)
    while start < num_sequences:
        stop = start + 1
        while stop < num_sequences and blocks_N[order_N[stop]] * block_size * (stop + 1 - start) <= GATHERED_KEYS:
            stop += 1
        rows_G = np.sort(order_N[start:stop])
        yield _padded(rows_G, tables_NB, contexts_N[rows_G], firsts_N[rows_G], block_size, dtype)
        start = stop


def _padded(
    rows_G: np.ndarray, tables_NB: np.ndarray, contexts_G: np.ndarray, firsts_G: np.ndarray, block_size: int,
    dtype: torch.dtype,
) -> Padded:  # fmt: skip
    leads_G = firsts_G % block_size
    ends_G = leads_G + contexts_G - firsts_G
    low, high = int(leads_G.min()), int(ends_G.max())
    columns_GB = (firsts_G // block_size)[:, None] + np.arange(-(-high // block_size))
    known_GB = columns_GB * block_size < contexts_G[:, None]
    blocks_GB = np.where(known_GB, tables_NB[rows_G[:, None], np.where(known_GB, columns_GB, 0)], 0)
    places_R = np.arange(blocks_GB.shape[1] * block_size)
    unused_GR = (places_R < leads_G[:, None]) | (places_R >= ends_G[:, None])
    unused_GR[:, :low] = unused_GR[:, high:] = False
    blocks = blocks_GB.ravel()
    consecutive = not unused_GR.any() and bool(len(blocks)) and bool((np.diff(blocks) == 1).all())
    neighbours = int(rows_G[-1]) - int(rows_G[0]) == len(rows_G) - 1
    mask = None
    if unused_GR.any():
        hidden_GC = torch.from_numpy(unused_GR[:, low:high])
        mask = torch.zeros(hidden_GC.shape, dtype=dtype).masked_fill_(hidden_GC, -math.inf)[:, None, None]
    return Padded(
        slice(int(rows_G[0]), int(rows_G[-1]) + 1) if neighbours else torch.from_numpy(rows_G),
        torch.from_numpy(blocks), len(rows_G), low, high, torch.from_numpy(np.flatnonzero(unused_GR)), mask,
        int(blocks[0]) if consecutive else None,
    )  # fmt: skip


class Gathered:
    """The blocks of a group of sequences, and where in them each one's keys lie.

    What lies beyond a sequence's keys is cut off, never masked: it may hold anything, and 0 * NaN is NaN.
    """

    def __init__(self, group: list[PagedSequence], block_tables_NB: Tensor, block_size: int) -> None:
        tables_GB = block_tables_NB[group[0].number : group[-1].number + 1]
        firsts = [s.first_key // block_size for s in group]
        stops = [-(-s.context // block_size) for s in group]
        columns_B = torch.arange(tables_GB.shape[1])
        used_GB = (columns_B >= torch.tensor(firsts)[:, None]) & (columns_B < torch.tensor(stops)[:, None])
        self._blocks = tables_GB[used_GB]
        self._cuts: list[int] = []
        for s, first, stop in zip(group, firsts, stops, strict=True):
            lead = s.first_key - first * block_size
            self._cuts += [lead, s.context - s.first_key, stop * block_size - s.context]

    def of(self, cache: Tensor, dtype: torch.dtype, scale: Scale) -> Sequence[Tensor]:
        """Each sequence's rows of one cache, [Hkv, C, D]; a view if the blocks are consecutive, else a copy."""
        rows_CHD = _dequantised(_taken(cache, self._blocks).flatten(0, 1), dtype, scale)
        return rows_CHD.transpose(0, 1).split_with_sizes(self._cuts, dim=1)[1::3]


def _taken(cache: Tensor, blocks: Tensor) -> Tensor:
    """The pages of `blocks`; a view if these are consecutive."""
    first, count = int(blocks[0]) if len(blocks) else 0, len(blocks)
    if torch.equal(blocks, torch.arange(first, first + count, dtype=blocks.dtype)):
        return cache[first : first + count]
    return cache.index_select(0, blocks)


def _dequantised(rows_CHD: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    rows_CHD = rows_CHD.to(dtype)
    return rows_CHD if scale is None else rows_CHD * float(scale)
