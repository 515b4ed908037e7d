"""What a run remembers: the recorder that the engine calls.

Knows the rows of the tables and what the summary is computed from, and keeps all of it in memory; writer.py sends the
rows to files instead. Knows nothing of scheduling: it is told what happened.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, SLO, EngineRequest, to_ns
from schedlab.framework.results.digest import ALL_DECODES, Decodes, Digest, Grants, Pairs, batch_text, pairs_text
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.metrics import (
    MEASURED,
    MEASURED_FROM,
    STATUSES,
    UNKNOWN,
    Measured,
    Measurement,
    observed_at,
    summarise,
)
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
    integers,
    join_columns,
    split,
    to_arrays,
    to_columns,
)
from schedlab.framework.results.vllm_bench import vllm_bench

if TYPE_CHECKING:
    from schedlab.framework.jump import StandingCost

_REQUEST_ROW = attrgetter(
    "_request_id", "source_row", "_client", "_session", "_priority", "_deadline_ns", "_slo", "_max_tokens",
    "_arrival_ns", "visible_ns", "first_scheduled_ns", "_first_token_ns", "finished_ns", "delivery_ns",
    "_num_prompt_tokens", "num_output_tokens", "cached_tokens", "resumed_tokens", "_num_preemptions", "swaps",
    "recomputed_tokens", "_state", "reason",
)  # fmt: skip
"""The columns of REQUESTS, in order, read off a request."""
DecisionRow = tuple[int, int, int, str, str, str, Sequence[int]]
"""index, repeat, now_ns, the batch, refusals and idle time as JSON, starts of the grants."""
FOLDED_STEPS = 1 << 16
"""Steps of jumps whose gaps are counted together: a few megabytes, however long the jumps."""
_SLO, _MAX_TOKENS = list(REQUESTS).index("slo"), list(REQUESTS).index("max_tokens")


class Recorder:
    """Told by the engine what happened; keeps tables, digest and what the summary needs.

    Rows are collected in flat buffers and folded by `flush` in the hundreds, which keeps a call at about a microsecond.
    """

    record = "full"

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self._limit = 1024  # rows of a buffer before it is folded
        self._step_buffer: Flat = []
        self._request_buffer: Flat = []
        self._demanded_buffer: list[int] = []
        self._decision_buffer: list[DecisionRow] = []
        self._run_batch = ""
        self._run_index = self._run_now_ns = self._run_repeat = 0
        self._digest = Digest()
        self._totals = StepTotals()
        self._gaps: defaultdict[int, int] = defaultdict(int)
        self._measured_gaps = self._gaps
        self._even_gaps: list[int] = []
        self._even_steps = 0  # of all of them
        self._free_buffer: list[int] = []
        self._outside_gaps: defaultdict[int, int] = defaultdict(int)
        self._windowed = measurement.windowed
        self._requests: list[np.ndarray] = []
        self._clients: dict[str, int] = {}
        self._slos: dict[str, SLO] = {}
        self._served: dict[str, int] | None = None
        self._demanded: dict[str, int] | None = None
        self._kept: dict[str, list[Columns]] = {"requests": [], "steps": []}
        self._kept_decisions: list[str] = []

    def step(
        self,
        index: int,
        repeat: int,
        now_ns: int,
        duration_ns: int,
        prefill_tokens: int,
        decode_tokens: int,
        prefill_requests: int,
        decode_requests: int,
        context_tokens: int,
        running: int,
        waiting: int,
        free_blocks: int,
        cached_blocks: int,
        copied_blocks: int,
        bound: str | None,
        scheduler_us: float | None,
        free_block_ns: int | None = None,
        free_blocks_min: int | None = None,
        device_us: float | None = None,
    ) -> None:
        """An executed batch, or `repeat` equal ones with their durations and scheduler times summed.

        Of several, the other columns are those of the first; where blocks were taken on the way, `free_block_ns` is the
        sum of free blocks times duration over all of them, and `free_blocks_min` the fewest that were free.

        `free_blocks` counts cached blocks that nobody owns, as `Step.free_blocks` does; `cached_blocks` are these.
        `scheduler_us` is None where the policy was not asked or its time is not known, `device_us`, what the
        device itself took, where no executor measures it.
        """
        buffer = self._step_buffer
        buffer += (
            index, repeat, now_ns, duration_ns, prefill_tokens, decode_tokens, prefill_requests, decode_requests,
            context_tokens, running, waiting, free_blocks, cached_blocks, copied_blocks, bound, scheduler_us,
            device_us,
        )  # fmt: skip
        if self._windowed:
            gaps = self._measured_gaps if self.measurement.inside(now_ns) else self._outside_gaps
            if gaps is not self._gaps:
                self._fold_even_gaps()
                self._gaps = gaps
        if free_block_ns is not None and free_blocks_min is not None and self._gaps is self._measured_gaps:
            self._free_buffer += (free_block_ns - free_blocks * duration_ns, free_blocks_min)
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
    ) -> None:
        """What a policy decided in one step. `decodes` is "all", or ids in batch order; empty if nobody decodes.

        `starts` are the positions from which the grants compute: of a prefix hit, or where the last grant ended.

        `idle_until_ns` is None for a step that did not idle, and for one that idles until something happens.
        """
        batch = batch_text(preempted, grants, decodes, decodes_at)
        decode_only = bool(decodes) and not grants and not preempted
        if decode_only and not refusals and idle_until_ns is None:
            self._decode_only(batch, index, now_ns, 1)
            return
        self._close_run()
        if decodes or grants or preempted:
            self._digest.add(batch, 1, decode_only)
        refused = pairs_text(refusals) if refusals else ""
        idle = "null" if idle_until_ns is None else repr(idle_until_ns / NS)
        self._decision_row(index, 1, now_ns, batch, refused, idle, starts)

    def decode_all(self, index: int, now_ns: int, repeat: int = 1) -> None:
        """A step, or `repeat` of them, that granted one token to each of `decoding` and did nothing else."""
        if self._run_batch is ALL_DECODES:
            self._run_repeat += repeat
        else:
            self._decode_only(ALL_DECODES, index, now_ns, repeat)

    def gap(self, gap_ns: int, count: int) -> None:
        """`count` output tokens, none of them a first one, came `gap_ns` after their predecessors."""
        self._gaps[(gap_ns + 500) // 1000] += count

    def gaps(self, gaps_ns: Iterable[int], count: int) -> None:
        """The same for each of several steps with equally many such tokens."""
        counts = self._gaps
        for gap_ns in gaps_ns:
            counts[(gap_ns + 500) // 1000] += count

    def even_gaps(self, count: int, cost: StandingCost, context: int, steps: int) -> None:
        """The same for `steps` steps of `count` such tokens each, which take what `cost` says, from `context` on."""
        self._even_gaps += (count, cost.base, cost.slope, cost.shift, context, steps)
        self._even_steps += steps
        if self._even_steps >= FOLDED_STEPS:
            self._fold_even_gaps()

    def request(self, request: EngineRequest) -> None:
        """A request reached its terminal state."""
        buffer = self._request_buffer
        buffer += _REQUEST_ROW(request)
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

    def _fold(self) -> None:
        steps, self._step_buffer = self._step_buffer, []
        requests, self._request_buffer = self._request_buffer, []
        demanded, self._demanded_buffer = self._demanded_buffer, []
        decisions, self._decision_buffer = self._decision_buffer, []
        self._fold_even_gaps()
        if steps:
            self._fold_steps(steps)
        if self._free_buffer:
            self._totals.correct_free(sum(self._free_buffer[::2]), min(self._free_buffer[1::2]))
            self._free_buffer = []
        if requests:
            self._fold_requests(requests, demanded)
        if decisions:
            self._keep_decisions(decisions)

    def close(self, *, backlog_end: int, counters: Mapping[str, int]) -> RunTables:
        """The end of the run: `backlog_end` requests never reached a terminal state."""
        self._close_run()
        self.flush()
        run, outside = self._measured(backlog_end)
        summary = summarise(run)
        result = {
            "status": "finished",
            "digest": self._digest.hexdigest(),
            "record": self.record,
            "measurement": self._statement(run, outside),
            "summary": summary,
            "counters": dict(counters),
            "error": None,
        }
        return RunTables(
            "finished", summary, str(result["digest"]), result, self._load, vllm_bench=vllm_bench(run, summary)
        )

    def _decode_only(self, batch: str, index: int, now_ns: int, repeat: int) -> None:
        """Extend the open row of equal decode-only steps, or open another."""
        if batch == self._run_batch:
            self._run_repeat += repeat
            return
        self._close_run()
        self._run_batch, self._run_index, self._run_now_ns, self._run_repeat = batch, index, now_ns, repeat

    def _close_run(self) -> None:
        if self._run_repeat:
            self._digest.add(self._run_batch, self._run_repeat, True)
            self._decision_row(self._run_index, self._run_repeat, self._run_now_ns, self._run_batch, "", "null")
            self._run_batch, self._run_repeat = "", 0

    def _decision_row(
        self, index: int, repeat: int, now_ns: int, batch: str, refused: str, idle: str, starts: Sequence[int] = ()
    ) -> None:
        self._decision_buffer.append((index, repeat, now_ns, batch, refused, idle, starts))
        if len(self._decision_buffer) >= self._limit:
            self._fold()

    def _fold_steps(self, flat: Flat) -> None:
        self._keep("steps", flat)
        columns = split(STEPS, flat)
        if self._windowed:
            columns = self._select(columns, "now_ns")
        if columns["index"]:
            self._totals.add(columns)

    def _fold_even_gaps(self) -> None:
        """Count the gaps of what `even_gaps` was told, step by step as if each had been reported."""
        rows, self._even_gaps, self._even_steps = self._even_gaps, [], 0
        if rows:
            for gaps_us, counts in _even_gaps(*integers(rows).reshape(-1, 6).T):
                for gap_us, count in zip(gaps_us.tolist(), counts.tolist(), strict=True):
                    self._gaps[gap_us] += count

    def _select(self, columns: RawColumns, stamp: str) -> RawColumns:
        """The rows whose `stamp` lies in the window."""
        rows = [i for i, ns in enumerate(columns[stamp]) if self.measurement.inside(ns)]
        return {name: [values[i] for i in rows] for name, values in columns.items()}

    def _fold_requests(self, flat: Flat, demanded: list[int]) -> None:
        width = len(REQUESTS)
        slos, limits = slice(_SLO, None, width), slice(_MAX_TOKENS, None, width)
        flat[slos] = self._slo_names(flat[slos])
        flat[limits] = [None if limit < 0 else limit for limit in flat[limits]]  # rejected before it had one
        self._requests.append(self._measure(split(REQUESTS, flat), demanded))
        self._keep("requests", flat)

    def _slo_names(self, slos: list[SLO | None]) -> list[str | None]:
        """Names of the classes; requests without one are judged by the default, if there is one."""
        judged = [self.measurement.slo if slo is None else slo for slo in slos]
        for slo in judged:
            if slo is not None and self._slos.setdefault(slo.name, slo) is not slo and self._slos[slo.name] != slo:
                raise ConfigError(f"two SLO classes are named {slo.name}: {self._slos[slo.name]} and {slo}")
        return [None if slo is None else slo.name for slo in judged]

    def _measure(self, raw: RawColumns, demanded: list[int]) -> np.ndarray:
        """MEASURED [N] of request rows whose times are in nanoseconds."""
        slo_codes: dict[str | None, int] = {name: i for i, name in enumerate(self._slos)}
        clients = self._clients
        out = np.empty(len(demanded), dtype=MEASURED)
        out["status"] = [STATUSES.index(status) for status in raw["status"]]
        out["client"] = [clients.setdefault(client, len(clients)) for client in raw["client"]]
        out["slo"] = [slo_codes.get(name, UNKNOWN) for name in raw["slo"]]
        out["demanded_tokens"] = integers(demanded)
        for column, name in MEASURED_FROM.items():
            values = raw[name]
            nullable = REQUESTS[name].endswith("?")
            out[column] = integers([UNKNOWN if v is None else v for v in values] if nullable else values)
        return out

    def _measured(self, backlog_end: int) -> tuple[Measured, int]:
        """What the summary is computed from, and how many requests lie outside the window."""
        requests = np.concatenate([np.empty(0, dtype=MEASURED), *self._requests])
        self._requests = [requests]
        outside = 0
        if self._windowed:
            inside = self.measurement.inside(requests["arrival_ns"])
            outside, requests = int((~inside).sum()), requests[inside]
            if outside and not len(requests):
                raise ConfigError(f"measure: none of {outside:,} requests arrived {self.measurement.window}")
        run = Measured(
            requests=requests,
            slos=list(self._slos.values()),
            clients=list(self._clients),
            steps=self._totals,
            gaps_us=Histogram(self._measured_gaps),
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


def decision_line(row: DecisionRow) -> str:
    """JSON of a row, with its newline."""
    index, repeat, now_ns, batch, refused, idle, starts = row
    return (
        f'{{"index":{index},"repeat":{repeat},"now_ns":{now_ns},{batch},"starts":[{",".join(map(str, starts))}],'
        f'"refusals":[{refused}],"idle_until_s":{idle}}}\n'
    )


def _even_gaps(
    count: np.ndarray, base: np.ndarray, slope: np.ndarray, shift: np.ndarray, context: np.ndarray, steps: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(gaps in microseconds, tokens that came after each) of rows of equal steps, at most FOLDED_STEPS at a time."""
    ends = np.cumsum(steps)
    for start in range(0, int(ends[-1]), FOLDED_STEPS):
        step = np.arange(start, min(start + FOLDED_STEPS, ends[-1]))
        row = np.searchsorted(ends, step, side="right")
        ahead = step - (ends - steps)[row]
        gaps_ns = (base[row] + slope[row] * (context[row] + count[row] * ahead)) >> shift[row]
        gaps_us, which = np.unique((gaps_ns + 500) // 1000, return_inverse=True)
        counts = np.zeros(len(gaps_us), dtype=np.int64)
        np.add.at(counts, which, count[row])
        yield gaps_us, counts
