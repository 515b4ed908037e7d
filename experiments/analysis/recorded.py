"""A measured run decided again: the same policy and requests at the logged times must give the same decisions.

Every step boundary's logged `now` goes through the recorded clock, on an executor that computes nothing. Knows a run's
tables; knows nothing of how long a step should have taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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

DECIDED = ("preempted", "grants", "decodes", "decodes_at", "repeat")
"""The columns of a decision that its digest covers."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Digests of a run and of the same run decided again; `first`: the index of the first step where they part."""

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
    predictor: Predictor | None = None,
) -> Agreement:  # fmt: skip
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
    engine = Engine(policy, executor, LoggedEnds(source, run.requests), config, clock, recorder, predictor)
    engine.run()
    again = recorder.close(backlog_end=engine.num_unfinished, counters={})
    assert run.digest is not None and again.digest is not None
    first = None if run.digest == again.digest else first_difference(run.decisions, again.decisions)
    return Agreement(run.digest, again.digest, first)


def first_difference(a: Columns, b: Columns) -> int:
    """The index of the first step whose decision differs, or that only one of the two has."""
    rows_a, rows_b = (zip(*(table[name] for name in DECIDED), strict=True) for table in (a, b))
    for at, (row_a, row_b) in enumerate(zip(rows_a, rows_b, strict=False)):
        if row_a != row_b:
            return int(a["index"][at])
    longer = max(a["index"], b["index"], key=len)
    return int(longer[min(len(a["index"]), len(b["index"]))])
