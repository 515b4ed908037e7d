"""Azure LLM inference traces (github.com/Azure/AzurePublicDataset): 2023, 2024 and the multimodal 2025 csv.

Wall-clock stamps with 0 to 9 fractional digits, with or without a UTC offset; no sessions, no prefix identity. Columns
are found by name, so that 2025's NumImages may stand anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schedlab.workloads.builder import Builder, finish
from schedlab.workloads.readers import ReadOptions
from schedlab.workloads.records import csv_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import stamps

OPTIONS = frozenset[str]()
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(COLUMNS)


def read(path: Path, options: ReadOptions) -> Trace:
    builder, has_offset = Builder(), None
    for batch in csv_batches(path, COLUMNS):
        when, aware = batch.parse("TIMESTAMP", stamps)
        if aware is not (has_offset := aware if has_offset is None else has_offset):
            raise batch.fault(0, "TIMESTAMP changes between stamps with and without a UTC offset")
        builder.add(
            len(batch),
            source_row=batch.rows(),
            arrival_ns=when,
            prompt_tokens=batch.counts("ContextTokens"),
            output_tokens=batch.counts("GeneratedTokens"),
        )
    trace = builder.trace(path, "azure")
    return finish(trace, keep_failed=options.keep_failed, strict=options.strict, wall_clock=True)
