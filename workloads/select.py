"""Choosing and scaling rows of a trace. Every function returns a new trace and counts what it left out or changed.

Replicates are in replicate.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.request import NS, to_ns
from schedlab.workloads.arrivals import Arrivals, first_arrivals
from schedlab.workloads.builder import rebase
from schedlab.workloads.replicate import copies, leaders
from schedlab.workloads.trace import BlockIds, Trace


def choose(trace: Trace, keep: np.ndarray, reason: str) -> Trace:
    """The rows where `keep`, the rest counted under `reason`; turns cut from what they followed are counted too."""
    kept = trace.where(keep, reason)
    if trace.after is None or kept.after is None:
        return kept
    if trace.program is not None:
        return kept.counted(dependencies_cut=int((_waits(trace)[keep] - _waits(kept)).sum()))
    cut = (trace.after[keep] >= 0) & (kept.after < 0)
    return kept.counted(turns_cut_from_their_session=int(cut.sum()))


def _waits(trace: Trace) -> np.ndarray:
    """How many requests each waits for, int64 [N]."""
    assert trace.after is not None
    others = 0 if trace.also_after is None else trace.also_after.counts
    waits: np.ndarray = (trace.after >= 0).astype(np.int64) + others
    return waits


def first_requests(trace: Trace, count: int, repeat: bool = False) -> Trace:
    """The first `count` requests in order of arrival; more than there are only by `repeat`ing, with fresh content."""
    if count < 1:
        raise ConfigError(f"workload.max_requests={count}, expected at least 1")
    if count > len(trace) and not repeat:
        raise ConfigError(f"workload.max_requests={count}, but {trace.name} has {len(trace)}; repeat=true starts again")
    trace = laps(trace, -(-count // len(trace)))
    return choose(trace, np.arange(len(trace)) < count, "beyond_max_requests")


def laps(trace: Trace, number: int) -> Trace:
    """The trace so many times in a row, a mean gap apart; every lap has content and sessions of its own."""
    if number == 1:
        return trace
    n = len(trace)
    lap_ns = int(trace.arrival_ns[-1]) + round(trace.span_s * NS / max(n - 1, 1))
    lap = np.repeat(np.arange(number), n)
    rows = np.tile(np.arange(n), number)
    again = replace(trace, after=None).take(rows)
    after = None if trace.after is None else np.where(trace.after[rows] < 0, -1, trace.after[rows] + lap * n)
    also = again.also_after
    if also is not None:
        also = replace(also, values=also.values + np.repeat(lap * n, also.counts))
    again = replace(again, arrival_ns=again.arrival_ns + lap * lap_ns, after=after, also_after=also)
    return copies(again, lap).counted(repeated=n * (number - 1))


def window(trace: Trace, start_s: float, stop_s: float) -> Trace:
    """Requests arriving in [start, stop) recorded seconds from the trace's zero, timed from the first of them again."""
    if not 0 <= start_s < stop_s:
        raise ConfigError(f"workload.window=[{start_s}, {stop_s}], expected 0 <= start < stop")
    inside = (trace.arrival_ns >= to_ns(start_s)) & (trace.arrival_ns < to_ns(stop_s))
    if not inside.any():
        raise ConfigError(f"workload.window=[{start_s}, {stop_s}] holds none; {trace.name} spans {trace.span_s:.1f} s")
    return rebase(choose(trace, inside, "outside_window"))


def sample_sessions(trace: Trace, share: float, rng: np.random.Generator) -> Trace:
    """A random part of the sessions, each kept whole. Sampling single rows would destroy reuse, so there is no such."""
    if trace.session is None:
        raise ConfigError(f"{trace.name} has no sessions to sample; choose a window or max_requests")
    if not 0 < share <= 1:
        raise ConfigError(f"workload.sample_sessions={share}, expected a share above 0, up to 1")
    leader = leaders(trace)
    unique, place = np.unique(leader, return_inverse=True)
    kept = rng.permutation(len(unique))[: max(1, round(share * len(unique)))]
    return rebase(choose(trace, np.isin(place, kept), "in_sessions_not_sampled"))


def limit_length(trace: Trace, limit: int, how: str) -> Trace:
    """What to do with requests of more than `limit` tokens, prompt and output together.

    error, drop, clip_prompt (from its end, block ids along) or clip_output. What would be left without a token is an
    error, as is a limit below 2.
    """
    over = trace.prompt_tokens + np.maximum(trace.output_tokens, 0) > limit
    if not over.any():
        return trace
    if how == "drop":
        return choose(trace, ~over, "beyond_max_length")
    row = int(np.argmax(over))
    if how == "clip_prompt":
        return _clip_prompt(trace, limit, over)
    if how == "clip_output":
        return _clip_output(trace, limit, over)
    prompt, output = trace.prompt_tokens[row], trace.output_tokens[row]
    raise TraceError(
        f"{trace.name}: row {trace.source_row[row]} has {prompt} + {output} tokens, above max_length={limit} "
        f"({int(over.sum())} such rows); too_long can drop or clip them"
    )


def _clip_prompt(trace: Trace, limit: int, over: np.ndarray) -> Trace:
    prompt = np.where(over, limit - trace.output_tokens, trace.prompt_tokens)
    _check_left(trace, prompt, limit, "output")
    ids, tokens = _clip_ids(trace.ids, prompt), _clip_ids(trace.tokens, prompt)
    return replace(trace, prompt_tokens=prompt, ids=ids, tokens=tokens).counted(prompts_clipped=int(over.sum()))


def _clip_output(trace: Trace, limit: int, over: np.ndarray) -> Trace:
    output = np.where(over, limit - trace.prompt_tokens, trace.output_tokens)
    _check_left(trace, np.where(over, output, 1), limit, "prompt")
    return replace(trace, output_tokens=output).counted(outputs_clipped=int(over.sum()))


def _check_left(trace: Trace, left: np.ndarray, limit: int, other: str) -> None:
    gone = np.flatnonzero(left < 1)
    if len(gone):
        row = trace.source_row[gone[0]]
        raise TraceError(f"{trace.name}: the {other} of row {row} alone fills max_length={limit}; drop such rows")


def _clip_ids(ids: BlockIds | None, prompt_tokens: np.ndarray) -> BlockIds | None:
    """Only the ids of which some token is left."""
    if ids is None:
        return None
    rows = np.repeat(np.arange(len(ids)), ids.counts)
    if ids.widths is None:
        starts = (np.arange(len(ids.values)) - ids.offsets[:-1][rows]) * ids.width
    else:
        ends = np.cumsum(ids.widths)
        starts = ends - ids.widths - np.concatenate([[0], ends])[ids.offsets[:-1]][rows]
    keep = starts < prompt_tokens[rows]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[keep], minlength=len(ids)))])
    widths = None if ids.widths is None else np.minimum(ids.widths, prompt_tokens[rows] - starts)[keep]
    return BlockIds(offsets, ids.values[keep], ids.width, widths)


def scale_time(trace: Trace, scale: float, think_scale: float | None = None) -> Trace:
    """Recorded times multiplied by `scale` (0.5 is twice as fast); think times by `think_scale`, or `scale` too."""
    for name, value in (("time_scale", scale), ("think_scale", think_scale)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise ConfigError(f"workload.{name}={value}, expected a finite number above 0")
    trace = replace(trace, arrival_ns=_times(trace.arrival_ns, scale))
    if trace.think_ns is None:
        return trace
    think = np.where(trace.think_ns < 0, -1, _times(trace.think_ns, scale if think_scale is None else think_scale))
    return replace(trace, think_ns=think)


def _times(ns: np.ndarray, scale: float) -> np.ndarray:
    return ns if scale == 1 else np.rint(ns * scale).astype(np.int64)


def scale_for_rate(trace: Trace, rate: float) -> float:
    """The time scale at which requests arrive at `rate` a second on average."""
    if not (np.isfinite(rate) and rate > 0):
        raise ConfigError(f"workload.target_rate={rate}, expected a finite number above 0")
    if not trace.span_s:
        raise ConfigError(f"workload.target_rate={rate}: {trace.name} arrives all at once, no scale gives it a rate")
    return trace.mean_rate / rate


def spread_ticks(trace: Trace, width_s: float, rng: np.random.Generator) -> Trace:
    """Spreads requests of one quantised stamp over `width_s` from it, uniformly and in file order."""
    stamps, tick = np.unique(trace.arrival_ns, return_inverse=True)
    gap_s = float(np.diff(stamps).min()) / NS if len(stamps) > 1 else float("inf")
    if not 0 < width_s <= gap_s:
        raise ConfigError(f"workload.jitter_s={width_s}, expected above 0, at most {gap_s:g}, the least gap of stamps")
    draws = rng.random(len(trace)) * to_ns(width_s)
    within = np.lexsort((draws, tick))  # rows of a tick stand together, so their sorted draws go to them in order
    spread = trace.arrival_ns + draws[within].astype(np.int64)
    return replace(trace, arrival_ns=spread).counted(jittered=len(trace))


def rearrive(trace: Trace, arrivals: Arrivals, rng: np.random.Generator) -> Trace:
    """Arrivals from another process: each session (or request without one) starts when the process says, in order of
    its first recorded arrival, and keeps its inner distances."""
    leader = leaders(trace)
    starts, place = np.unique(leader, return_inverse=True)
    times = first_arrivals(arrivals, rng, len(starts))
    moved = trace.arrival_ns + (np.rint(times * NS).astype(np.int64) - trace.arrival_ns[starts])[place]
    moved_trace = replace(trace, arrival_ns=moved, stamped=_stamped(trace))
    return replace(moved_trace.sorted(), provenance=trace.provenance.assuming(f"arrivals from {arrivals}"))


def _stamped(trace: Trace) -> np.ndarray | None:
    """First turns now have an arrival; tied ones that had none still have none."""
    if trace.stamped is None:
        return None
    tied = np.zeros(len(trace), dtype=bool) if trace.after is None else trace.after >= 0
    stamped: np.ndarray = trace.stamped | ~tied
    return None if stamped.all() else stamped


def untie(trace: Trace) -> Trace:
    """Every turn at its recorded arrival, whether or not the turn before it has ended.

    Without block ids the turns of a session then share nothing: what a prompt contains is not there yet.
    """
    if trace.stamped is not None and not trace.stamped.all():
        row = trace.source_row[np.argmin(trace.stamped)]
        raise ConfigError(f"{trace.name}: row {row} has no recorded arrival; it can only follow a turn (sessions=tied)")
    return replace(trace, after=None, think_ns=None, also_after=None, grows=None)


def grow_sessions(trace: Trace) -> Trace:
    """Declares that a tied turn's prompt contains the turn before and its output.

    Lengths decide: a prompt shorter than that (a compacted history) begins anew, and is counted; so does the first turn
    of a session that follows another session's turn.
    """
    if trace.ids is not None:
        raise ConfigError(f"{trace.name} has block ids, which say what turns contain; turns_contain_output needs none")
    if trace.session is None or trace.after is None:
        raise ConfigError(f"{trace.name} has no turns tied by a delay to the one before, as turns_contain_output needs")
    tied = trace.after >= 0
    before = trace.after[tied]
    contains = trace.prompt_tokens[tied] >= trace.prompt_tokens[before] + trace.output_tokens[before]
    grows = np.zeros(len(trace), dtype=bool)
    grows[tied] = contains & (trace.session.codes[tied] == trace.session.codes[before])
    return replace(trace, grows=grows).counted(histories_begun_anew=int(tied.sum() - grows.sum()))
