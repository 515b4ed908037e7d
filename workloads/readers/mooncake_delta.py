"""Mooncake jsonl whose later turns bring only what is new (aiperf and dynamo call it delta): keys as in `mooncake`.

A turn's prompt is the prompts of all turns before it in its session and its own tokens, whose lengths, the answers
included, are what the rows say. Its ids are theirs end to end; the last of each row may stand for fewer tokens. Turns
stand in the order of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, finish, previous_turns
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.mooncake import BLOCK_SIZE, REQUIRED, Links, add_rows, scoped, width_of
from schedlab.workloads.records import json_batches
from schedlab.workloads.trace import BlockIds, Trace

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope", "gap"})


def matches(record: Mapping[str, Any]) -> bool:
    return False


def read(path: Path, options: ReadOptions) -> Trace:
    unit, width = options.time_unit or "ms", options.block_size
    builder, links = Builder(), Links()
    for batch in json_batches(path, REQUIRED):
        links.add(batch, unit)
        width = width_of(batch, width) or BLOCK_SIZE
        add_rows(builder, batch, unit, width)
    trace = links.tie(builder.trace(path, "mooncake_delta", width or BLOCK_SIZE), options)
    trace = scoped(accumulated(trace), options.hash_scope or "global")
    said = (f"times in {unit}", "every row's input_length is what a turn adds", f"block ids stand for {width} tokens")
    return finish(trace.assuming(*said), options)


def accumulated(trace: Trace) -> Trace:
    """Every turn with the prompts of the turns before it in front of its own."""
    previous = previous_turns(trace.with_columns(stamped=np.zeros(len(trace), dtype=bool)))
    prompt = trace.prompt_tokens.copy()
    own = None if trace.ids is None else trace.ids.token_widths(trace.prompt_tokens)
    values, widths = list[np.ndarray](), list[np.ndarray]()
    for row, before in enumerate(previous.tolist()):
        if before >= 0:
            prompt[row] += prompt[before]
        if trace.ids is None or own is None:
            continue
        here = slice(int(trace.ids.offsets[row]), int(trace.ids.offsets[row + 1]))
        past = before >= 0
        values.append(np.concatenate([values[before], trace.ids.values[here]]) if past else trace.ids.values[here])
        widths.append(np.concatenate([widths[before], own[here]]) if past else own[here])
    if not values:
        return trace.with_columns(prompt_tokens=prompt)
    offsets = np.concatenate([[0], np.cumsum([len(v) for v in values])])
    return trace.with_columns(
        prompt_tokens=prompt, ids=BlockIds(offsets, np.concatenate(values), 0, np.concatenate(widths))
    )
