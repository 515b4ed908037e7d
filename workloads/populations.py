"""Synthetic traffic: who sends what, drawn from independent named streams, made in parts as it is needed.

Arrivals, lengths, prefixes and think times each draw from a stream of their own, named by the client, so that adding a
client or a request leaves the draws of the others unchanged, and no policy can shift an arrival.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, to_ns
from schedlab.workloads.arrivals import CHUNK, Arrivals, Poisson
from schedlab.workloads.lengths import Lengths, Uniform
from schedlab.workloads.patience import Clients, Patience
from schedlab.workloads.prefixes import PrefixSpace, SystemPrompts
from schedlab.workloads.streams import stream
from schedlab.workloads.trace import Labels, Provenance, Trace, concatenate
from schedlab.workloads.workload import Offered


@dataclass
class Client:
    """One sender: its process, its lengths, and what its requests carry. `prefixes` are shared among its requests;
    `patience` is its own, null: the workload's."""

    arrivals: Arrivals
    lengths: Lengths
    prefixes: SystemPrompts | None = None
    priority: int = 0
    slo: str | None = None
    patience: Mapping[str, Any] | Patience | None = None

    def parts(self, name: str, seed: int) -> Iterator[Trace]:
        """Its requests without end (or to the end of its process), CHUNK at a time."""
        lengths, prefixes = stream(seed, name, "lengths"), stream(seed, name, "prefixes")
        space = None if self.prefixes is None else PrefixSpace(self.prefixes)
        for times in self.arrivals.times(stream(seed, name, "arrivals")):
            n = len(times)
            prompt, output = self.lengths.draw(lengths, n)
            mine = Labels(np.zeros(n, dtype=np.int64), (name,))
            columns: dict[str, Any] = {} if name == "default" else {"client": mine}
            if space is not None:
                prompt, columns["ids"] = space.draw(prefixes, prompt)
                columns["scope"] = mine
            if self.priority:
                columns["priority"] = np.full(n, self.priority, dtype=np.int64)
            if self.slo is not None:
                columns["slo"] = Labels(np.zeros(n, dtype=np.int64), (self.slo,))
            arrival_ns = np.rint(times * NS).astype(np.int64)
            yield Trace(name, np.arange(n), arrival_ns, prompt, output, **columns)


@dataclass(kw_only=True)
class Synthetic(Offered):
    """Open-loop traffic of one client or several, merged by arrival, `num_requests` in all or `duration_s` long.

    Either `arrivals` and `lengths` (with `prefixes`) for one client named `default`, or `clients` by name.
    """

    name: str = "synthetic"
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals: Arrivals | None = None
    lengths: Lengths | None = None
    prefixes: SystemPrompts | None = None
    clients: Mapping[str, Client] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("workload.num_requests: expected it or workload.duration_s, or the workload never ends")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError(f"workload.num_requests={self.num_requests}, expected at least 1")
        if bool(self.clients) == (self.arrivals is not None and self.lengths is not None):
            raise ConfigError(f"workload {self.name} needs workload.arrivals and .lengths, or else workload.clients")

    def _clients(self) -> Mapping[str, Client]:
        if self.clients:
            return self.clients
        assert self.arrivals is not None and self.lengths is not None
        return {"default": Client(self.arrivals, self.lengths, self.prefixes)}

    def impatient(self) -> Clients:
        named = {}
        for name, client in self.clients.items():
            try:
                patience = Patience.of(client.patience)
            except ConfigError as error:
                raise ConfigError(f"workload.clients.{name}.{error}") from None
            if patience is not None:
                named[name] = patience
        return replace(super().impatient(), named=named)

    def parts(self, seed: int) -> Iterator[Trace]:
        streams = [client.parts(name, seed) for name, client in self._clients().items()]
        offered = 0
        for part in merge(streams) if len(streams) > 1 else streams[0]:
            if self.num_requests is not None:
                part = part.take(slice(0, self.num_requests - offered))
            if self.duration_s is not None:
                part = part.take(slice(0, int(np.searchsorted(part.arrival_ns, to_ns(self.duration_s)))))
            if not len(part):
                return
            yield replace(part, name=self.name, source_row=np.arange(offered, offered + len(part)))
            offered += len(part)

    def load(self, seed: int = 0) -> Trace:
        parts = list(self.parts(seed))
        if not parts:
            raise ConfigError(f"workload.duration_s={self.duration_s}: nothing arrives within it")
        return concatenate(parts).with_columns(provenance=Provenance(prompt_seed=None))


def merge(streams: Sequence[Iterator[Trace]]) -> Iterator[Trace]:
    """Parts of several streams as parts of one in order of arrival; ties in the order of the streams."""
    heads = [next(s, None) for s in streams]
    while live := [head for head in heads if head is not None]:
        until = min(int(head.arrival_ns[-1]) for head in live)
        taken: list[Trace] = []
        for i, head in enumerate(heads):
            if head is None:
                continue
            due = int(np.searchsorted(head.arrival_ns, until, side="right"))
            taken.append(head.take(slice(0, due)))
            heads[i] = head.take(slice(due, len(head))) if due < len(head) else next(streams[i], None)
        yield concatenate(taken).sorted()


@dataclass(kw_only=True)
class CommonWork(Offered):
    """Poisson arrivals with uniform lengths from one `random.Random(seed)`, drawn gap, prompt, output per request.

    The order of draws makes it the work on which simulators of this kind have been compared; for anything else use
    `Synthetic`.
    """

    name: str = "common_work"
    num_requests: int = 10_000
    rate: float = 8.0
    prompt: Sequence[int] = (250, 750)
    output: Sequence[int] = (100, 300)

    def __post_init__(self) -> None:
        Poisson(self.rate), Uniform(self.prompt, self.output)  # their checks are ours
        if self.num_requests < 1:
            raise ConfigError(f"workload.num_requests={self.num_requests}, expected at least 1")

    def parts(self, seed: int) -> Iterator[Trace]:
        draw = random.Random(seed)
        last_s = 0.0
        for start in range(0, self.num_requests, CHUNK):
            rows = np.arange(start, min(start + CHUNK, self.num_requests))
            drawn = np.empty((3, len(rows)), dtype=np.int64)
            for i in range(len(rows)):
                last_s += draw.expovariate(self.rate)
                drawn[:, i] = round(last_s * NS), draw.randint(*self.prompt), draw.randint(*self.output)
            yield Trace(self.name, rows, *drawn)

    def load(self, seed: int = 0) -> Trace:
        return concatenate(list(self.parts(seed)))
