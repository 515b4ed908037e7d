"""LLMServingSim jsonl (github.com/casys-kaist/LLMServingSim): arrival_time_ns, input_toks, output_toks, token ids.

Where `input_tok_ids` are given they are the prompt, and prefixes are shared as the tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, finish, ignoring
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import counts

OPTIONS = frozenset[str]()
REQUIRED = ("input_toks", "output_toks", "arrival_time_ns")
TOKENS = "input_tok_ids"


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    builder, ignored = Builder(), set[str]()
    for batch in json_batches(path, REQUIRED):
        ignored |= batch.keys - {*REQUIRED, TOKENS}
        prompt = batch.counts("input_toks")
        if batch.has(TOKENS):
            check_tokens(batch, builder.add_ids(batch, batch.column(TOKENS)), prompt)
        builder.add(
            len(batch), source_row=batch.rows(), arrival_ns=batch.times("arrival_time_ns", "ns"),
            prompt_tokens=prompt, output_tokens=batch.counts("output_toks"),
        )  # fmt: skip
    trace = builder.trace(path, "llmservingsim", width=1)
    trace = ignoring(trace.with_columns(ids=None, tokens=trace.ids), ignored)
    return finish(trace, options)


def check_tokens(batch: Batch, found: np.ndarray, prompt_tokens: np.ndarray) -> None:
    wrong = np.flatnonzero((found >= 0) & (found != prompt_tokens))
    if len(wrong):
        row = int(wrong[0])
        raise batch.fault(row, f"{found[row]} {TOKENS} for a prompt of {prompt_tokens[row]} tokens")
    for row, ids in enumerate(batch.column(TOKENS)):
        if ids is not None:
            batch.parse(TOKENS, counts, ids, [row] * len(ids))
