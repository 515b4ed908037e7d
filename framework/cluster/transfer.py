"""Links between replicas, and what travels over them: keys and values of a request's tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from schedlab.framework.errors import ConfigError


@dataclass(frozen=True)
class Link:
    """How a replica is connected: `gb_s` GB/s out and as much in, and `latency_us` from the last byte's start to its
    arrival. Transfers that share an end go one after the other, in the order in which they were begun."""

    gb_s: float = 50.0
    latency_us: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.gb_s < math.inf:
            raise ConfigError(f"cluster.link.gb_s: expected more than 0 GB/s, found {self.gb_s}")
        if not 0 <= self.latency_us < math.inf:
            raise ConfigError(f"cluster.link.latency_us: expected 0 us or more, found {self.latency_us}")

    def wire_ns(self, num_bytes: int) -> int:
        """How long `num_bytes` occupy both ends: bytes / (GB/s) are nanoseconds."""
        return round(num_bytes / self.gb_s)

    @property
    def latency_ns(self) -> int:
        return round(self.latency_us * 1000)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Names and times of one transfer, nanoseconds: the tokens were there at `ready_ns`, room for them was at
    `reserved_ns`, both ends were busy from `begun_ns` to `free_ns`, and all had come at `done_ns`."""

    request_id: str
    source: str
    target: str
    tokens: int
    num_bytes: int
    ready_ns: int
    reserved_ns: int
    begun_ns: int
    free_ns: int
    done_ns: int

    @property
    def wire_ns(self) -> int:
        return self.free_ns - self.begun_ns


class Links:
    """Who sends to whom until when: one way out and one way in for each replica, by its number."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out: Counter[int] = Counter()
        self._into: Counter[int] = Counter()

    def send(self, source: int, target: int, num_bytes: int, now_ns: int) -> tuple[int, int, int]:
        """A transfer that is asked for now: when both ends are free, when they are again, and when all has come."""
        begun = max(now_ns, self._out[source], self._into[target])
        free = begun + self._link.wire_ns(num_bytes)
        self._out[source] = self._into[target] = free
        return begun, free, free + self._link.latency_ns
