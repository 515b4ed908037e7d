"""Keys and values of sequences out of paged caches, by torch: whose blocks they are in, and how to gather them.

Knows block tables and lengths, nothing of attention. Shape letters: N sequences, G of them gathered together, B blocks
of a table's row, H key-value heads, C keys of one sequence, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Scale: TypeAlias = float | Tensor | None
"""What a cache's values are multiplied with when read: a number, or a tensor of one element."""

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
        first, count = int(self._blocks[0]) if len(self._blocks) else 0, len(self._blocks)
        if torch.equal(self._blocks, torch.arange(first, first + count, dtype=self._blocks.dtype)):
            pages = cache[first : first + count]
        else:
            pages = cache.index_select(0, self._blocks)
        rows_CHD = _dequantised(pages.flatten(0, 1), dtype, scale)
        return rows_CHD.transpose(0, 1).split_with_sizes(self._cuts, dim=1)[1::3]


def _dequantised(rows_CHD: Tensor, dtype: torch.dtype, scale: Scale) -> Tensor:
    rows_CHD = rows_CHD.to(dtype)
    return rows_CHD if scale is None else rows_CHD * float(scale)
