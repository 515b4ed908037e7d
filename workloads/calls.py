"""Recorded calls with a start and an end: which waited for which, and how long after.

Files of agents tell sessions and times; what a call waited for follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.workloads.builder import FORBIDDEN
from schedlab.workloads.dependencies import fault, with_parents
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.trace import Trace, ragged


@dataclass
class Calls:
    """Calls in any order, ns: `end_ns` is the start where a duration is not known; `parents` are other calls."""

    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)

    def add(self, start_ns: int, end_ns: int) -> None:
        self.start_ns.append(start_ns)
        self.end_ns.append(max(end_ns, start_ns))
        self.parents.append([])

    def follow_in(self, sessions: Mapping[str, Sequence[int]]) -> None:
        """Each call of a session waits for the one that began before it."""
        for calls in sessions.values():
            ordered = self.by_start(calls)
            for earlier, later in zip(ordered, ordered[1:], strict=False):
                self.parents[later].append(earlier)

    def by_start(self, calls: Iterable[int]) -> list[int]:
        return sorted(calls, key=lambda call: (self.start_ns[call], call))

    def fork_and_join(self, child: Sequence[int], parent: Sequence[int]) -> None:
        """A session begins after the last call of its parent that had ended by then; the parent's first call that began
        after the session's last end waits for that end."""
        first = self.by_start(child)[0]
        before = [call for call in self.by_start(parent) if self.end_ns[call] <= self.start_ns[first]]
        if before:
            self.parents[first].append(before[-1])
        last = max(child, key=lambda call: (self.end_ns[call], call))
        joins = next((call for call in self.by_start(parent) if self.start_ns[call] >= self.end_ns[last]), None)
        if joins is not None:
            self.parents[joins].append(last)

    def tie(self, trace: Trace, options: ReadOptions) -> Trace:
        """`trace`, whose rows are the calls, with what each waits for and what lay between."""
        gaps = np.array([self._gap(call) for call in range(len(trace))], dtype=np.int64)
        overlaps = gaps < 0
        if overlaps.any() and options.strict:
            raise self._overlap(trace, int(np.argmax(overlaps)))
        trace = with_parents(trace, ragged([list(dict.fromkeys(p)) for p in self.parents]), np.maximum(gaps, 0))
        return trace.counted(overlapping_turns=int(overlaps.sum()))

    def _overlap(self, trace: Trace, row: int) -> TraceError:
        return fault(trace, row, f"begins before a call that it follows has ended; {FORBIDDEN}")

    def _gap(self, call: int) -> int:
        return self.start_ns[call] - max((self.end_ns[p] for p in self.parents[call]), default=self.start_ns[call])
