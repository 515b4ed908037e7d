"""Decisions of runs: where two logs part, and whether a measured run, decided again, takes the same.

The same policy and requests at the logged times must give the same decisions: every boundary's logged `now` goes
through the recorded clock, on an executor that computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlab.framework.admission import Admission
from schedlab.framework.clock import RecordedClock
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import Executor
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import NS, EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.tables import Columns, RunTables
from schedlab.framework.source import Source


@dataclass(frozen=True, slots=True)
class DecidedAgain:
    """Digests of a run and of the same run decided again; `first`: the step of it at which they part."""

    measured: str
    decided_again: str
    first: int | None

    @property
    def equal(self) -> bool:
        return self.measured == self.decided_again


class LoggedEnds:
    """A source that learns of each end at its logged time, so that a session's next turn arrives when it did."""

    def __init__(self, source: Source, requests: Columns) -> None:
        self._source = source
        ends = np.nan_to_num(requests["finished_s"]) * NS
        self._ends = dict(zip(requests["request_id"], map(round, ends.tolist()), strict=True))

    def peek(self) -> int | None:
        return self._source.peek()

    def pop(self, now_ns: int) -> list[EngineRequest]:
        return self._source.pop(now_ns)

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        self._source.finished(request, self._ends[request.request_id])


def decide_again(
    run: RunTables, policy: Policy, source: Source, config: EngineConfig, executor: Executor,
    predictor: Predictor | None = None, admission: Admission | None = None,
) -> DecidedAgain:  # fmt: skip
    """Run `policy`, as it was before the run, over `source` at the boundaries that `run` logged.

    `executor` needs no model, but the block sizes of the one that was measured. ConfigError for a run whose log leaves
    boundaries out, and for requests that end by what a model says.
    """
    if (run.steps["repeat"] > config.max_chained_steps).any():
        raise ConfigError(
            "recorded: expected a step for each boundary, found jumps; only measured runs are decided again"
        )
    clock = RecordedClock(run.steps["now_ns"].tolist(), run.steps["duration_ns"].tolist())
    recorder = Recorder(Measurement(config.max_num_seqs, config.num_blocks))
    engine = Engine(policy, executor, LoggedEnds(source, run.requests), config, clock, recorder, predictor, admission)
    engine.run()
    again = recorder.close(backlog_end=engine.num_unfinished, counters={})
    assert run.digest is not None and again.digest is not None
    parted = parting(run.decisions, again.decisions) if run.digest != again.digest else None
    return DecidedAgain(run.digest, again.digest, parted[0] if parted else None)


def batches(decisions: Columns) -> Iterator[tuple[Any, int, int]]:
    """What each row executes, its first step and how many it stands for; steps that idle execute nothing."""
    for row in range(len(decisions["index"])):
        batch = tuple(decisions[name][row] for name in ("preempted", "grants", "decodes", "rejected"))
        if any(batch):
            index, repeat, decodes_at = (int(decisions[name][row]) for name in ("index", "repeat", "decodes_at"))
            yield (*batch, decodes_at), index, repeat


def parting(a: Columns, b: Columns) -> tuple[int, int] | None:
    """The step of each run from which on they decide differently; None if they never do.

    Where one ends first, that is the step after its last.
    """
    rows = batches(a), batches(b)
    heads = [next(side, None) for side in rows]
    done, ends = [0, 0], [0, 0]
    while heads[0] is not None and heads[1] is not None and heads[0][0] == heads[1][0]:
        together = min(head[2] - past for head, past in zip(heads, done, strict=True) if head is not None)
        for side, head in enumerate(heads):
            assert head is not None
            done[side] += together
            ends[side] = head[1] + done[side]
            if done[side] == head[2]:
                heads[side], done[side] = next(rows[side], None), 0
    if heads == [None, None]:
        return None
    at = [ends[side] if head is None else head[1] + done[side] for side, head in enumerate(heads)]
    return at[0], at[1]
