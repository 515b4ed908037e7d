"""What is in a trace, in figures: arrivals, lengths, sessions, and how much of the prompts could be reused.

Reuse is counted as blocks of the trace: an id reuses an equal id of equal width after equal ids in the same scope, so a
partial last block counts where an equal one was seen. Requests take no time: each finds what all earlier ones left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from schedlab.framework.request import NS
from schedlab.workloads.trace import BlockIds, Trace


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one column, in its own unit; percentiles interpolate linearly."""

    mean: float
    median: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: np.ndarray) -> Distribution:
        return cls(float(values.mean()), *(float(v) for v in np.percentile(values, (50, 99, 100))))


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """Rate in requests a second over the span; None where it has no meaning (fewer than two stamps).

    gap_cv : standard deviation over mean of the gaps; dispersion : variance over mean of arrivals per 1 s bin (1 is
    Poisson); distinct, most : different stamps, and the most requests on one.
    """

    span_s: float
    rate: float | None
    gap_cv: float | None
    dispersion: float | None
    longest_gap_s: float | None
    distinct: int
    most: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """Parts of all tokens, at unlimited memory.

    prefix       : of prompt tokens, the leading run of blocks seen before, each after the same blocks
    leading      : of the ids' tokens, the leading run of ids seen before, whatever stood before them then
    any_position : of the ids' tokens, all ids seen before, wherever they stand
    """

    prefix: float
    leading: float
    any_position: float
    unique_blocks: int
    fully_cached: int


def arrival_statistics(trace: Trace) -> ArrivalStatistics:
    arrival = trace.arrival_ns
    _, counts = np.unique(arrival, return_counts=True)
    if len(counts) < 2:
        return ArrivalStatistics(trace.span_s, None, None, None, None, len(counts), int(counts.max()))
    gaps = np.diff(arrival) / NS
    bins = np.bincount((arrival // NS).astype(np.int64))
    return ArrivalStatistics(
        trace.span_s, trace.mean_rate, float(gaps.std() / gaps.mean()), float(bins.var() / bins.mean()),
        float(gaps.max()), len(counts), int(counts.max()),
    )  # fmt: skip


def session_lengths(trace: Trace) -> np.ndarray:
    """Turns of each session, int64."""
    if trace.session is None:
        return np.empty(0, dtype=np.int64)
    codes = trace.session.codes
    return np.unique(codes[codes >= 0], return_counts=True)[1]


def reuse(trace: Trace) -> Reuse | None:
    """None for a trace without block ids: its reuse is unknown, not 0."""
    if trace.ids is None:
        return None
    widths, row = trace.ids.token_widths(trace.prompt_tokens), np.repeat(np.arange(len(trace)), trace.ids.counts)
    chained = seen_before(prefix_keys(trace), row)
    alone = seen_before(_mix(trace.ids.values, widths, _scope_of(trace)[row]), row)
    leading = alone & (_run_start(~alone, trace.ids) > np.arange(len(row)))
    covered = np.bincount(row[chained], weights=widths[chained], minlength=len(trace))
    prompts, tokens = int(trace.prompt_tokens.sum()), int(widths.sum())
    return Reuse(
        prefix=float(widths[chained].sum()) / prompts,
        leading=float(widths[leading].sum()) / tokens,
        any_position=float(widths[alone].sum()) / tokens,
        unique_blocks=int((~chained).sum()),
        fully_cached=int((covered == trace.prompt_tokens).sum()),
    )


def prefix_keys(trace: Trace) -> np.ndarray:
    """One key for each id of each prompt, uint64: equal prefixes have equal keys.

    A key is the sum of the ids up to there, each mixed with width, scope and place: all are made without a loop.
    Among n keys two different prefixes meet with a probability of about n² / 2^65: 3e-5 at 30 million.
    """
    assert trace.ids is not None
    ids = trace.ids
    row = np.repeat(np.arange(len(trace)), ids.counts)
    place = np.arange(len(ids.values)) - ids.offsets[:-1][row]
    mixed = _mix(ids.values, ids.token_widths(trace.prompt_tokens), _scope_of(trace)[row], place)
    total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    keys: np.ndarray = total[1:] - total[ids.offsets[:-1]][row]
    return keys


def _scope_of(trace: Trace) -> np.ndarray:
    return np.full(len(trace), -1, dtype=np.int64) if trace.scope is None else trace.scope.codes


def _mix(*columns: np.ndarray) -> np.ndarray:
    """uint64 hash of rows of integers: splitmix64 chained over the columns."""
    x = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        x = x * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64) + np.uint64(0x632BE59BD9B4E019)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def seen_before(keys: np.ndarray, row: np.ndarray) -> np.ndarray:
    """bool: an equal key stands in an earlier row (`row` is non-decreasing)."""
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    before: np.ndarray = row[first[place]] < row
    return before


def _run_start(breaks: np.ndarray, ids: BlockIds) -> np.ndarray:
    """For each id, where its row's first break stands, or the row's end."""
    row = np.repeat(np.arange(len(ids)), ids.counts)
    first = ids.offsets[1:].copy()
    where = np.flatnonzero(breaks)
    np.minimum.at(first, row[where], where)
    return first[row]


def reuse_with_memory(trace: Trace, capacity_tokens: int) -> float | None:
    """Part of the prompt tokens reused when blocks of at most so many tokens are kept, least recently used out first,
    of one prompt its tail first."""
    if trace.ids is None:
        return None
    keys = prefix_keys(trace).tolist()
    widths = trace.ids.token_widths(trace.prompt_tokens).tolist()
    offsets = trace.ids.offsets.tolist()
    kept: OrderedDict[int, int] = OrderedDict()
    held = reused = 0
    for start, stop in zip(offsets, offsets[1:], strict=False):
        hit = start
        while hit < stop and keys[hit] in kept:
            reused += widths[hit]
            hit += 1
        held += sum(widths[i] for i in range(hit, stop) if keys[i] not in kept)
        for i in range(stop - 1, start - 1, -1):  # the head last, as the most recently used
            kept[keys[i]] = widths[i]
            kept.move_to_end(keys[i])
        while held > capacity_tokens:
            held -= kept.popitem(last=False)[1]
    return reused / int(trace.prompt_tokens.sum())


def oddities(trace: Trace) -> Mapping[str, int]:
    """Rows that need care, by kind; those of which there are none are left out."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    stamped = np.ones(len(trace), dtype=bool) if trace.stamped is None else trace.stamped
    found = {
        "without a prompt": int((prompt == 0).sum()),
        "without output": int((output == 0).sum()),
        "of one output token (no decode step)": int((output == 1).sum()),
        "of more than 32,768 prompt tokens": int((prompt > 32_768).sum()),
        "of more than 131,072 prompt tokens": int((prompt > 131_072).sum()),
        "at the stamp of the row before": int((np.diff(trace.arrival_ns[stamped]) == 0).sum()),
        "without a stamp of their own": int((~stamped).sum()),
    }
    return {kind: number for kind, number in found.items() if number}
