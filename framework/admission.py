"""Who is turned away on arrival: limits of the queue, and rates. Decides nothing about those who wait already."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from schedlab.framework.errors import ConfigError
from schedlab.framework.ledger import Ledger
from schedlab.framework.limits import EngineConfig
from schedlab.framework.request import NS, Request

QUEUE_FULL, RATE_LIMITED = "queue_full", "rate_limited"
"""Reasons of requests that are rejected on arrival although they would fit."""


class Load(NamedTuple):
    """What is in the engine when a request arrives: requests that wait and that run, prompt tokens still to compute."""

    waiting: int
    running: int
    prompt_tokens: int


def load_of(ledger: Ledger) -> Load:
    to_compute = sum(r.num_uncomputed_tokens for r in (*ledger.waiting, *ledger.prefilling))
    return Load(len(ledger.waiting), len(ledger.running), to_compute)


def queue_is_full(request: Request, ledger: Ledger, config: EngineConfig) -> bool:
    """Whether one of the engine's queue limits has no room for `request`. An empty engine takes any prompt."""
    waiting, running = len(ledger.waiting), len(ledger.running)
    if config.max_num_waiting_reqs is not None and waiting >= config.max_num_waiting_reqs:
        return True
    if config.max_num_queued_reqs is not None and waiting + running >= config.max_num_queued_reqs:
        return True
    limit = config.max_num_queued_tokens
    if limit is None or not waiting + running:
        return False
    return load_of(ledger).prompt_tokens + request.num_prompt_tokens > limit


class Admission:
    """Says who is refused on arrival, beside the queue's own limits.

    An implementation may keep state of its own and must be deterministic: it sees requests in order of arrival, the
    load and the engine's time. It does *not* see what the policy does with those it lets in.
    """

    def refuse(self, request: Request, load: Load, now: float) -> str | None:
        """Why `request` is turned away at `now` seconds, or None."""
        raise NotImplementedError


@dataclass
class TokenBucket(Admission):
    """A bucket of `burst` units that fills at `rate` a second; a request that finds too few is refused, and takes none.

    unit : what a request takes: `requests` one, `tokens` its prompt
    per  : `all` share one bucket, or each `client` has its own
    """

    rate: float
    burst: float
    unit: Literal["requests", "tokens"] = "requests"
    per: Literal["all", "client"] = "all"
    _left: dict[str, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)  # units, at seconds

    def __post_init__(self) -> None:
        for key in ("rate", "burst"):
            if not 0 < getattr(self, key) < float("inf"):
                raise ConfigError(f"admission.{key}: expected a finite number above 0, found {getattr(self, key)}")
        for key, allowed in (("unit", ("requests", "tokens")), ("per", ("all", "client"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"admission.{key}: expected {' or '.join(allowed)}, found {getattr(self, key)!r}")

    def refuse(self, request: Request, load: Load, now: float) -> str | None:
        owner = request.client if self.per == "client" else ""
        needed = 1.0 if self.unit == "requests" else float(request.num_prompt_tokens)
        left, since = self._left.get(owner, (self.burst, now))
        left = min(self.burst, left + (now - since) * self.rate)
        enough = left >= needed
        self._left[owner] = (left - needed if enough else left, now)
        return None if enough else RATE_LIMITED


def refusal(
    request: Request, ledger: Ledger, config: EngineConfig, admission: Admission | None, now_ns: int
) -> str | None:
    """Why a request that could be served is turned away as it arrives, or None."""
    if queue_is_full(request, ledger, config):
        return QUEUE_FULL
    return None if admission is None else admission.refuse(request, load_of(ledger), now_ns / NS)
