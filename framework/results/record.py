"""What a run remembers: the recorder that the engine reports to. It keeps its rows in memory; writer.py has files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from schedlab.framework.attempts import TIMED_OUT
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import EngineRequest, to_ns
from schedlab.framework.results.attempts import Attempts
from schedlab.framework.results.decision_rows import DecisionRows
from schedlab.framework.results.digest import Decodes, Grants, Pairs
from schedlab.framework.results.groups import ProgramTimes, group_figures
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.measured_requests import MeasuredRequests
from schedlab.framework.results.metrics import Measured, Measurement, Summary, observed_at, summarise
from schedlab.framework.results.pressure import Pressure
from schedlab.framework.results.rows import DecisionRow, StepRow, decision_line, request_row
from schedlab.framework.results.step_totals import StepTotals
from schedlab.framework.results.tables import (
    DECISIONS,
    REQUESTS,
    SCHEMAS,
    STEPS,
    Columns,
    Flat,
    RawColumns,
    RunTables,
    from_json_lines,
    join_columns,
    split,
    to_arrays,
    to_columns,
)
from schedlab.framework.results.token_gaps import TokenGaps
from schedlab.framework.results.vllm_bench import vllm_bench

_SLO, _MAX_TOKENS = list(REQUESTS).index("slo"), list(REQUESTS).index("max_tokens")


class Recorder:
    """Told by the engine what happened; keeps tables, digest and what the summary needs.

    Rows are collected in flat buffers and folded by `flush` in the hundreds, which keeps a call at about a microsecond.
    A subclass may keep rows elsewhere (`_keep`, `_keep_decisions`, `_load`) or ignore reports; it does not change them.
    """

    record = "full"
    meets_clients = True
    """False for a part of a fleet, where a client may try elsewhere."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self._limit = 1024  # rows of a buffer before it is folded
        self._step_buffer: Flat = []
        self._request_buffer: Flat = []
        self._demanded_buffer: list[int] = []
        self._free_buffer: list[int] = []
        self._windowed = measurement.windowed
        self._decisions = DecisionRows()
        self._gaps = TokenGaps()
        self._totals = StepTotals()
        self._requests = MeasuredRequests(measurement.slo)
        self._reasons: Counter[str] = Counter()  # of requests that were not served, up to a colon
        self._attempts = Attempts()
        self._num_ended = 0  # requests so far
        self._programs = ProgramTimes()
        self._served: dict[str, int] | None = None
        self._demanded: dict[str, int] | None = None
        self._pressure = Pressure()
        self._step_rows = 0
        self._kept: dict[str, list[Columns]] = {"requests": [], "steps": []}
        self._kept_decisions: list[str] = []

    def step(self, row: StepRow, free_block_ns: int | None = None, free_blocks_min: int | None = None) -> None:
        """A row of executed steps.

        Where blocks were taken between them, `free_block_ns` is the sum of free blocks times duration over all of
        them, and `free_blocks_min` the fewest that were free.
        """
        buffer = self._step_buffer
        buffer += row
        if self._windowed:
            self._gaps.inside = self.measurement.inside(row.now_ns)
        if free_block_ns is not None and free_blocks_min is not None and self._gaps.inside:
            self._free_buffer += (free_block_ns - row.free_blocks * row.duration_ns, free_blocks_min)
        if len(buffer) >= self._limit * len(STEPS):
            self._fold()

    def decision(
        self,
        index: int,
        now_ns: int,
        preempted: Pairs,
        grants: Grants,
        decodes: Decodes,
        decodes_at: int,
        refusals: Pairs,
        idle_until_ns: int | None,
        starts: Sequence[int] = (),
        rejected: Pairs = (),
    ) -> None:
        """What a policy decided in one step. `decodes` is "all", or ids in batch order; empty if nobody decodes.

        `starts` are the positions from which the grants compute: of a prefix hit, or where the last grant ended.
        `rejected` are turned away, each with its reason.

        `idle_until_ns` is None for a step that did not idle, and for one that idles until something happens.
        """
        self._decisions.add(
            index, now_ns, preempted, grants, decodes, decodes_at, refusals, idle_until_ns, starts, rejected
        )
        if len(self._decisions.rows) >= self._limit:
            self._fold()

    def decode_all(self, index: int, now_ns: int, repeat: int = 1) -> None:
        """A step, or `repeat` of them, that granted one token to each of `decoding` and did nothing else."""
        self._decisions.add_decodes(index, now_ns, repeat)

    def gap(self, gap_ns: int, count: int) -> None:
        """`count` output tokens, none of them a first one, came `gap_ns` after their predecessors."""
        self._gaps.add(gap_ns, count)

    def gaps(self, gaps_ns: Iterable[int], count: int) -> None:
        """The same for each of several steps with equally many such tokens."""
        self._gaps.add_each(gaps_ns, count)

    def request(self, request: EngineRequest) -> None:
        """A request reached its terminal state."""
        buffer = self._request_buffer
        buffer += request_row(request)
        if request._program is not None and self.measurement.inside(request._arrival_ns):
            self._programs.add(request._program, request)
        turned_away = request._state == "rejected" or request.reason == TIMED_OUT
        if turned_away and self.measurement.inside(request._arrival_ns):
            self._reasons[(request.reason or "").partition(":")[0]] += 1
        if request.tried is not None and self.meets_clients:
            self._attempts.add(request.logical_id, request.tried, self._num_ended)
        self._num_ended += 1
        output = request.recorded_output_tokens
        demanded = request.num_tokens if output is None else request.num_prompt_tokens + output
        self._demanded_buffer.append(demanded)
        if len(self._demanded_buffer) >= self._limit:
            self._fold()

    def last_arrival(self, now_ns: int, served: Mapping[str, int], demanded: Mapping[str, int] | None = None) -> None:
        """Tokens served to each client so far, and asked for if known; the last call counts."""
        self._served = dict(served)
        self._demanded = None if demanded is None else dict(demanded)

    def next_edge_ns(self, now_ns: int) -> float:
        """The next instant after `now_ns` at which the measured window begins or ends; infinite if none follows."""
        if not self._windowed:
            return math.inf
        edges = (to_ns(edge) for edge in (self.measurement.start_s, self.measurement.stop_s) if edge is not None)
        return min((edge for edge in edges if edge > now_ns), default=math.inf)

    def flush(self) -> None:
        """Fold what is buffered into totals and columns, and keep the rows."""
        self._fold()

    def close(self, *, backlog_end: int, counters: Mapping[str, int]) -> RunTables:
        """The end of the run: `backlog_end` requests never reached a terminal state."""
        self._decisions.complete()
        self.flush()
        run, outside = self._measured(backlog_end)
        summary = {
            **summarise(run), **group_figures(run, self._reasons), **self._programs.figures(),
            **self._attempts.figures(self._requests.whole(), run.slos, self.measurement), **self._more_figures(),
        }  # fmt: skip
        if abandoned := counters.get("abandoned"):
            summary["requests/abandoned"] = abandoned
        result = {
            "status": "finished",
            "digest": self._hexdigest(),
            "record": self.record,
            "measurement": self._statement(run, outside),
            "summary": summary,
            "pressure": self._told_pressure(),
            "rows": {"requests": len(self._requests.whole()), "steps": self._step_rows},
            "counters": dict(counters),
            "error": None,
            **self._more_result(),
        }
        return RunTables(
            "finished", summary, str(result["digest"]), result, self._load, vllm_bench=vllm_bench(run, summary)
        )

    def _fold(self) -> None:
        steps, self._step_buffer = self._step_buffer, []
        requests, self._request_buffer = self._request_buffer, []
        demanded, self._demanded_buffer = self._demanded_buffer, []
        decisions = self._decisions.take()
        if steps:
            self._fold_steps(steps)
        if self._free_buffer:
            self._totals.correct_free(sum(self._free_buffer[::2]), min(self._free_buffer[1::2]))
            self._free_buffer = []
        if requests:
            self._fold_requests(requests, demanded)
        if decisions:
            self._keep_decisions(decisions)

    def _fold_steps(self, flat: Flat) -> None:
        self._keep("steps", flat)
        columns = split(STEPS, flat)
        self._pressure.add(columns)
        self._step_rows += len(columns["index"])
        if self._windowed:
            columns = self._select(columns, "now_ns")
        if columns["index"]:
            self._totals.add(columns)

    def _select(self, columns: RawColumns, stamp: str) -> RawColumns:
        """The rows whose `stamp` lies in the window."""
        rows = [i for i, ns in enumerate(columns[stamp]) if self.measurement.inside(ns)]
        return {name: [values[i] for i in rows] for name, values in columns.items()}

    def _fold_requests(self, flat: Flat, demanded: list[int]) -> None:
        width = len(REQUESTS)
        slos, limits = slice(_SLO, None, width), slice(_MAX_TOKENS, None, width)
        flat[slos] = self._requests.slo_names(flat[slos])
        flat[limits] = [None if limit < 0 else limit for limit in flat[limits]]  # rejected before it had one
        self._requests.add(split(REQUESTS, flat), demanded)
        self._keep("requests", flat)

    def steps_and_gaps(self) -> tuple[StepTotals, Mapping[int, int]]:
        """Sums over the steps, and the gaps between tokens by microseconds; of all that was reported and flushed."""
        return self._totals, self._gaps.measured

    @property
    def served(self) -> Mapping[str, int] | None:
        """Tokens served to each client up to the last arrival; None before that."""
        return self._served

    @property
    def demanded(self) -> Mapping[str, int] | None:
        """Tokens asked for by each client up to the last arrival."""
        return self._demanded

    def _more_figures(self) -> Summary:
        """Keys that a kind of recorder adds to the summary."""
        return {}

    def _more_result(self) -> dict[str, Any]:
        """What it adds to the result."""
        return {}

    def _hexdigest(self) -> str:
        return self._decisions.hexdigest()

    def _told_pressure(self) -> dict[str, float | int | None]:
        return self._pressure.told(self._requests.whole())

    def _measured(self, backlog_end: int) -> tuple[Measured, int]:
        """What the summary is computed from, and how many requests lie outside the window."""
        requests, outside = self._requests.whole(), 0
        if self._windowed:
            inside = self.measurement.inside(requests["arrival_ns"])
            outside, requests = int((~inside).sum()), requests[inside]
            if outside and not len(requests):
                raise ConfigError(f"measure: none of {outside:,} requests arrived {self.measurement.window}")
        run = Measured(
            requests=requests,
            slos=list(self._requests.slos.values()),
            clients=self._requests.clients,
            steps=self._totals,
            gaps_us=Histogram(self._gaps.measured),
            max_num_seqs=self.measurement.max_num_seqs,
            num_blocks=self.measurement.num_blocks,
            backlog_end=backlog_end,
            served=self._served,
            demanded=self._demanded,
        )
        return run, outside

    def _statement(self, run: Measured, outside: int) -> dict[str, Any]:
        """How the summary was measured, for result.json."""
        window = {"start_s": self.measurement.start_s, "stop_s": self.measurement.stop_s, "requests_outside": outside}
        return {
            "observed_at": "client" if self.measurement.at_client else observed_at(run.requests),
            "window": window,
            "slo": [asdict(slo) for slo in run.slos],
            "max_num_seqs": run.max_num_seqs,
            "num_blocks": run.num_blocks,
        }

    def _keep(self, table: str, flat: Flat) -> None:
        self._kept[table].append(to_arrays(SCHEMAS[table], to_columns(SCHEMAS[table], flat)))

    def _keep_decisions(self, rows: Sequence[DecisionRow]) -> None:
        self._kept_decisions += map(decision_line, rows)

    def _load(self, table: str) -> Columns:
        if table == "decisions":
            return to_arrays(DECISIONS, from_json_lines(DECISIONS, self._kept_decisions))
        return join_columns(SCHEMAS[table], self._kept[table])
