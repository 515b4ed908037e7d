"""Requests: what a policy may read, and the engine's side of the same object.

`Request` is the policy's view and is read-only. `EngineRequest` adds what only the engine may know (the recorded
output length, the content of the prompt, the block table). Times are integer nanoseconds on the engine's clock;
properties ending in `_s` are seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from schedlab.framework.content import NO_IDENTITY, Content
from schedlab.framework.errors import ConfigError

State = Literal[
    "waiting",
    "running",
    "preempted",
    "swapped",
    "finished",
    "rejected",
    "aborted",
    "length_capped",
    "failed",
    "loading",
]
NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds to integer nanoseconds, rounded once."""
    return round(seconds * NS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; the draw depends on (seed, request, position) alone, never on the batch.

    A temperature of 0 takes the likeliest token; `top_k=0` keeps all. `max_tokens=None` is the model's limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        expected = {
            "temperature": ("a finite number of at least 0", 0 <= self.temperature < math.inf),
            "top_k": ("0 (all tokens) or more", self.top_k >= 0),
            "top_p": ("a number above 0, at most 1", 0 < self.top_p <= 1),
            "max_tokens": ("null or at least 1", self.max_tokens is None or self.max_tokens >= 1),
            "stop": ("a tuple of texts, none of them empty", isinstance(self.stop, tuple) and all(self.stop)),
        }
        for key, (wanted, holds) in expected.items():
            if not holds:
                raise ConfigError(f"sampling.{key}: expected {wanted}, found {getattr(self, key)!r}")


@dataclass(frozen=True, slots=True)
class SLO:
    """A named service-level objective; a limit of None, or an infinite one, is not part of it. Limits in seconds."""

    name: str = "default"
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for key in ("ttft_s", "tpot_s", "e2e_s"):
            limit = getattr(self, key)
            if limit is not None and not limit > 0:
                raise ConfigError(f"slo.{key}: expected more than 0 s, or null for no limit, found {limit}")
            if limit == math.inf:
                object.__setattr__(self, key, None)

    @property
    def limited(self) -> bool:
        """Whether there is anything to miss."""
        return (self.ttft_s, self.tpot_s, self.e2e_s) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt `number`, from 0, at what its client first asked for at `first_arrival_ns`.

    The client leaves if it has no token by `first_token_by_ns`, or not all of them by `end_by_ns`; None: it waits.
    """

    number: int
    first_arrival_ns: int
    first_token_by_ns: int | None = None
    end_by_ns: int | None = None


class DecodeClock:
    """A shared counter of decode steps: each member's token counts grow by one per tick without being touched."""

    __slots__ = ("tick",)

    def __init__(self) -> None:
        self.tick = 0


NOT_DECODING = DecodeClock()
"""The clock of every request that is not decoding in step with others; it never ticks."""


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS


class Request:
    """One request as a policy sees it. Underscored slots are the engine's to write.

    While it decodes in step with others, `_base_tokens` and `_base_computed` are its lengths *minus* the tick of
    `_clock`: what reads one of them alone must add the tick. The clock of all others stands at 0.
    """

    __slots__ = (
        "_arrival_ns", "_base_computed", "_base_tokens", "_client", "_clock", "_deadline_ns", "_depth",
        "_first_token_ns", "_max_tokens", "_num_preemptions", "_num_prompt_tokens", "_predicted", "_priority",
        "_program", "_request_id", "_session", "_slo", "_state",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        arrival_ns: int,
        num_prompt_tokens: int,
        max_tokens: int | None,
        client: str,
        priority: int,
        deadline_ns: int | None,
        session: str | None,
        slo: SLO | None,
    ) -> None:
        self._request_id = request_id
        self._arrival_ns = arrival_ns
        self._client = client
        self._priority = priority
        self._deadline_ns = deadline_ns
        self._session = session
        self._program: str | None = None
        self._depth = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._max_tokens = -1 if max_tokens is None else max_tokens
        self._predicted: int | None = None
        self._slo = slo
        self._state: State = "waiting"
        self._num_preemptions = 0
        self._first_token_ns: int | None = None
        self._base_tokens = num_prompt_tokens
        self._base_computed = 0
        self._clock = NOT_DECODING

    @property
    def request_id(self) -> str:
        """Unique name, as in the trace or the row number."""
        return self._request_id

    @property
    def client(self) -> str:
        """Who sent it; fairness is counted per client."""
        return self._client

    @property
    def priority(self) -> int:
        """Larger is more urgent."""
        return self._priority

    @property
    def session(self) -> str | None:
        """The conversation it belongs to, or None."""
        return self._session

    @property
    def depth(self) -> int:
        """Requests on the longest chain of its program that ended before it."""
        return self._depth

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Cap on the output; never the recorded length."""
        return self._max_tokens

    @property
    def predicted_output_tokens(self) -> int | None:
        """From the configured predictor, or None."""
        return self._predicted

    @property
    def slo(self) -> SLO | None:
        """The limits that it is judged by, or None."""
        return self._slo

    @property
    def state(self) -> State:
        """Where it is: waiting, running, preempted, swapped, loading, or how it ended."""
        return self._state

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted, by recompute or swap."""
        return self._num_preemptions

    @property
    def attempt(self) -> int:
        """How often its client has asked for the same in vain: 0 where this is the first time."""
        return 0

    @property
    def program(self) -> str | None:
        """The requests that wait for one another, directly or not, to which it belongs; else its session, or None."""
        return self._session if self._program is None else self._program

    @property
    def arrival_s(self) -> float:
        """Intended arrival, seconds."""
        return self._arrival_ns / NS

    @property
    def deadline_s(self) -> float | None:
        """When it should have ended, seconds on the engine's clock, or None."""
        return _seconds(self._deadline_ns)

    @property
    def first_token_s(self) -> float | None:
        """When it had its first token, seconds on the engine's clock; None before that."""
        return _seconds(self._first_token_ns)

    @property
    def num_tokens(self) -> int:
        """Prompt plus tokens generated so far."""
        return self._base_tokens + self._clock.tick

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in the cache (or on the host, when swapped)."""
        return self._base_computed + self._clock.tick

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a grant may still compute now: `num_tokens` less `num_computed_tokens`."""
        return self._base_tokens - self._base_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._base_tokens + self._clock.tick - self._num_prompt_tokens

    def __repr__(self) -> str:
        return f"<Request {self._request_id} {self._state} {self.num_computed_tokens}/{self.num_tokens}>"


class EngineRequest(Request):
    """The engine's side of a request. Sources create it; the engine alone changes it afterwards.

    `recorded_output_tokens` is the length that a replay forces, or None for a live request, which ends at a stop token
    or at `max_tokens`. `max_tokens=None` means the model's limit. `visible_ns` is the arrival plus preparation.
    """

    __slots__ = (
        "abort_ns", "admission", "block_table", "cached_tokens", "chain", "content", "delivery_ns", "emitted_ns",
        "final_tokens", "finished_ns", "first_scheduled_ns", "hands_over", "host_blocks", "lost_tokens",
        "num_published", "order", "output_token_ids", "promised_groups", "reason", "recomputed_tokens",
        "recorded_output_tokens", "resumed_tokens",
        "sampling", "slot", "source_row", "step", "swaps", "tried", "visible_ns", "watched",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        arrival_ns: int,
        num_prompt_tokens: int,
        content: Content,
        *,
        recorded_output_tokens: int | None = None,
        max_tokens: int | None = None,
        client: str = "default",
        priority: int = 0,
        deadline_ns: int | None = None,
        session: str | None = None,
        slo: SLO | None = None,
        abort_ns: int | None = None,
        sampling: SamplingParams | None = None,
        source_row: int | None = None,
        visible_ns: int | None = None,
        delivery_ns: int = 0,
    ) -> None:
        super().__init__(
            request_id, arrival_ns, num_prompt_tokens, max_tokens, client, priority, deadline_ns, session, slo
        )
        self.content = content
        self.recorded_output_tokens = recorded_output_tokens
        self.abort_ns = abort_ns
        self.sampling = sampling
        self.source_row = source_row
        self.visible_ns = arrival_ns if visible_ns is None else visible_ns
        self.delivery_ns = delivery_ns
        self.final_tokens = 0  # length at which the engine ends it, whatever it generates
        self.order = -1  # place among arrivals
        self.admission = -1  # place among admissions, while running
        self.slot = -1  # row in the executor's arrays, while running
        self.step = -1  # last step that granted or preempted it
        self.block_table: list[int] = []
        self.host_blocks: list[int] = []  # copies of its blocks, while swapped
        self.chain = NO_IDENTITY
        self.promised_groups = 0  # groups of the chain that it publishes as it computes: those of its prompt
        self.num_published = 0  # leading blocks of the table that the prefix cache knows
        self.watched: tuple[int, list[bytes]] | None = None  # hit in blocks, keys whose change may change it
        self.output_token_ids: list[int] = []
        self.first_scheduled_ns: int | None = None
        self.emitted_ns = 0  # time of its last token, while it is not decoding in step with others
        self.finished_ns: int | None = None
        self.cached_tokens: int | None = None  # reused at the first admission
        self.resumed_tokens = 0  # found again by resumes
        self.recomputed_tokens = 0
        self.lost_tokens = 0  # computed before the last preemption by recompute
        self.hands_over = False  # its blocks are read by another engine when it has finished
        self.swaps = 0
        self.reason: str | None = None
        self.tried: Attempt | None = None  # of a client that leaves, or tries again

    @property
    def attempt(self) -> int:
        """As for `Request`."""
        return 0 if self.tried is None else self.tried.number

    @property
    def logical_id(self) -> str:
        """What all attempts at the same are called: the name of the first, to which each further one adds `~n`."""
        return self._request_id.removesuffix(f"~{self.attempt}") if self.attempt else self._request_id

    @property
    def arrival_ns(self) -> int:
        """Intended arrival, nanoseconds."""
        return self._arrival_ns

    @property
    def deadline_ns(self) -> int | None:
        return self._deadline_ns

    @property
    def first_token_ns(self) -> int | None:
        return self._first_token_ns

    @property
    def own_program(self) -> str | None:
        """The program that its workload names, which may span sessions."""
        return self._program

    def place_in(self, program: str | None, depth: int) -> None:
        """Its workload says where it stands among the requests that wait for one another."""
        self._program, self._depth = program, depth

    def see_at_client(self, first_token_ns: int | None) -> None:
        """Its first token is what its consumer had first, not what was computed first."""
        self._first_token_ns = first_token_ns

    def continue_from(self, part: EngineRequest, state: State, num_tokens: int, num_computed_tokens: int) -> None:
        """It goes on where `part`, which another engine served, ended: with its counts so far, and these lengths."""
        self.mirror(state, num_tokens, num_computed_tokens)
        self.first_scheduled_ns, self.cached_tokens = part.first_scheduled_ns, part.cached_tokens
        self.resumed_tokens, self.recomputed_tokens = part.resumed_tokens, part.recomputed_tokens
        self.swaps, self._num_preemptions, self.reason = part.swaps, part.num_preemptions, part.reason
        if num_tokens > self._num_prompt_tokens:
            self._first_token_ns, self.emitted_ns = part.first_token_ns, part.emitted_ns

    def mirror(self, state: State, num_tokens: int, num_computed_tokens: int) -> None:
        """Take over what another engine, whose books are not `Ledger`, says of this request now."""
        assert self._clock is NOT_DECODING, "only a request that is counted by itself can be told its counts"
        self._state, self._base_tokens, self._base_computed = state, num_tokens, num_computed_tokens
