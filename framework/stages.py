"""The client's side of a request: what happens before the policy sees it and after a token has been made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from statistics import NormalDist

from schedlab.framework.content import digest
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import EngineRequest, to_ns
from schedlab.framework.source import Source

Duration = Callable[[EngineRequest], int]
"""Nanoseconds that a stage takes for a request."""


@dataclass(frozen=True, slots=True)
class Stage:
    """`constant_s + per_token_s · tokens`, plus a log-normal part of median `jitter_s` and shape `sigma`. Seconds.

    A request's draw depends on the seed and its name alone: no policy can change it.
    """

    constant_s: float = 0.0
    per_token_s: float = 0.0
    jitter_s: float = 0.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        for key in (f.name for f in fields(self)):
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"Stage.{key}: expected a number of at least 0, found {getattr(self, key)}")

    def duration_ns(self, tokens: int, name: bytes) -> int:
        """How long it takes for `tokens` tokens; `name` is what the log-normal part is drawn from."""
        seconds = self.constant_s + self.per_token_s * tokens
        if self.jitter_s:
            seconds += self.jitter_s * math.exp(self.sigma * _normal(name))
        return to_ns(seconds)


def _normal(name: bytes) -> float:
    """A standard normal number, the same for the same name in any process."""
    bits = int.from_bytes(digest(name)[:8], "little") >> 11
    return NormalDist().inv_cdf((bits + 0.5) / (1 << 53))


@dataclass(frozen=True, slots=True)
class ClientView:
    """Latencies as the client sees them.

    preparation : between the intended arrival and the policy's first sight of the request, for all tokens of the prompt
    delivery    : between the engine's making a token and the client's having it, for one token: output is streamed
    """

    preparation: Stage = field(default_factory=Stage)
    delivery: Stage = field(default_factory=Stage)

    def around(self, source: Source, seed: int) -> Source:
        """`source` with these stages; what a request brings of its own (a trace's, a measured one) is kept."""

        def name(stage: str, request: EngineRequest) -> bytes:
            return digest(b"stage", b"%d" % seed, stage.encode(), request.logical_id.encode())

        return Staged(
            source,
            lambda request: self.preparation.duration_ns(request.num_prompt_tokens, name("preparation", request)),
            lambda request: self.delivery.duration_ns(1, name("delivery", request)),
        )


def nothing(request: EngineRequest) -> int:
    """The duration of a stage that is not there."""
    return 0


class Staged:
    """Another source's requests, each when its preparation is over, which may change their order."""

    def __init__(self, source: Source, preparation_ns: Duration, delivery_ns: Duration = nothing) -> None:
        self._source = source
        self._preparation_ns = preparation_ns
        self._delivery_ns = delivery_ns
        self._prepared: list[tuple[int, int, EngineRequest]] = []  # (visible, place among those popped, request)
        self._popped = 0

    @property
    def abandoned(self) -> int:
        """As of the source; see `SessionSource` of the workloads."""
        return getattr(self._source, "abandoned", 0)

    def peek(self) -> int | None:
        """Whoever arrives after the first visible request cannot be visible before it: no one else need be known."""
        while (arrival := self._source.peek()) is not None and not (self._prepared and self._prepared[0][0] < arrival):
            for request in self._source.pop(arrival):
                self._prepare(request)
        return self._prepared[0][0] if self._prepared else None

    def _prepare(self, request: EngineRequest) -> None:
        if request.visible_ns == request.arrival_ns:
            request.visible_ns += self._preparation_ns(request)
        if request.delivery_ns == 0:
            request.delivery_ns = self._delivery_ns(request)
        heappush(self._prepared, (request.visible_ns, self._popped, request))
        self._popped += 1

    def pop(self, now_ns: int) -> list[EngineRequest]:
        due: list[EngineRequest] = []
        while (visible := self.peek()) is not None and visible <= now_ns:
            due.append(heappop(self._prepared)[2])
        return due

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        self._source.finished(request, now_ns)
