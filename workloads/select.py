"""Choosing and scaling rows of a trace. Every function returns a new trace and counts what it left out or changed.

Knows no file and no arrival process; replicates are in replicate.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import to_ns
from schedlab.workloads.builder import rebase
from schedlab.workloads.trace import Trace


def first_requests(trace: Trace, count: int) -> Trace:
    """The first `count` requests in order of arrival."""
    if count < 1:
        raise ConfigError(f"max_requests={count}, expected at least 1")
    return trace.where(np.arange(len(trace)) < count, beyond_max_requests=0)


def window(trace: Trace, start_s: float, stop_s: float) -> Trace:
    """Requests arriving in [start, stop) recorded seconds from the trace's zero, timed from the first of them again."""
    if not 0 <= start_s < stop_s:
        raise ConfigError(f"window=[{start_s}, {stop_s}], expected 0 <= start < stop")
    inside = (trace.arrival_ns >= to_ns(start_s)) & (trace.arrival_ns < to_ns(stop_s))
    if not inside.any():
        raise ConfigError(f"window=[{start_s}, {stop_s}] holds no request; {trace.name} spans {trace.span_s:.1f} s")
    return rebase(trace.where(inside, outside_window=0))


def scale_time(trace: Trace, scale: float, think_scale: float | None = None) -> Trace:
    """Recorded times multiplied by `scale` (0.5 is twice as fast); think times by `think_scale`, or `scale` too."""
    for name, value in (("time_scale", scale), ("think_scale", think_scale)):
        if value is not None and not (np.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value}, expected a finite number above 0")
    trace = replace(trace, arrival_ns=_times(trace.arrival_ns, scale))
    if trace.think_ns is None:
        return trace
    think = np.where(trace.think_ns < 0, -1, _times(trace.think_ns, scale if think_scale is None else think_scale))
    return replace(trace, think_ns=think)


def _times(ns: np.ndarray, scale: float) -> np.ndarray:
    return ns if scale == 1 else np.rint(ns * scale).astype(np.int64)


def untie(trace: Trace) -> Trace:
    """Every turn at its recorded arrival, whether or not the turn before it has ended.

    Without block ids the turns of a session then share nothing: what a prompt contains is not there yet.
    """
    if trace.stamped is not None and not trace.stamped.all():
        row = trace.source_row[np.argmin(trace.stamped)]
        raise ConfigError(f"{trace.name}: row {row} has no recorded arrival; it can only follow a turn (sessions=tied)")
    return replace(trace, after=None, think_ns=None, grows=None)


def grow_sessions(trace: Trace) -> Trace:
    """Declares that a tied turn's prompt contains the turn before and its output.

    Lengths decide: a prompt shorter than that (a compacted history) begins anew, and is counted.
    """
    if trace.ids is not None:
        raise ConfigError(f"{trace.name} has block ids, which say what turns contain; turns_contain_output needs none")
    if trace.session is None or trace.after is None:
        raise ConfigError(f"{trace.name} has no turns tied by a delay to the one before, as turns_contain_output needs")
    tied = trace.after >= 0
    before = trace.after[tied]
    grows = np.zeros(len(trace), dtype=bool)
    grows[tied] = trace.prompt_tokens[tied] >= trace.prompt_tokens[before] + trace.output_tokens[before]
    return replace(trace, grows=grows).counted(histories_begun_anew=int(tied.sum() - grows.sum()))
