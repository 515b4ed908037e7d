"""Run directories with made-up rows, for what reads them: no engine is involved."""

from __future__ import annotations

from pathlib import Path

from schedlab.framework.content import UniqueContent
from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.rows import StepRow
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter

MS = 1_000_000
MEASUREMENT = Measurement(max_num_seqs=8, num_blocks=64, slo=SLO("default", ttft_s=1.0, tpot_s=0.1))


def request(row: int, ttft_ms: int = 100, gap_ms: int = 20, tokens: int = 4) -> EngineRequest:
    made = EngineRequest(
        f"r{row}", row * 50 * MS, 32, UniqueContent(row), recorded_output_tokens=tokens, source_row=row
    )
    made._first_token_ns = made._arrival_ns + ttft_ms * MS
    made.first_scheduled_ns = made._arrival_ns + 10 * MS
    made.finished_ns = made._first_token_ns + (tokens - 1) * gap_ms * MS
    made._state = "finished"
    made._base_tokens = 32 + tokens
    made.cached_tokens = 0
    return made


def run(directory: Path, requests: int = 20, ttft_ms: int = 100, *, record: str = "full") -> RunTables:
    """A finished run of `requests` requests that take one prefill step and three decode steps each."""
    with RunWriter(directory, MEASUREMENT, record=record) as writer:
        for row in range(requests):
            now = row * 50 * MS
            writer.step(StepRow(2 * row, 1, now, 20 * MS, 32, 0, 1, 0, 32, 1, 2, 60, 1, 0, "compute", 15.0, None))
            decodes = (0, 3, 0, 3, 99, 1, 1, 60, 1, 0, "memory", 45.0, None)
            writer.step(StepRow(2 * row + 1, 3, now + 20 * MS, 30 * MS, *decodes))
            writer.gap(20 * MS, 3)
            writer.decision(2 * row, now, [], [(f"r{row}", 32)], [], 0, [], None, [0])
            writer.decode_all(2 * row + 1, now + 20 * MS, 3)
            writer.request(request(row, ttft_ms))
        return writer.close(backlog_end=0, counters={})
