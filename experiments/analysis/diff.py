"""`schedlab diff`: where two runs part, what each saw and decided there, and what it did to every request.

The first step at which the decision logs differ is found in the files; what the policies saw is had by executing both
runs up to that step again. Statistics over many runs are compare's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.decisions import parting
from schedlab.experiments.analysis.past_run import PastRun
from schedlab.experiments.run.offered import offered_hash
from schedlab.framework.engine import Engine
from schedlab.framework.policy import Event, Policy
from schedlab.framework.request import Request
from schedlab.framework.results.digest import Decodes, Grants, Pairs
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.tables import Columns
from schedlab.framework.step import Step
from schedlab.framework.vllm.own import OwnScheduler

SHOWN = 8
"""Requests of a list that are named in the terminal."""


# ---- what a step saw and decided ----


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that could have been granted: `tokens` are left to compute, of which `cached` would be reused."""

    request_id: str
    tokens: int
    cached: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Left:
    """What a step may still give away."""

    token_budget: int
    slots: int
    blocks: int

    @classmethod
    def of(cls, step: Step) -> Left:
        return cls(step.token_budget, step.free_slots, step.free_blocks)


@dataclass(frozen=True, slots=True)
class Seen:
    """One step of one run: what there was, what was decided, and what was left."""

    index: int
    now_s: float
    before: Left
    after: Left
    waiting: tuple[Candidate, ...]
    prefilling: tuple[Candidate, ...]
    decoding: tuple[str, ...]
    grants: tuple[tuple[str, int], ...]
    decodes: str | tuple[str, ...]
    preempted: tuple[tuple[str, str], ...]
    refusals: tuple[tuple[str, str], ...]
    idle_until_s: float | None
    rejected: tuple[tuple[str, str], ...] = ()


class Watched(Policy):
    """A policy under observation: it decides as ever, and what its last step saw is kept."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.from_index = 0
        self.saw: dict[str, Any] | None = None

    def schedule(self, step: Step) -> None:
        if step._index < self.from_index:
            self._policy.schedule(step)
            return
        now, before = step.now, Left.of(step)
        saw = {
            "waiting": tuple(candidate(step, request, now) for request in step.waiting),
            "prefilling": tuple(candidate(step, request, now) for request in step.prefilling),
            "decoding": tuple(request.request_id for request in step.decoding),
        }
        self._policy.schedule(step)
        self.saw = {"index": step._index, "now_s": now, "before": before, "after": Left.of(step), **saw}

    def observe(self, event: Event) -> None:
        self._policy.observe(event)


def candidate(step: Step, request: Request, now: float) -> Candidate:
    start = step.cached_tokens(request)
    cached = max(start - request.num_computed_tokens, 0)
    return Candidate(request.request_id, request.num_tokens - start, cached, now - request.arrival_s)


class Decided(Recorder):
    """Keeps the last decision."""

    last: dict[str, Any]

    def decision(
        self, index: int, now_ns: int, preempted: Pairs, grants: Grants, decodes: Decodes, decodes_at: int,
        refusals: Pairs, idle_until_ns: int | None, starts: Sequence[int] = (), rejected: Pairs = (),
    ) -> None:  # fmt: skip
        self.last = {
            "grants": tuple(grants), "decodes": decodes if decodes == "all" else tuple(decodes),
            "preempted": tuple(preempted), "refusals": tuple(refusals), "rejected": tuple(rejected),
            "idle_until_s": None if idle_until_ns is None else idle_until_ns / 1e9,
        }  # fmt: skip

    def decode_all(self, index: int, now_ns: int, repeat: int = 1) -> None:
        nothing = dict.fromkeys(("grants", "preempted", "refusals", "rejected"), ())
        self.last = {**nothing, "decodes": "all", "idle_until_s": None}


class Walk:
    """A run executed again step by step, from some step on under observation. Of one that vLLM's own scheduler decided
    there is nothing to observe.
    """

    def __init__(self, past: PastRun, policy: Policy | None = None) -> None:
        limits = past.limits
        self.is_opaque = past.manifest["policy"]["class"] == f"{OwnScheduler.__module__}.{OwnScheduler.__qualname__}"
        self._watched = Watched(policy or past.make_policy())
        self._decided = Decided(Measurement(limits.max_num_seqs, limits.num_blocks))
        self._engine: Engine = past.again(self._watched, self._decided, every_step=True)

    def to(self, index: int) -> Seen | None:
        """Execute up to and with step `index`; None if the run ends before it, or cannot be observed."""
        if self.is_opaque:
            return None
        self._watched.from_index, self._watched.saw = index, None
        while self._engine.num_steps <= index:
            if not self._engine.step():
                return None
        saw = self._watched.saw
        return None if saw is None else Seen(**saw, **self._decided.last)


# ---- what became of the requests ----


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds that a request took in `a` and in `b`; both finished it."""

    request_id: str
    ttft_s: tuple[float, float]
    e2e_s: tuple[float, float]

    @property
    def worse_s(self) -> float:
        return self.e2e_s[1] - self.e2e_s[0]


def changes(a: Columns, b: Columns) -> list[Change]:
    """Of the requests that both finished, by how much later `b` ended them, worst first."""
    of_b = {name: row for row, name in enumerate(b["request_id"])}
    pairs = [(row, of_b[name]) for row, name in enumerate(a["request_id"]) if name in of_b]
    both = [(i, j) for i, j in pairs if a["status"][i] == b["status"][j] == "finished"]

    def seconds(table: Columns, row: int, stamp: str) -> float:
        return float(table[stamp][row] + table["delivery_s"][row] - table["arrival_s"][row])

    found = [
        Change(
            a["request_id"][i],
            (seconds(a, i, "first_token_s"), seconds(b, j, "first_token_s")),
            (seconds(a, i, "finished_s"), seconds(b, j, "finished_s")),
        )
        for i, j in both
    ]
    return sorted(found, key=lambda change: (-change.worse_s, change.request_id))


# ---- the whole ----


@dataclass(frozen=True)
class Difference:
    """Two runs. `at`: the step of each from which on they part; `seen`: these steps, None for a run that is over.

    `opaque`: of which runs no step can be seen.
    """

    names: tuple[str, str]
    same_offered: bool
    at: tuple[int, int] | None
    seen: tuple[Seen | None, Seen | None]
    requests: tuple[Change, ...]
    opaque: tuple[bool, bool] = (False, False)

    def as_json(self) -> dict[str, Any]:
        told = [None if seen is None else asdict(seen) for seen in self.seen]
        return {
            "runs": list(self.names), "same_offered": self.same_offered, "at": self.at, "seen": told,
            "requests": [asdict(change) for change in self.requests],
        }  # fmt: skip


def difference(a: str | Path, b: str | Path, walks: Sequence[Walk] | None = None) -> Difference:
    """Where the finished runs in `a` and `b` part. ConfigError for runs that cannot be executed again."""
    pasts = PastRun(Path(a)), PastRun(Path(b))
    tables = [past.tables for past in pasts]
    at = parting(tables[0].decisions, tables[1].decisions)
    seen: list[Seen | None] = [None, None]
    opaque = (False, False)
    if at is not None:
        walks = walks or [Walk(past) for past in pasts]
        seen = [walk.to(index) for walk, index in zip(walks, at, strict=True)]
        opaque = (walks[0].is_opaque, walks[1].is_opaque)
    same = offered_hash(Path(a)) == offered_hash(Path(b))
    return Difference(
        (str(a), str(b)), same, at, (seen[0], seen[1]), tuple(changes(tables[0].requests, tables[1].requests)), opaque
    )


# ---- the terminal ----


def named(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return (", ".join(items[:SHOWN]) or "none") + more


def candidate_text(found: Candidate) -> str:
    cached = f", {found.cached} cached" if found.cached else ""
    return f"{found.request_id} ({found.tokens} tokens{cached}, {found.waited_s:.3f} s old)"


def left_text(left: Left) -> str:
    return f"{left.token_budget:,} tokens, {left.slots:,} slots, {left.blocks:,} blocks"


def step_lines(name: str, seen: Seen | None, is_opaque: bool = False) -> list[str]:
    if is_opaque:
        return [f"{name}: vLLM's own scheduler decided, which is not executed again"]
    if seen is None:
        return [f"{name}: the run is over"]
    decodes = f"all {len(seen.decoding)}" if seen.decodes == "all" else named(list(seen.decodes))
    decided = [f"prefill {named([f'{request} +{tokens}' for request, tokens in seen.grants])}"] if seen.grants else []
    decided += [f"decode {decodes}"] if seen.decodes else []
    victims = [f"{request} ({mode})" for request, mode in seen.preempted]
    decided += [f"preempt {named(victims)}"] if victims else []
    turned_away = [f"{request} ({why})" for request, why in seen.rejected]
    decided += [f"reject {named(turned_away)}"] if turned_away else []
    if not decided:
        until = "something happens" if seen.idle_until_s is None else f"{seen.idle_until_s:.6f} s"
        decided = [f"idle until {until}"]
    return [
        f"{name}: step {seen.index} at {seen.now_s:.6f} s",
        f"  waiting {len(seen.waiting)}: {named([candidate_text(one) for one in seen.waiting])}",
        f"  prefilling {len(seen.prefilling)}: {named([candidate_text(one) for one in seen.prefilling])}",
        f"  decoding {len(seen.decoding)}: {named(seen.decoding)}",
        f"  decided: {'; '.join(decided)}",
        f"  refused: {named([f'{request} ({why})' for request, why in seen.refusals])}",
        f"  free before: {left_text(seen.before)}; left: {left_text(seen.after)}",
    ]


def request_lines(found: Difference, count: int) -> list[str]:
    if not found.requests:
        return ["no request was finished by both"]
    worse, better = (sum(change.worse_s * sign > 0 for change in found.requests) for sign in (1, -1))
    both = f"{len(found.requests):,} requests finished by both"
    lines = [f"{both}: {worse:,} end later in {found.names[1]}, {better:,} earlier"]
    lines += [f"{'request':>16} {'TTFT ms':>22} {'E2E ms':>24} {'later by ms':>12}"] if count else []
    for change in found.requests[:count]:
        ttft, e2e = (f"{pair[0] * 1e3:,.1f} → {pair[1] * 1e3:,.1f}" for pair in (change.ttft_s, change.e2e_s))
        lines.append(f"{change.request_id:>16} {ttft:>22} {e2e:>24} {change.worse_s * 1e3:>+12,.1f}")
    return lines


def show(found: Difference, count: int) -> None:
    if not found.same_offered:
        print("the runs were not offered the same requests")
    if found.at is None:
        print("the runs take the same decisions")
    else:
        print(f"the decisions part at step {found.at[0]}")
        for name, seen, is_opaque in zip(found.names, found.seen, found.opaque, strict=True):
            print("\n".join(step_lines(name, seen, is_opaque)))
    print("\n".join(request_lines(found, count)))


def walk_on(found: Difference, walks: Sequence[Walk]) -> None:
    """Step by step from where the runs part: Enter goes on by one step, a number by so many, q ends."""
    at = list(found.at or ())
    while at and (word := _ask()) != "q":
        if word and not word.isdigit():
            print(f"{word}: expected Enter, a number of steps, or q")
            continue
        at = [index + int(word or 1) for index in at]
        seen = [walk.to(index) for walk, index in zip(walks, at, strict=True)]
        for name, one, walk in zip(found.names, seen, walks, strict=True):
            print("\n".join(step_lines(name, one, walk.is_opaque)))
        if seen == [None, None]:
            return


def _ask() -> str:
    try:
        return input("Enter: next step, a number: so many on, q: end > ").strip()
    except EOFError:
        print()
        return "q"


def diff(a: Path, b: Path, *, requests: int, step: bool, form: str, trust: bool = False) -> None:
    """The command."""
    walks = [Walk(PastRun(a, trust)), Walk(PastRun(b, trust))]
    found = difference(a, b, walks)
    if form == "json":
        print(json.dumps(found.as_json(), indent=1))
        return
    show(found, requests)
    if step:
        walk_on(found, walks)
