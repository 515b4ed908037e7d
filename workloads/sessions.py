"""Synthetic traffic that waits for answers: conversations of several turns, and a closed loop of users.

Both are traces whose turns are tied to the turn before. A policy shifts when a turn arrives, never what it is: lengths,
think times and prefixes are drawn beforehand from streams of their own. A closed loop hides overload, since the load
falls as the policy slows: state the achieved rate beside the number of users.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, to_ns
from schedlab.workloads.arrivals import Arrivals, first_arrivals
from schedlab.workloads.lengths import Lengths
from schedlab.workloads.prefixes import FRESH, PrefixSpace, SystemPrompts
from schedlab.workloads.streams import stream
from schedlab.workloads.trace import BlockIds, Labels, Provenance, Trace
from schedlab.workloads.workload import Offered


@dataclass
class ThinkTime:
    """Gamma-distributed pauses of a mean in seconds: `cv` 0 is constant, 1 exponential."""

    mean_s: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean_s", "cv"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ConfigError(f"ThinkTime.{name}={getattr(self, name)}, expected a finite number of at least 0")

    def draw_ns(self, rng: np.random.Generator, n: int) -> np.ndarray:
        if not self.cv or not self.mean_s:
            return np.full(n, to_ns(self.mean_s), dtype=np.int64)
        seconds = rng.gamma(1 / self.cv**2, self.mean_s * self.cv**2, n)
        return np.rint(seconds * NS).astype(np.int64)


def tied(name: str, owner: np.ndarray, start_ns: np.ndarray, think_ns: np.ndarray, **columns: Any) -> Trace:
    """A trace of rows that stand owner by owner (`owner` is non-decreasing): each follows the one before of its owner.

    Later rows have no stamp; they stand at the earliest time they could arrive.
    """
    n = len(owner)
    follows = np.concatenate([[False], owner[1:] == owner[:-1]])
    waited = np.where(follows, think_ns, 0)
    total = np.cumsum(waited)
    first = np.flatnonzero(~follows)
    since = total - np.repeat(total[first], np.diff(np.append(first, n)))
    trace = Trace(
        name, np.arange(n), start_ns[owner] + since, after=np.where(follows, np.arange(n) - 1, -1),
        think_ns=np.where(follows, think_ns, -1), stamped=~follows, **columns,
    )  # fmt: skip
    ordered = trace.take(np.argsort(trace.arrival_ns, kind="stable"))
    return ordered.with_columns(source_row=np.arange(n), provenance=Provenance())


@dataclass(kw_only=True)
class Conversations(Offered):
    """Sessions that start by a process; each turn's prompt is the turn before, its output, and the user's new words.

    turns         : mean number of turns, geometric from 1
    lengths       : the user's words and the answer, of each turn
    system_prompts: shared beginnings. Without them a turn shares what was really generated before it; with them block
                    ids say what is shared, as in a recorded trace, and generated tokens stand under ids of their own
    max_context   : a session ends before a turn whose prompt and output would exceed it
    """

    name: str = "conversations"
    num_sessions: int
    arrivals: Arrivals
    lengths: Lengths
    turns: float = 4.0
    think: ThinkTime = field(default_factory=lambda: ThinkTime(5.0))
    system_prompts: SystemPrompts | None = None
    max_context: int = 8192

    def __post_init__(self) -> None:
        for name in ("num_sessions", "turns"):
            if not 1 <= getattr(self, name) < np.inf:
                raise ConfigError(f"workload.{name}={getattr(self, name)}, expected at least 1")

    def load(self, seed: int = 0) -> Trace:
        turns = stream(seed, self.name, "turns").geometric(1 / self.turns, self.num_sessions)
        session = np.repeat(np.arange(self.num_sessions), turns)
        words, output = self.lengths.draw(stream(seed, self.name, "lengths"), len(session))
        think = self.think.draw_ns(stream(seed, self.name, "think"), len(session))
        space = None if self.system_prompts is None else PrefixSpace(self.system_prompts)
        chosen = np.full(self.num_sessions, -1)
        if space is not None:
            chosen = space.choose(stream(seed, self.name, "prefixes"), self.num_sessions)
        system = np.zeros(self.num_sessions, dtype=np.int64) if space is None else space.tokens(chosen)
        prompt = _within(session, words + output) - output + system[session]
        keep = prompt + output <= self.max_context  # contexts grow, so this cuts the ends of sessions
        if not keep.any():
            raise ConfigError(f"workload.max_context={self.max_context}: no turn fits")
        session, prompt, output, think = session[keep], prompt[keep], output[keep], think[keep]
        columns: dict[str, Any] = {"grows": np.concatenate([[False], session[1:] == session[:-1]])}
        if space is not None:
            columns = {"ids": _growing_ids(space, chosen[session], session, prompt)}
        start = np.rint(first_arrivals(self.arrivals, stream(seed, self.name, "arrivals"), self.num_sessions) * NS)
        names = tuple(f"s{number}" for number in range(self.num_sessions))
        return tied(
            self.name, session, start.astype(np.int64), think, prompt_tokens=prompt, output_tokens=output,
            session=Labels(session, names), turn=_within(session, np.ones(len(session), dtype=np.int64)) - 1, **columns,
        ).counted(turns_beyond_max_context=int((~keep).sum()))  # fmt: skip


def _within(owner: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Running sums that begin anew with each owner, int64 [N]."""
    total = np.cumsum(values)
    first = np.flatnonzero(np.concatenate([[True], owner[1:] != owner[:-1]]))
    before = total[first] - values[first]
    sums: np.ndarray = total - np.repeat(before, np.diff(np.append(first, len(owner))))
    return sums


def _growing_ids(space: PrefixSpace, which: np.ndarray, session: np.ndarray, prompt: np.ndarray) -> BlockIds:
    """Ids of prompts that each contain the one before of their session: its whole blocks, then new ones."""
    fresh, rows, past, known, owner = count(FRESH), list[list[int]](), list[int](), 0, -1
    for chosen, own, tokens in zip(which.tolist(), session.tolist(), prompt.tolist(), strict=True):
        if own != owner:
            past, known, owner = space.shared_ids(chosen), 1 << 62, own
        shared = past[: min(known, tokens) // space.width]
        past = shared + [next(fresh) for _ in range(len(shared), -(-tokens // space.width))]
        known = tokens
        rows.append(past)
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return BlockIds(offsets, np.fromiter((i for row in rows for i in row), np.int64, offsets[-1]), space.width)


@dataclass(kw_only=True)
class ClosedLoop(Offered):
    """A fixed number of users: each sends, waits for the end, thinks, sends again, until all have sent their share.

    `num_requests` are dealt out evenly, so that a slow policy does not change who sends what; near the end fewer users
    are left, which a measured window or `stop_after_s` leaves out. Users start spread over `ramp_s`.
    """

    name: str = "closed_loop"
    users: int
    num_requests: int
    lengths: Lengths
    think: ThinkTime = field(default_factory=lambda: ThinkTime(1.0))
    prefixes: SystemPrompts | None = None
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.users <= self.num_requests:
            raise ConfigError(f"workload.users={self.users}, expected 1 to num_requests={self.num_requests}")

    def load(self, seed: int = 0) -> Trace:
        user = np.sort(np.arange(self.num_requests) % self.users)
        prompt, output = self.lengths.draw(stream(seed, self.name, "lengths"), self.num_requests)
        columns: dict[str, Any] = {"client": Labels(user, tuple(f"user-{number}" for number in range(self.users)))}
        if self.prefixes is not None:
            prompt, columns["ids"] = PrefixSpace(self.prefixes).draw(stream(seed, self.name, "prefixes"), prompt)
        think = self.think.draw_ns(stream(seed, self.name, "think"), self.num_requests)
        start = np.rint(np.linspace(0, self.ramp_s, self.users, endpoint=False) * NS).astype(np.int64)
        return tied(self.name, user, start, think, prompt_tokens=prompt, output_tokens=output, **columns)
