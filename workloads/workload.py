"""Workloads as a configuration names them: a recorded file, chosen from and scaled, and its source for the engine.

The work is done in readers/, select.py, replicate.py and source.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, to_ns
from schedlab.framework.source import Source
from schedlab.workloads import select
from schedlab.workloads.arrivals import Arrivals
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.patience import Clients, Patience, check_names
from schedlab.workloads.readers import read
from schedlab.workloads.replicate import bootstrap, disjoint_part, shifted_window
from schedlab.workloads.soundness import check
from schedlab.workloads.source import SessionSource, StreamSource, Terms, Until
from schedlab.workloads.streams import stream
from schedlab.workloads.trace import Provenance, Trace

EMBEDDED = "embedded:"


class Workload(Protocol):
    """What an experiment needs of a workload. `seed` 0 is the workload as it is, 1, 2, … are replicates of it."""

    name: str

    def load(self, seed: int = 0) -> Trace:
        """All requests, in memory."""

    def source(
        self, max_model_len: int, slo: SLO | None = None, seed: int = 0, *,
        vocab_size: int | None = None, trace: Trace | None = None,
    ) -> Source:  # fmt: skip
        """The requests for one run of an engine; see `Offered.source`."""

    def describe(self, seed: int = 0, trace: Trace | None = None) -> str:
        """One line: requests, span, mean rate, and what was assumed or left out."""


@dataclass(kw_only=True)
class Offered:
    """What every workload has: what its requests carry beside their lengths, and how they reach the engine.

    max_tokens   : cap on every output, null for the model's limit
    slo_classes  : named objectives that rows or clients may refer to
    stop_after_s : nothing arrives from then on
    on_failure   : `continue`: what waits for a request arrives whatever became of that one; `abandon`: never, if that
                   one was rejected, aborted or failed
    patience     : how long clients wait and how often they try again, keys of `Patience`; null: for ever, once
    """

    name: str
    max_tokens: int | None = None
    slo_classes: Mapping[str, SLO] = field(default_factory=dict)
    stop_after_s: float | None = None
    on_failure: str = "continue"
    patience: Mapping[str, Any] | Patience | None = None

    def load(self, seed: int = 0) -> Trace:
        """All requests, in memory."""
        raise NotImplementedError

    def parts(self, seed: int) -> Iterable[Trace] | None:
        """The requests in parts that are made as they are needed; None where they must be known at once."""
        return None

    def source(
        self, max_model_len: int, slo: SLO | None = None, seed: int = 0, *,
        prompt_seed: int = 0, vocab_size: int | None = None, trace: Trace | None = None,
    ) -> Source:  # fmt: skip
        """The source of one run. `trace` saves loading again where `load(seed)` was called before.

        `slo` judges rows that name no class. `vocab_size` is the executor's, where it has tokens.
        """
        parts = self.parts(seed) if trace is None else None
        if parts is None:
            trace = self.load(seed) if trace is None else trace
            terms = self.terms(slo, prompt_seed, vocab_size, trace.provenance)
            source = make_source(trace, terms, self._abandons())
        else:
            source = StreamSource(parts, self.terms(slo, prompt_seed, vocab_size))
        clients = self.impatient()
        if clients.facts and trace is not None:
            check_names(trace)
        source = clients.around(source, seed)
        return source if self.stop_after_s is None else Until(source, to_ns(self.stop_after_s))

    def impatient(self) -> Clients:
        """How long clients wait, and which try again."""
        try:
            return Clients(Patience.of(self.patience))
        except ConfigError as error:
            raise ConfigError(f"workload.{error}") from None

    def _abandons(self) -> bool:
        one_of("on_failure", self.on_failure, "continue", "abandon")
        return self.on_failure == "abandon"

    def terms(
        self, slo: SLO | None, prompt_seed: int, vocab_size: int | None, provenance: Provenance | None = None
    ) -> Terms:
        own_seed = provenance.prompt_seed if provenance else None
        return Terms(
            slo=slo, slo_classes=self.slo_classes, max_tokens=self.max_tokens,
            prompt_seed=prompt_seed if own_seed is None else own_seed, vocab_size=vocab_size,
        )  # fmt: skip

    def describe(self, seed: int = 0, trace: Trace | None = None) -> str:
        """One line: requests, span, mean rate, and what was assumed or left out."""
        return describe(self.load(seed) if trace is None else trace)


@dataclass(kw_only=True)
class Recorded(Offered):
    """A recorded trace.

    path, format, obtain : the file (`embedded:NAME` for one in the package), its format (None: by its keys), and where
                           to get it, said when `path` is missing
    time_unit, block_size, hash_scope, keep_failed, strict, columns, tokenizer, priority_order, max_span_s, gap : see
                           `ReadOptions`
    window          : [start, stop) recorded seconds
    sample_sessions : a share of the sessions, each kept whole
    max_requests    : the first so many requests; more than the trace has only with `repeat`
    max_length, too_long : what becomes of requests of more tokens, prompt and output together: error, drop,
                      clip_prompt or clip_output. Without max_length the engine rejects what can never fit
    time_scale, target_rate : recorded times multiplied (0.5 is twice as fast), or scaled to a mean rate
    think_scale     : think times multiplied; null: as the times
    jitter_s        : spreads requests of one quantised stamp over so many seconds
    arrivals        : another arrival process in place of the recorded one; sessions stay whole
    sessions        : `tied` turns wait for the turn before where the trace has a think time, `recorded` do not
    turns_contain_output : declares that a turn's prompt contains the turn before and its output (traces without ids)
    replicates      : what seeds from 1 on draw: `windows`, the next disjoint part of the file after that chosen by
                      window or max_requests, or `bootstrap`, time blocks (of `bootstrap_block_s`) with replacement;
                      null: windows where the file is cut, else bootstrap. With `arrivals`, new arrivals
    draw_seed       : of sample_sessions and jitter, which are the same in all replicates
    """

    name: str = "trace"
    path: str | None = None
    format: str | None = None
    obtain: str = ""
    time_unit: str | None = None
    block_size: int | None = None
    hash_scope: str | None = None
    keep_failed: bool = False
    strict: bool = False
    columns: Mapping[str, str | None] = field(default_factory=dict)
    priority_order: str = "larger_first"
    max_span_s: float = 86_400.0
    gap: str = "stamped"
    tokenizer: str | None = None
    window: Sequence[float] | None = None
    sample_sessions: float | None = None
    max_requests: int | None = None
    repeat: bool = False
    max_length: int | None = None
    too_long: str = "error"
    time_scale: float = 1.0
    target_rate: float | None = None
    think_scale: float | None = None
    jitter_s: float | None = None
    arrivals: Arrivals | None = None
    sessions: str = "tied"
    turns_contain_output: bool = False
    replicates: str | None = None
    bootstrap_block_s: float | None = None
    draw_seed: int = 0

    def __post_init__(self) -> None:
        one_of("sessions", self.sessions, "tied", "recorded")
        one_of("too_long", self.too_long, "error", "drop", "clip_prompt", "clip_output")
        one_of("replicates", self.replicates, None, "windows", "bootstrap")
        if self.target_rate is not None and self.time_scale != 1:
            raise ConfigError("workload.time_scale and workload.target_rate both scale times; set one")
        if self.window is not None and len(self.window) != 2:
            raise ConfigError(f"workload.window={list(self.window)}, expected [start, stop] in seconds")

    def load(self, seed: int = 0) -> Trace:
        if seed < 0:
            raise ConfigError(f"seed={seed}, expected 0 (as recorded), 1, 2, …")
        trace = self._scaled(self._chosen(self.read(), seed), seed)
        if self.sessions == "recorded":
            trace = select.untie(trace)
        return select.grow_sessions(trace) if self.turns_contain_output else trace

    def _chosen(self, trace: Trace, seed: int) -> Trace:
        """The rows of this replicate."""
        is_cut = self.window is not None or self.max_requests is not None
        how = self.replicates or ("windows" if is_cut else "bootstrap")
        part = seed if how == "windows" and self.arrivals is None else 0
        if self.window is not None:
            start, stop = float(self.window[0]), float(self.window[1])
            trace = select.window(trace, *shifted_window((start, stop), part, trace.span_s) if part else (start, stop))
            part = 0
        if self.sample_sessions is not None:
            trace = select.sample_sessions(trace, self.sample_sessions, stream(self.draw_seed, "sessions"))
        if self.max_requests is not None and part:
            trace = disjoint_part(trace, part, self.max_requests)
        elif self.max_requests is not None:
            trace = select.first_requests(trace, self.max_requests, self.repeat)
        elif part:
            raise ConfigError("workload.replicates=windows needs workload.window or .max_requests to cut the trace")
        if self.max_length is not None:
            trace = select.limit_length(trace, self.max_length, self.too_long)
        if seed and how == "bootstrap" and self.arrivals is None:
            return bootstrap(trace, stream(seed, "bootstrap"), self.bootstrap_block_s)
        return trace

    def _scaled(self, trace: Trace, seed: int) -> Trace:
        """With the times that are offered."""
        if self.jitter_s is not None:
            trace = select.spread_ticks(trace, self.jitter_s, stream(self.draw_seed, "jitter"))
        if self.arrivals is not None:
            trace = select.rearrive(trace, self.arrivals, stream(seed, "arrivals"))
        elif trace.stamped is not None and not trace.stamped.any():
            raise ConfigError(f"workload {self.name} has lengths but no arrival times; set workload.arrivals")
        scale = self.time_scale if self.target_rate is None else select.scale_for_rate(trace, self.target_rate)
        return select.scale_time(trace, scale, self.think_scale)

    def read(self) -> Trace:
        """The whole file, before anything is chosen."""
        named = {ours: name for ours, name in self.columns.items() if name is not None}
        try:
            options = ReadOptions(
                time_unit=self.time_unit, block_size=self.block_size, hash_scope=self.hash_scope, strict=self.strict,
                keep_failed=self.keep_failed, columns=named, tokenizer=self.tokenizer,
                priority_order=self.priority_order, max_span_s=self.max_span_s, gap=self.gap,
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"workload.{error}") from None
        return _traces.read(self._file(), self.format, options).with_columns(name=self.name)

    def _file(self) -> Path:
        if self.path is None:
            where = f"; obtain the file from {self.obtain}" if self.obtain else ""
            raise ConfigError(f"workload {self.name} needs workload.path{where}")
        if self.path.startswith(EMBEDDED):
            return embedded_file(self.path)
        path = Path(self.path).expanduser()
        if not path.exists():
            where = f"; obtain it from {self.obtain}" if self.obtain else ""
            raise ConfigError(f"workload.path={self.path}: no such file{where}")
        return path


class Traces:
    """Reads files, and keeps the last `kept` traces for a process that runs the same ones again and again."""

    def __init__(self, kept: int = 0) -> None:
        self._kept = kept
        self._found: dict[object, Trace] = {}

    def read(self, path: Path, format: str | None, options: ReadOptions) -> Trace:
        if not self._kept:
            return read(path, format, options)
        key = (str(path), format, repr(options), _look(path))
        trace = self._found.pop(key, None) or read_only(read(path, format, options))
        self._found[key] = trace
        while len(self._found) > self._kept:
            del self._found[next(iter(self._found))]
        return trace


def keep_traces(number: int) -> None:
    """From now on this process keeps so many traces as they were read, whatever is then chosen from them."""
    global _traces
    _traces = Traces(number)


_traces = Traces()


def _look(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of what a trace may consist of: its folder's files, for some formats have several."""
    folder = path if path.is_dir() else path.parent
    found = {file.name: file.stat() for file in folder.iterdir() if file.is_file()}
    return tuple((name, found[name].st_size, found[name].st_mtime_ns) for name in sorted(found))


def read_only(trace: Trace) -> Trace:
    """The same, with arrays that nobody can change for others."""
    for _, column in trace.columns():
        parts = (column,) if isinstance(column, np.ndarray) else column.arrays
        for part in parts:
            part.flags.writeable = False
    return trace


def embedded_file(name: str) -> Path:
    """`embedded:NAME` in the package."""
    return Path(str(files("schedlab.workloads") / "data" / name.removeprefix(EMBEDDED)))


def one_of(name: str, value: str | None, *allowed: str | None) -> None:
    if value not in allowed:
        expected = ", ".join("null" if a is None else a for a in allowed)
        raise ConfigError(f"workload.{name}={value}, expected one of {expected}")


def make_source(trace: Trace, terms: Terms, abandon: bool = False) -> Source:
    """Open loop, or with requests that wait for others where the trace ties them; see `SessionSource`."""
    check(trace)
    if trace.after is not None and (trace.after >= 0).any():
        return SessionSource(trace, terms, abandon)
    return StreamSource(trace.chunks(), terms)


def describe(trace: Trace) -> str:
    """One line: requests, span and mean rate as they will be offered, ties, what was assumed, what was left out."""
    rate = trace.mean_rate
    parts = [
        f"{trace.name}: {len(trace):,} requests over {trace.span_s:,.1f} s",
        f"{rate:.3g} a second on average" if np.isfinite(rate) else "all at once",
    ]
    tied = 0 if trace.after is None else int((trace.after >= 0).sum())
    if tied:
        parts.append(f"{tied:,} turns wait for the turn before")
    joins = 0 if trace.also_after is None else int((trace.also_after.counts > 0).sum())
    if joins:
        parts.append(f"{joins:,} of them for several requests")
    if trace.session is not None and trace.turn is not None and (loose := int((trace.turn > 0).sum()) - tied) > 0:
        parts.append(f"{loose:,} later turns arrive as stamped, whether or not the turn before has ended")
    parts += [f"{number:,} rows {name.replace('_', ' ')}" for name, number in trace.provenance.counts.items()]
    assumed = f" (assumed: {'; '.join(trace.provenance.assumed)})" if trace.provenance.assumed else ""
    return ", ".join(parts) + assumed
