"""Azure LLM inference traces (github.com/Azure/AzurePublicDataset): 2023, 2024 and the multimodal 2025 csv.

Wall-clock stamps with 0 to 9 fractional digits, with or without a UTC offset; no sessions, no prefix identity. Columns
are found by name, so that 2025's NumImages may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedlab.workloads.builder import Columns, build, finish
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, csv_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import stamps

OPTIONS = frozenset[str]()
KEYS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(KEYS)


def read(path: Path, options: ReadOptions) -> Trace:
    has_offset: bool | None = None

    def columns(batch: Batch) -> Columns:
        nonlocal has_offset
        when, aware = batch.parse("TIMESTAMP", stamps)
        if has_offset not in (None, aware):
            raise batch.fault(0, "TIMESTAMP changes between stamps with and without a UTC offset")
        has_offset = aware
        prompt, output = batch.counts("ContextTokens"), batch.counts("GeneratedTokens")
        return {"arrival_ns": when, "prompt_tokens": prompt, "output_tokens": output}

    trace = build(path, "azure", csv_batches(path, KEYS), columns, KEYS)
    return finish(trace, options, wall_clock=True)
