"""Alibaba Bailian (Qwen) usage traces: jsonl like Mooncake's, but times in seconds and block ids of 16 tokens.

`chat_id` names a request, `parent_chat_id` (-1 for none) the one that it continues, `turn` its place; the session is
the chat that the chain of parents begins with. No think times: turns arrive as stamped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.workloads.builder import Builder, check_id_counts, finish, ignoring
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.mooncake import scoped
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import integers

OPTIONS = frozenset({"time_unit", "block_size", "hash_scope"})
BLOCK_SIZE = 16
REQUIRED = ("chat_id", "timestamp", "input_length", "output_length", "hash_ids")
KNOWN = {*REQUIRED, "parent_chat_id", "type", "turn"}


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    unit, width = options.time_unit or "s", options.block_size or BLOCK_SIZE
    builder, ignored, roots = Builder(), set[str](), Roots()
    for batch in json_batches(path, REQUIRED):
        ignored |= batch.keys - KNOWN
        prompt = batch.counts("input_length")
        check_id_counts(batch, builder.add_ids(batch, batch.column("hash_ids")), prompt, width, floor=False)
        columns: dict[str, Any] = {"kind": batch.labels("type")} if batch.has("type") else {}
        columns["session"] = roots.of(batch)
        builder.add(
            len(batch), source_row=batch.rows(), arrival_ns=batch.times("timestamp", unit), prompt_tokens=prompt,
            output_tokens=batch.counts("output_length"), **columns,
        )  # fmt: skip
    trace = builder.trace(path, "bailian", width)
    trace = scoped(ignoring(trace, ignored), options.hash_scope or "global")
    trace = trace.assuming(f"times in {unit}", f"block ids stand for {width} tokens")
    return finish(trace, options)


class Roots:
    """The chat that each chat goes back to; a parent that is not in the file begins a session of its own."""

    def __init__(self) -> None:
        self._root: dict[int, int] = {}

    def of(self, batch: Batch) -> list[str | None]:
        chats = batch.parse("chat_id", integers)
        parents = np.full(len(batch), -1)
        if batch.has("parent_chat_id"):
            parents = batch.parse("parent_chat_id", lambda v: integers(v, low=-1))
        for row, (chat, parent) in enumerate(zip(chats.tolist(), parents.tolist(), strict=True)):
            if chat in self._root:
                raise batch.fault(row, f"chat_id {chat} stands in a row above too")
            self._root[chat] = chat if parent < 0 else self._root.get(parent, parent)
        return [str(self._root[chat]) for chat in chats.tolist()]
