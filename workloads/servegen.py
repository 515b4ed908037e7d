"""Traffic from ServeGen's client data (github.com/alibaba/ServeGen): many clients, each with its own bursts.

A client is `PREFIX-trace.csv`, windows of 600 s with the rate and the Gamma or Weibull shape of its gaps, and
`PREFIX-dataset.json`, windows of 21,600 s with the probabilities of its lengths; either may be gzip. In a window the
process is stationary: its first gap is what is left of one, so that bursty windows keep their rate. The data has the
two lengths apart, so they are drawn independently; of multimodal clients the prompt is the sum of the text, image,
audio and video tokens.
"""

from __future__ import annotations

import ast
import csv
import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.request import NS
from schedlab.workloads.files import at_row, open_text, shown
from schedlab.workloads.populations import merge
from schedlab.workloads.streams import stream
from schedlab.workloads.trace import Labels, Provenance, Trace, concatenate
from schedlab.workloads.workload import Offered, one_of

INPUTS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
OUTPUT = "output_tokens"
PATTERNS = ("Gamma", "Weibull")


@dataclass(frozen=True, slots=True)
class Window:
    """`rate` requests a second from `start_s` on, with gaps of `pattern` and `shape`; rate 0 is silence.

    The scale in the data is that of a fit; ours follows from rate and shape.
    """

    start_s: float
    rate: float
    pattern: str
    shape: float

    def gaps(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """Gaps between arrivals, float64 [n], mean 1."""
        if self.pattern == "Gamma":
            return rng.gamma(self.shape, 1 / self.shape, n)
        return rng.weibull(self.shape, n) / math.gamma(1 + 1 / self.shape)

    def first_gap(self, rng: np.random.Generator) -> float:
        """What is left, at any moment, of the gap that runs then: a part of a gap drawn by its length."""
        if self.pattern == "Gamma":
            length = rng.gamma(self.shape + 1, 1 / self.shape)
        else:
            length = rng.gamma(1 + 1 / self.shape) ** (1 / self.shape) / math.gamma(1 + 1 / self.shape)
        return length * rng.random()


@dataclass(frozen=True, slots=True)
class Choices:
    """Token counts and their probabilities."""

    tokens: np.ndarray
    cumulative: np.ndarray

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        place = np.searchsorted(self.cumulative, rng.random(n), side="right")
        drawn: np.ndarray = self.tokens[np.minimum(place, len(self.tokens) - 1)]
        return drawn


@dataclass(frozen=True, slots=True)
class ServeGenClient:
    """One client's windows and length distributions by the start of their window."""

    name: str
    windows: tuple[Window, ...]
    width_s: float
    lengths: dict[float, dict[str, Choices]]

    @classmethod
    def load(cls, prefix: str) -> ServeGenClient:
        windows = read_windows(_existing(f"{prefix}-trace.csv"))
        lengths = read_lengths(_existing(f"{prefix}-dataset.json"))
        width = windows[1].start_s - windows[0].start_s if len(windows) > 1 else 600.0
        return cls(Path(prefix).name, windows, width, lengths)

    def between(self, start_s: float, stop_s: float) -> list[Window]:
        return [w for w in self.windows if start_s <= w.start_s < stop_s]

    def parts(self, start_s: float, stop_s: float, factor: float, seed: int) -> Iterator[Trace]:
        """Requests of each active window, `factor` times as many; times from `start_s`."""
        arrivals, lengths = stream(seed, self.name, "arrivals"), stream(seed, self.name, "lengths")
        for window in self.between(start_s, stop_s):
            if not window.rate:
                continue
            times = self._times(window, arrivals, factor)
            times = times[times + window.start_s < stop_s]
            if len(times):
                prompt, output = self._lengths(window, lengths, len(times))
                arrival = np.rint((window.start_s - start_s + times) * NS).astype(np.int64)
                client = Labels(np.zeros(len(times), dtype=np.int64), (self.name,))
                yield Trace(self.name, np.arange(len(times)), arrival, prompt, output, client=client)

    def _times(self, window: Window, rng: np.random.Generator, factor: float) -> np.ndarray:
        """Arrivals in a window, seconds from its start."""
        rate = window.rate * factor
        last = window.first_gap(rng) / rate
        parts = [np.array([last])]
        while last < self.width_s:
            parts.append(last + np.cumsum(window.gaps(rng, 1024)) / rate)
            last = float(parts[-1][-1])
        times = np.concatenate(parts)
        return times[times < self.width_s]

    def _lengths(self, window: Window, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        starts = sorted(self.lengths)
        fields = self.lengths[starts[bisect_right(starts, window.start_s) - 1]]
        inputs = [fields[name] for name in INPUTS if name in fields]
        if not inputs or OUTPUT not in fields:
            raise TraceError(f"{self.name}: active at {window.start_s:g} s, but its data has no lengths for then")
        prompt = sum(choices.draw(rng, n) for choices in inputs)
        return np.asarray(prompt), fields[OUTPUT].draw(rng, n)


def _existing(path: str) -> Path:
    for candidate in (Path(path), Path(path + ".gz")):
        if candidate.exists():
            return candidate
    raise TraceError(f"{path}: no such file, nor {path}.gz; a client needs its trace.csv and its dataset.json")


def read_windows(path: Path) -> tuple[Window, ...]:
    """A client's trace.csv: t, rate, cv, pattern, shape, scale, without a header."""
    windows = []
    with open_text(path) as text:
        for row, cells in enumerate(csv.reader(text)):
            try:
                start, rate, _, pattern, shape, _ = cells
                window = Window(float(start), float(rate), pattern, float(shape))
            except ValueError:
                raise at_row(path, row, row + 1, f"{cells}, expected t, rate, cv, pattern, shape, scale") from None
            _check(path, row, window)
            windows.append(window)
    if not windows:
        raise TraceError(f"{path}: has no windows")
    return tuple(windows)


def _check(path: Path, row: int, window: Window) -> None:
    numbers = (window.start_s, window.rate, window.shape)
    if not all(np.isfinite(n) and n >= 0 for n in numbers):
        raise at_row(path, row, row + 1, f"{window}, expected finite numbers of at least 0")
    if window.rate and (window.pattern not in PATTERNS or not window.shape):
        expected = f"{' or '.join(PATTERNS)} with a shape"
        raise at_row(path, row, row + 1, f"an active window of pattern {shown(window.pattern)}, expected {expected}")


def read_lengths(path: Path) -> dict[float, dict[str, Choices]]:
    """A client's dataset.json: window start -> field -> distribution; fields without entries are left out."""
    with open_text(path) as text:
        try:
            data = json.load(text)
            return {float(start): _fields(fields) for start, fields in data.items()}
        except (ValueError, TypeError, AttributeError, SyntaxError, MemoryError, RecursionError) as error:
            raise TraceError(f"{path}: not a map of windows to maps of token counts: {error}") from None


def _fields(fields: dict[str, str]) -> dict[str, Choices]:
    """The maps are Python literals inside strings."""
    maps = {name: ast.literal_eval(fields[name]) for name in (*INPUTS, OUTPUT) if name in fields}
    return {name: _choices(name, chances) for name, chances in maps.items() if chances}


def _choices(name: str, chances: dict[Any, float]) -> Choices:
    tokens, weights = np.array(list(chances)), np.array(list(chances.values()), dtype=float)
    whole = tokens.dtype.kind == "i" and (tokens >= 0).all()
    if not whole or not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() <= 0:
        raise ValueError(f"{name} has counts or probabilities that are negative, not finite or no numbers")
    return Choices(tokens.astype(np.int64), np.cumsum(weights) / weights.sum())


@dataclass(kw_only=True)
class ServeGen(Offered):
    """Clients of ServeGen together, from `start_s` of their data for `duration_s`.

    clients : prefixes of their files.  target_rate : requests a second of all together, on average over the data of
    that time; null: as in the data. Clients keep their shares, and draws of one do not depend on the others.
    zero_lengths : what becomes of lengths of 0 tokens, which some clients' data has: `one` token, counted, or `error`.
    """

    name: str = "servegen"
    clients: Sequence[str]
    start_s: float = 0.0
    duration_s: float = 3600.0
    target_rate: float | None = None
    zero_lengths: str = "one"

    def __post_init__(self) -> None:
        one_of("zero_lengths", self.zero_lengths, "one", "error")
        if not self.clients:
            raise ConfigError(f"workload {self.name} needs workload.clients, a list of PREFIX of PREFIX-trace.csv")
        if not 0 <= self.start_s < math.inf:
            raise ConfigError(f"workload.start_s={self.start_s}, expected a finite number of at least 0")
        for name, value in (("duration_s", self.duration_s), ("target_rate", self.target_rate)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"workload.{name}={value}, expected a finite number above 0")

    def parts(self, seed: int) -> Iterator[Trace]:
        stop_s = self.start_s + self.duration_s
        clients = [ServeGenClient.load(prefix) for prefix in self.clients]
        rate = sum(w.rate * c.width_s for c in clients for w in c.between(self.start_s, stop_s)) / self.duration_s
        if not rate:
            raise ConfigError(f"workload {self.name}: no client is active from {self.start_s:g} to {stop_s:g} s")
        factor = 1.0 if self.target_rate is None else self.target_rate / rate
        offered = 0
        for part in merge([client.parts(self.start_s, stop_s, factor, seed) for client in clients]):
            yield self._filled(replace(part, name=self.name, source_row=np.arange(offered, offered + len(part))))
            offered += len(part)

    def _filled(self, part: Trace) -> Trace:
        """Without lengths of 0 tokens, which no engine can compute."""
        prompt, output = np.maximum(part.prompt_tokens, 1), np.maximum(part.output_tokens, 1)
        raised = (prompt != part.prompt_tokens) | (output != part.output_tokens)
        if self.zero_lengths == "error" and raised.any():
            row = int(np.argmax(raised))
            client, lengths = part.client and part.client[row], (part.prompt_tokens[row], part.output_tokens[row])
            found = f"client {client} has a prompt of {lengths[0]} and an output of {lengths[1]} tokens"
            raise TraceError(f"workload {self.name}: row {part.source_row[row]}: {found}, expected at least 1 of each")
        filled = part.with_columns(prompt_tokens=prompt, output_tokens=output)
        return filled.counted(zero_lengths_raised_to_1=int(raised.sum()))

    def load(self, seed: int = 0) -> Trace:
        parts = list(self.parts(seed))
        if not parts:
            raise ConfigError(f"workload {self.name}: nothing was drawn in {self.duration_s:g} s")
        counts = sum((Counter(part.provenance.counts) for part in parts), Counter[str]())
        return concatenate(parts).with_columns(provenance=Provenance(counts=counts))
