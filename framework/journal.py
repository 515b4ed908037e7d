"""Turns decided steps into the rows of the log, and numbers them. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from schedlab.framework.batch import Batch
from schedlab.framework.executor import StepResult
from schedlab.framework.ledger import Ledger
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow
from schedlab.framework.step import Decision

_step_row: Callable[[tuple[object, ...]], StepRow] = partial(tuple.__new__, StepRow)
"""A row of its values in order: the class's own constructor is five times as slow, and is called for every boundary."""


class Stretch:
    """Equal steps in a row: the inputs and the bound of the first, when it and the last of them ended, and the gaps
    between tokens.

    `gaps` are those that all of decoding share, of the first step too, unless its last tokens are of several times,
    which `first_gaps` then counts. A chain's duration is that of its first step; its `followers` take 0, as their
    tokens come with the chain's.
    """

    __slots__ = (
        "begin_ns", "bound", "context", "decodes", "end_ns", "first_gaps", "followers", "free", "free_block_ns",
        "free_min", "gaps", "second_ns", "steps", "unowned",
    )  # fmt: skip

    def __init__(
        self, now: int, decodes: int, context: int, duration_ns: int, bound: str | None, free: int, unowned: int
    ) -> None:
        self.begin_ns = now
        self.decodes = decodes
        self.context = context
        self.bound = bound
        self.free = self.free_min = free
        self.unowned = unowned
        self.free_block_ns = free * duration_ns
        self.end_ns = self.second_ns = now + duration_ns
        self.first_gaps: list[tuple[int, int]] = []
        self.gaps: list[int] = []
        self.steps = self.followers = 0

    def extend(self, duration_ns: int, free: int) -> None:
        """What follows takes `duration_ns`, with `free` blocks left."""
        self.gaps.append(duration_ns)
        self.end_ns += duration_ns
        self.free_min = min(self.free_min, free)
        self.free_block_ns += duration_ns * free

    def follow(self, steps: int) -> None:
        """What was last is a chain of `steps`, or one step."""
        if steps > 1:
            if not self.steps:
                self.second_ns = self.begin_ns
            self.gaps += [0] * (steps - 1)
            self.followers += steps - 1
        self.steps += steps


class Journal:
    """Writes what was executed to `recorder`, before the commit changes the books. `num_steps` are logged so far.

    `modelled_us` is the scheduler's time in a step that nobody measured.
    """

    def __init__(self, recorder: Recorder, ledger: Ledger, modelled_us: float) -> None:
        self.recorder = recorder
        self.num_steps = 0
        self._ledger = ledger
        self._modelled_us = modelled_us

    def step(self, decision: Decision, batch: Batch, result: StepResult, duration_ns: int, scheduler_us: float) -> None:
        """One decision row and one step row."""
        self._decision(decision, batch.steps)
        decodes, prefills, ledger = len(batch.decodes), batch.prefills, self._ledger
        context = batch.decode_context
        for _, start, count in prefills:
            context += start + count
        row = _step_row((
            self.num_steps, batch.steps, decision.now_ns, duration_ns, batch.prefill_tokens, decodes, len(prefills),
            decodes, context, len(ledger.running), len(ledger.waiting), ledger.cache.num_free,
            ledger.cache.num_unowned, len(batch.copies_out) + len(batch.copies_in), result.bound, scheduler_us,
            result.device_us,
        ))  # fmt: skip
        self.recorder.step(row)
        self.num_steps += batch.steps

    def stretch(self, decision: Decision | None, stretch: Stretch) -> None:
        """One row for the stretch: the cost inputs of its first step, and the total duration."""
        recorder, ledger, steps, n = self.recorder, self._ledger, stretch.steps, stretch.decodes
        left, since = steps, stretch.begin_ns
        if decision is not None and decision.refusals:
            self._decision(decision)
            left, since = left - 1, stretch.second_ns
        if left:
            recorder.decode_all(self.num_steps + steps - left, since, left)
        row = _step_row((
            self.num_steps, steps, stretch.begin_ns, stretch.end_ns - stretch.begin_ns, 0, n, 0, n, stretch.context,
            len(ledger.running), len(ledger.waiting), stretch.free, stretch.unowned, 0, stretch.bound,
            self._modelled_us * (steps - stretch.followers), None,
        ))  # fmt: skip
        recorder.step(row, stretch.free_block_ns, stretch.free_min)
        for gap_ns, count in stretch.first_gaps:
            recorder.gap(gap_ns, count)
        recorder.gaps(stretch.gaps, n)
        self.num_steps += steps

    def _decision(self, decision: Decision, steps: int = 1) -> None:
        """What was granted and preempted, and what was refused. A chain decides all its steps at once."""
        changes = decision.prefills or decision.preempted or decision.rejected or decision.refusals
        if decision.decodes_all and not changes:
            self.recorder.decode_all(self.num_steps, decision.now_ns, steps)
            return
        grants, starts = [], []
        for request, start, count in decision.prefills:
            grants.append((request._request_id, count))
            starts.append(start)
        idle = decision.idle_until_ns
        self.recorder.decision(
            self.num_steps,
            decision.now_ns,
            [(victim._request_id, mode) for victim, mode, _ in decision.preempted] if decision.preempted else [],
            grants,
            "all" if decision.decodes_all else [request._request_id for request in decision.decodes],
            decision.decodes_at,
            decision.refusals,
            None if idle is None or math.isinf(idle) else int(idle),
            starts,
            [(request._request_id, reason) for request, reason in decision.rejected],
        )
        if steps > 1:
            self.recorder.decode_all(self.num_steps + 1, decision.now_ns, steps - 1)
