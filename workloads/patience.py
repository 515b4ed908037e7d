"""Clients that do not wait for ever: how long one waits, how often it tries again, and a source of their attempts.

Each attempt is a request of its own, with the same content and draws; the source around which this stands hears of the
last of them alone, so that a session goes on, or a program is abandoned, when its client has given up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from heapq import heappop, heappush
from typing import Any, Self

from schedlab.framework.attempts import TIMED_OUT
from schedlab.framework.content import digest
from schedlab.framework.errors import ConfigError, TraceError
from schedlab.framework.limits import is_too_large
from schedlab.framework.request import Attempt, EngineRequest, to_ns
from schedlab.framework.source import Source
from schedlab.workloads.files import shown
from schedlab.workloads.source import another_attempt
from schedlab.workloads.trace import Trace


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client waits for an answer, and what it does without one.

    first_token_s, total_s : from an attempt's arrival on it waits so long for a token, for all of them; null: for ever
    retries                : further attempts after one that was rejected or that it did not wait for
    backoff_s, factor      : before attempt n = 1, 2, … it pauses for `backoff_s · factor^(n - 1)`
    jitter                 : and for up to this share of that more or less, drawn from the request's name
    """

    first_token_s: float | None = None
    total_s: float | None = None
    retries: int = 0
    backoff_s: float = 1.0
    factor: float = 2.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for key in ("first_token_s", "total_s"):
            limit = getattr(self, key)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"patience.{key}: expected a time above 0 s, or null for no limit, found {limit}")
        if self.retries < 0:
            raise ConfigError(f"patience.retries: expected a number of at least 0, found {self.retries}")
        if not 0 <= self.backoff_s < math.inf:
            raise ConfigError(f"patience.backoff_s: expected 0 s or more, found {self.backoff_s}")
        if not 0 < self.factor < math.inf:
            raise ConfigError(f"patience.factor: expected a number above 0, found {self.factor}")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"patience.jitter: expected a share in [0, 1], found {self.jitter}")

    @classmethod
    def of(cls, keys: Patience | Mapping[str, Any] | None) -> Patience | None:
        """From the keys of a configuration. ConfigError for a wrong one."""
        if keys is None or isinstance(keys, Patience):
            return keys
        known = {one.name: one.default for one in fields(cls)}
        for key, value in keys.items():
            if key not in known:
                raise ConfigError(f"patience.{key}: no such key; expected {', '.join(known)}")
            if type(value) not in ((int,) if key == "retries" else (int, float)) and value != known[key]:
                raise ConfigError(f"patience.{key}: expected a number, found {value!r}")
        return cls(**keys)

    def attempt(self, number: int, first_arrival_ns: int, arrival_ns: int) -> Attempt:
        """Attempt `number`, which arrives at `arrival_ns`."""
        waits = (self.first_token_s, self.total_s)
        return Attempt(number, first_arrival_ns, *(None if s is None else arrival_ns + to_ns(s) for s in waits))

    def pause_ns(self, number: int, name: bytes) -> int:
        """Between the end of an attempt and attempt `number`; `name` is what the jitter is drawn from."""
        draw = int.from_bytes(digest(name, b"%d" % number)[:8], "little") / (1 << 63) - 1
        return to_ns(self.backoff_s * self.factor ** (number - 1) * (1 + self.jitter * draw))


FOREVER = Patience()


@dataclass(frozen=True, slots=True)
class Clients:
    """The patience of all clients, and of those that have their own by name; None waits for ever, once."""

    default: Patience | None = None
    named: Mapping[str, Patience] = field(default_factory=dict)

    @classmethod
    def told_by(cls, facts: Mapping[str, Any] | None) -> Self:
        """From what `facts` says."""
        facts = facts or {}
        named = {str(name): Patience(**keys) for name, keys in facts.get("named", {}).items()}
        return cls(Patience.of(facts.get("default")), named)

    @property
    def facts(self) -> dict[str, Any]:
        """For a manifest; empty where everybody waits."""
        named = {name: asdict(one) for name, one in self.named.items()}
        default = None if self.default is None else asdict(self.default)
        return {"default": default, "named": named} if default or named else {}

    def around(self, source: Source, seed: int) -> Source:
        """`source` with these clients."""
        return Impatient(source, self, seed) if self.facts else source

    def patience(self, client: str) -> Patience:
        return self.named.get(client) or self.default or FOREVER


class Impatient:
    """The requests of another source as attempts: those that fail come again under the name `id~n`.

    A retry arrives after its pause, which begins when the failed attempt has ended and that was delivered. Requests
    that could never be served are not tried again, nor those that the workload itself withdraws.
    """

    def __init__(self, source: Source, clients: Clients, seed: int) -> None:
        self._source, self._clients = source, clients
        self._seed = b"%d" % seed
        self._again: list[tuple[int, int, EngineRequest]] = []  # (visible, place among retries, request)
        self._retries = 0

    @property
    def abandoned(self) -> int:
        """As of the source; see `SessionSource`."""
        return getattr(self._source, "abandoned", 0)

    def peek(self) -> int | None:
        coming = self._source.peek()
        if not self._again:
            return coming
        return self._again[0][0] if coming is None else min(coming, self._again[0][0])

    def pop(self, now_ns: int) -> list[EngineRequest]:
        """Of one instant, first attempts come before retries."""
        due = self._source.pop(now_ns)
        for request in due:
            arrival = request.arrival_ns
            request.tried = self._clients.patience(request.client).attempt(0, arrival, arrival)
        if not (self._again and self._again[0][0] <= now_ns):
            return due
        while self._again and self._again[0][0] <= now_ns:
            due.append(heappop(self._again)[2])
        return sorted(due, key=lambda request: request.visible_ns)

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        retry = self._retry(request, now_ns) if _can_be_tried_again(request) else None
        if retry is None:
            self._source.finished(request, now_ns)
            return
        heappush(self._again, (retry.visible_ns, self._retries, retry))
        self._retries += 1

    def _retry(self, request: EngineRequest, now_ns: int) -> EngineRequest | None:
        """The next attempt after `request`, which ended at `now_ns`; None if there is none."""
        patience, number = self._clients.patience(request.client), request.attempt + 1
        assert request.tried is not None
        if number > patience.retries:
            return None
        pause = patience.pause_ns(number, digest(b"retry", self._seed, request.logical_id.encode()))
        arrival = now_ns + request.delivery_ns + pause
        if request.abort_ns is not None and arrival >= request.abort_ns:
            return None
        return another_attempt(request, patience.attempt(number, request.tried.first_arrival_ns, arrival), arrival)


def check_names(trace: Trace) -> None:
    """TraceError for a request that is called as an attempt at another one would be."""
    names = set() if trace.request_id is None else set(trace.request_id.names)
    for name in names:
        base, _, number = name.rpartition("~")
        if number.isdecimal() and base in names:
            raise TraceError(
                f"{trace.name}: requests {shown(base)} and {shown(name)}, and attempts after the first are called "
                "NAME~1, NAME~2, …: with workload.patience, expected other names"
            )


def _can_be_tried_again(request: EngineRequest) -> bool:
    if request.state == "rejected":
        return not is_too_large(request)
    return request.state == "aborted" and request.reason == TIMED_OUT
