"""Workloads as a configuration names them: a recorded file, chosen from and scaled, and its source for the engine.

Knows the order in which options apply; the work is done in readers/, select.py, replicate.py and source.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, to_ns
from schedlab.framework.source import Source
from schedlab.workloads import select
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.source import SessionSource, StreamSource, Terms, Until
from schedlab.workloads.trace import Provenance, Trace

EMBEDDED = "embedded:"


class Workload(Protocol):
    """What an experiment needs of a workload. `seed` 0 is the workload as it is, 1, 2, … are replicates of it."""

    name: str

    def load(self, seed: int = 0) -> Trace:
        """All requests, in memory."""

    def source(self, max_model_len: int, slo: SLO | None = None, seed: int = 0, **terms: object) -> Source:
        """The requests for one run of an engine."""

    def describe(self, seed: int = 0) -> str:
        """One line: requests, span, mean rate, and what was assumed or left out."""


@dataclass(kw_only=True)
class Offered:
    """What every workload has: what its requests carry beside their lengths, and how they reach the engine.

    max_tokens   : cap on every output, null for the model's limit
    slo_classes  : named objectives that rows or clients may refer to
    preparation_s, delivery_s : constant stages before a request is visible and after its last token
    stop_after_s : nothing arrives from then on
    """

    name: str
    max_tokens: int | None = None
    slo_classes: Mapping[str, SLO] = field(default_factory=dict)
    preparation_s: float = 0.0
    delivery_s: float = 0.0
    stop_after_s: float | None = None

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
            source = make_source(trace, self.terms(slo, prompt_seed, vocab_size, trace.provenance))
        else:
            source = StreamSource(parts, self.terms(slo, prompt_seed, vocab_size))
        return source if self.stop_after_s is None else Until(source, to_ns(self.stop_after_s))

    def terms(
        self, slo: SLO | None, prompt_seed: int, vocab_size: int | None, provenance: Provenance | None = None
    ) -> Terms:
        own_seed = provenance.prompt_seed if provenance else None
        return Terms(
            slo=slo, slo_classes=self.slo_classes, max_tokens=self.max_tokens,
            prompt_seed=prompt_seed if own_seed is None else own_seed, vocab_size=vocab_size,
            preparation_ns=to_ns(self.preparation_s), delivery_ns=to_ns(self.delivery_s),
        )  # fmt: skip

    def describe(self, seed: int = 0, trace: Trace | None = None) -> str:
        """One line: requests, span, mean rate, and what was assumed or left out."""
        return describe(self.load(seed) if trace is None else trace)


@dataclass(kw_only=True)
class Recorded(Offered):
    """A recorded trace.

    path, format, obtain : the file (`embedded:NAME` for one in the package), its format (None: by its keys), and where
                           to get it, said when `path` is missing
    time_unit, block_size, hash_scope, keep_failed, strict, columns, tokenizer : see `ReadOptions`
    window        : [start, stop) recorded seconds; applies before max_requests
    max_requests  : the first so many requests
    time_scale    : multiplies recorded times: 0.5 is twice as fast; think_scale: think times, null as time_scale
    sessions      : `tied` turns wait for the turn before where the trace has a think time, `recorded` ones do not
    turns_contain_output : declares that a turn's prompt contains the turn before and its output (traces without ids)
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
    columns: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str | None = None
    window: Sequence[float] | None = None
    max_requests: int | None = None
    time_scale: float = 1.0
    think_scale: float | None = None
    sessions: Literal["tied", "recorded"] = "tied"
    turns_contain_output: bool = False

    def __post_init__(self) -> None:
        if self.sessions not in ("tied", "recorded"):
            raise ConfigError(f"workload.sessions={self.sessions}, expected tied or recorded")

    def load(self, seed: int = 0) -> Trace:
        trace = self.read()
        if self.window is not None:
            trace = select.window(trace, *self._pair(self.window))
        if self.max_requests is not None:
            trace = select.first_requests(trace, self.max_requests)
        trace = select.scale_time(trace, self.time_scale, self.think_scale)
        return self._sessions(trace)

    def read(self) -> Trace:
        """The whole file, before anything is chosen."""
        options = ReadOptions(
            time_unit=self.time_unit, block_size=self.block_size, hash_scope=self.hash_scope, strict=self.strict,
            keep_failed=self.keep_failed, columns=dict(self.columns), tokenizer=self.tokenizer,
        )  # fmt: skip
        return read(self._file(), self.format, options).with_columns(name=self.name)

    def _file(self) -> Path:
        if self.path is None:
            where = f"; obtain the file from {self.obtain}" if self.obtain else ""
            raise ConfigError(f"workload {self.name} needs workload.path{where}")
        if self.path.startswith(EMBEDDED):
            return Path(str(files("schedlab.workloads") / "data" / self.path.removeprefix(EMBEDDED)))
        path = Path(self.path).expanduser()
        if not path.exists():
            where = f"; obtain it from {self.obtain}" if self.obtain else ""
            raise ConfigError(f"workload.path={self.path}: no such file{where}")
        return path

    @staticmethod
    def _pair(window: Sequence[float]) -> tuple[float, float]:
        if len(window) != 2:
            raise ConfigError(f"workload.window={list(window)}, expected [start, stop] in seconds")
        return float(window[0]), float(window[1])

    def _sessions(self, trace: Trace) -> Trace:
        if self.sessions == "recorded":
            trace = select.untie(trace)
        if self.turns_contain_output:
            trace = select.grow_sessions(trace)
        return trace


def make_source(trace: Trace, terms: Terms) -> Source:
    """Open loop, or with turns that wait for the one before where the trace ties them."""
    if trace.after is not None and (trace.after >= 0).any():
        return SessionSource(trace, terms)
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
    if trace.session is not None and trace.turn is not None and (loose := int((trace.turn > 0).sum()) - tied) > 0:
        parts.append(f"{loose:,} later turns arrive as stamped, whether or not the turn before has ended")
    parts += [f"{number:,} rows {name.replace('_', ' ')}" for name, number in trace.provenance.counts.items()]
    assumed = f" (assumed: {'; '.join(trace.provenance.assumed)})" if trace.provenance.assumed else ""
    return ", ".join(parts) + assumed
