"""Sums over steps that time-weighted means and shares are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import add, mul

from schedlab.framework.results.tables import RawColumns

BOUNDS = ("compute", "memory", "overhead")
"""What can limit a step."""


@dataclass(slots=True)
class StepTotals:
    """Sums over steps, weighted by duration: exact integers of any size, so that grouping rows changes nothing."""

    steps: int = 0
    duration_ns: int = 0
    token_ns: int = 0
    sequence_ns: int = 0
    free_block_ns: int = 0
    free_blocks_min: int | None = None
    scheduler_ns: int = 0
    scheduled_steps: int = 0
    bound_ns: dict[str, int] = field(default_factory=dict)

    def add(self, steps: RawColumns) -> None:
        """Count rows: the columns of the steps table as lists, not empty."""
        duration = steps["duration_ns"]
        tokens = map(add, steps["prefill_tokens"], steps["decode_tokens"])
        sequences = map(add, steps["prefill_requests"], steps["decode_requests"])
        self.steps += sum(steps["repeat"])
        self.duration_ns += sum(duration)
        self.token_ns += sum(map(mul, duration, tokens))
        self.sequence_ns += sum(map(mul, duration, sequences))
        self.correct_free(sum(map(mul, duration, steps["free_blocks"])), min(steps["free_blocks"]))
        self._add_scheduler(steps)
        self._add_bounds(steps)

    def merge(self, other: StepTotals) -> None:
        """Count the steps of `other` too."""
        for name in ("steps", "duration_ns", "token_ns", "sequence_ns", "scheduler_ns", "scheduled_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.free_blocks_min is not None:
            self.correct_free(other.free_block_ns, other.free_blocks_min)
        for bound, ns in other.bound_ns.items():
            self.bound_ns[bound] = self.bound_ns.get(bound, 0) + ns

    def correct_free(self, free_block_ns: int, lowest: int) -> None:
        """Account for blocks that were taken between the steps of one row."""
        self.free_block_ns += free_block_ns
        self.free_blocks_min = lowest if self.free_blocks_min is None else min(lowest, self.free_blocks_min)

    def _add_scheduler(self, steps: RawColumns) -> None:
        """Only of the rows whose scheduler time is known."""
        times, repeats = steps["scheduler_us"], steps["repeat"]
        if None in times:
            known = [i for i, scheduler_us in enumerate(times) if scheduler_us is not None]
            times, repeats = [times[i] for i in known], [repeats[i] for i in known]
        self.scheduler_ns += sum([round(scheduler_us * 1e3) for scheduler_us in times])
        self.scheduled_steps += sum(repeats)

    def _add_bounds(self, steps: RawColumns) -> None:
        totals = self.bound_ns
        for duration_ns, name in zip(steps["duration_ns"], steps["bound"], strict=True):
            if name is not None:
                totals[name] = totals.get(name, 0) + duration_ns
        unknown = totals.keys() - set(BOUNDS)
        assert not unknown, f"a step is bound by one of {', '.join(BOUNDS)}, not by {', '.join(unknown)}"
