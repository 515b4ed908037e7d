"""Replicates of a recorded trace for repeated runs: disjoint parts of it, or a bootstrap of its time blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import to_ns
from schedlab.workloads.builder import rebase
from schedlab.workloads.trace import Labels, Trace, ragged

BLOCKS = 20
"""Time blocks of a bootstrap where their length is not given."""
COPY_STRIDE = 1 << 40
"""Unshared prompts of copy c are generated from row + c of these."""


def leaders(trace: Trace) -> np.ndarray:
    """The first row of each row's program or session, int64 [N]. Rows outside lead themselves; ties join sessions."""
    leader = np.arange(len(trace))
    belongs = trace.session if trace.program is None else trace.program
    if belongs is not None:
        _, first, place = np.unique(belongs.codes, return_index=True, return_inverse=True)
        leader = np.where(belongs.codes < 0, leader, first[place])
    if trace.after is not None:
        leader = np.where((leader == np.arange(len(trace))) & (trace.after >= 0), trace.after, leader)
    while not np.array_equal(further := leader[leader], leader):
        leader = further
    return leader


def copies(trace: Trace, number: np.ndarray) -> Trace:
    """With content, sessions and names of their own for rows of copy 1, 2, …; copy 0 is as recorded."""
    n = len(trace)
    blank = Labels(np.zeros(n, dtype=np.int64), ("",))
    names = trace.request_id or Labels.of(map(str, trace.source_row.tolist()))
    scope = trace.scope if trace.scope is not None else blank
    row = trace.source_row if trace.content_row is None else trace.content_row
    return replace(
        trace,
        request_id=_numbered(names, number),
        session=None if trace.session is None else _numbered(trace.session, number),
        program=None if trace.program is None else _numbered(trace.program, number),
        scope=None if trace.ids is None else _numbered(_filled(scope), number),
        content_row=row + number * COPY_STRIDE,
    )


def _filled(scope: Labels) -> Labels:
    """With the common scope spelt as an empty name, so that copies of it can be told apart."""
    if (scope.codes >= 0).all():
        return scope
    return Labels(np.where(scope.codes < 0, len(scope.names), scope.codes), (*scope.names, ""))


def _numbered(labels: Labels, number: np.ndarray) -> Labels:
    """Names with "#c" appended in copy c."""
    pairs = labels.codes * (int(number.max()) + 1) + number
    unique, codes = np.unique(np.where(labels.codes < 0, -1, pairs), return_inverse=True)
    width = int(number.max()) + 1
    names = [labels.names[p // width] + (f"#{p % width}" if p % width else "") for p in unique.tolist() if p >= 0]
    return Labels(codes - int(unique[0] < 0), tuple(names))


def disjoint_part(trace: Trace, seed: int, size: int) -> Trace:
    """Part `seed` of the trace in parts of `size` consecutive requests; parts never overlap."""
    start = seed * size
    if start + size > len(trace):
        raise ConfigError(
            f"seed={seed} needs requests {start} to {start + size} of {trace.name}, which has {len(trace)}: there are "
            f"{len(trace) // size} disjoint parts of {size}; replicates=bootstrap draws more"
        )
    return rebase(trace.take(slice(start, start + size)).counted(outside_part=len(trace) - size))


def shifted_window(window_s: tuple[float, float], seed: int, span_s: float) -> tuple[float, float]:
    """Window `seed` of those that follow each other without overlap, the given one being 0."""
    start, stop = window_s
    length = stop - start
    shifted = start + seed * length, stop + seed * length
    if shifted[1] > span_s:
        raise ConfigError(
            f"seed={seed} needs the window {list(shifted)}, beyond the trace's {span_s:.1f} s; overlapping windows are "
            f"no replicates; replicates=bootstrap draws more"
        )
    return shifted


def bootstrap(trace: Trace, rng: np.random.Generator, block_s: float | None = None) -> Trace:
    """Time blocks drawn with replacement into the places of the blocks; sessions stay whole, with their first turn.

    Efron's bootstrap over blocks, since arrivals are dependent. A block drawn again has content of its own.
    """
    span = int(trace.arrival_ns[-1]) + 1
    length = -(-span // BLOCKS) if block_s is None else to_ns(block_s)
    if not 0 < length < span:
        raise ConfigError(f"workload.bootstrap_block_s={block_s}, expected above 0 and below its {span / 1e9:.1f} s")
    block = trace.arrival_ns[leaders(trace)] // length
    order = np.argsort(block, kind="stable")
    counts = np.bincount(block, minlength=-(-span // length))
    first = np.concatenate([[0], np.cumsum(counts)])
    drawn = rng.integers(0, len(counts), len(counts))
    rows = [order[first[b] : first[b + 1]] for b in drawn.tolist()]
    sizes = [len(r) for r in rows]
    if not sum(sizes):
        raise ConfigError(f"{trace.name}: the blocks drawn hold no request; choose a longer workload.bootstrap_block_s")
    taken = np.concatenate(rows)
    again = _occurrence(drawn)
    shift = np.repeat((np.arange(len(drawn)) - drawn) * length, sizes)
    chosen = replace(_take_groups(trace, taken, sizes), arrival_ns=trace.arrival_ns[taken] + shift)
    replica = copies(chosen, np.repeat(again, sizes)).take(np.argsort(chosen.arrival_ns, kind="stable"))
    return rebase(replica.counted(blocks_drawn_again=int((again > 0).sum())))


def _occurrence(drawn: np.ndarray) -> np.ndarray:
    """How often each draw came before, int64 [len(drawn)]."""
    seen: dict[int, int] = {}
    out = []
    for block in drawn.tolist():
        out.append(seen.get(block, 0))
        seen[block] = out[-1] + 1
    return np.array(out, dtype=np.int64)


def _take_groups(trace: Trace, rows: np.ndarray, sizes: list[int]) -> Trace:
    """Rows in groups that may repeat; ties lead within a group, as sessions and programs are whole in it."""
    if trace.after is None:
        return trace.take(rows)
    chosen = replace(trace, after=None).take(rows)
    after = np.full(len(rows), -1, dtype=np.int64)
    place = np.full(len(trace), -1, dtype=np.int64)
    also = chosen.also_after if chosen.also_after is not None else ragged([[]] * len(rows))
    others = also.values.copy()
    start = 0
    for size in sizes:
        group = rows[start : start + size]
        place[group] = np.arange(start, start + size)
        followed = trace.after[group]
        after[start : start + size] = np.where(followed < 0, -1, place[followed])
        edges = slice(int(also.offsets[start]), int(also.offsets[start + size]))
        others[edges] = place[others[edges]]
        start += size
    return replace(chosen, after=after, also_after=replace(also, values=others) if len(others) else None)
