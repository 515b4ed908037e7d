"""Prompts as text: a file of JSON lines through a tokenizer, whose time is each request's preparation.

A row has `prompt` (text) or `messages` (a conversation for the chat template), and if known `arrival_s`, `max_tokens`,
`output_tokens` (a replay forces this length; without it the request is live), `request_id`, `client` and `priority`.
Selection, arrivals and scaling are those of every recorded workload.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, ModelError
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.framework.request import SLO, EngineRequest, SamplingParams
from schedlab.framework.source import Source
from schedlab.framework.stages import Staged
from schedlab.workloads.builder import Builder
from schedlab.workloads.files import shown
from schedlab.workloads.records import Batch, json_batches, to_last_whole_row
from schedlab.workloads.source import decode_sampling
from schedlab.workloads.trace import BlockIds, Labels, Trace
from schedlab.workloads.values import MAX_NS, integers
from schedlab.workloads.workload import Recorded

LENGTHS = ("max_tokens", "output_tokens")
NAMES = ("request_id", "client")
KNOWN = frozenset({"prompt", "messages", "arrival_s", "priority", *LENGTHS, *NAMES})


@dataclass(kw_only=True)
class Text(Recorded):
    """A file of prompts. `tokenizer` is the model's directory, as `model.path` gives it.

    chat              : put plain prompts into the model's chat template, as a user's first message
    measure_tokenizer : the time that the tokenizer took for a prompt is that request's preparation; false: no time
    sampling          : how tokens of live requests are drawn, as `SamplingParams`
    """

    name: str = "text"
    chat: bool = False
    measure_tokenizer: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measures(self) -> bool:
        """Whether loading it again gives other times."""
        return self.measure_tokenizer

    def read(self) -> Trace:
        if self.tokenizer is None:
            raise ConfigError(f"workload {self.name} needs workload.tokenizer: model=smollm2, or a model's directory")
        path, tokenizer = self._file(), Tokenizer(self.tokenizer)
        trace = to_last_whole_row(lambda: read_prompts(path, tokenizer, self.chat, self._sampling()), self.strict)
        if self.priority_order == "smaller_first" and trace.priority is not None:
            trace = trace.with_columns(priority=-trace.priority)
        return trace.with_columns(name=self.name)

    def _sampling(self) -> str | None:
        """The sampling parameters as JSON, checked."""
        if "max_tokens" in self.sampling:
            raise ConfigError("workload.sampling.max_tokens: expected workload.max_tokens in its place")
        text = json.dumps(dict(self.sampling))
        return text if decode_sampling(text) != SamplingParams() else None

    def source(
        self, max_model_len: int, slo: SLO | None = None, seed: int = 0, *,
        prompt_seed: int = 0, vocab_size: int | None = None, trace: Trace | None = None,
    ) -> Source:  # fmt: skip
        trace = self.load(seed) if trace is None else trace
        _check_vocabulary(trace, vocab_size)
        own = trace.preparation_ns
        timeless = trace.with_columns(preparation_ns=None)
        source = super().source(
            max_model_len, slo, seed, prompt_seed=prompt_seed, vocab_size=vocab_size, trace=timeless
        )
        if own is None or not self.measure_tokenizer:
            return source
        spent = dict(zip(trace.source_row.tolist(), own.tolist(), strict=True))

        def preparation_ns(request: EngineRequest) -> int:
            return spent[request.source_row]  # type: ignore[index]

        return Staged(source, preparation_ns)


def read_prompts(path: Path, tokenizer: Tokenizer, chat: bool = False, sampling: str | None = None) -> Trace:
    """The rows of `path` with their tokens; `preparation_ns` is the CPU time that the tokenizer took for each.

    TraceError for a row that is no prompt.
    """
    builder, seen = Builder(), set[str]()
    tokens: list[list[int]] = []
    for batch in json_batches(path, ()):
        seen |= batch.keys
        if not tokens:
            _encode(batch, 0, tokenizer, chat)  # the first use builds tables that later ones find
        encoded, spent = zip(*(_timed(batch, row, tokenizer, chat) for row in range(len(batch))), strict=True)
        tokens += encoded
        lengths = {"prompt_tokens": _array(map(len, encoded)), "preparation_ns": _array(spent)}
        builder.add(len(batch), **_columns(batch), **lengths)
    trace = builder.trace(path, "text")
    offsets = np.concatenate([[0], np.cumsum(trace.prompt_tokens)]).astype(np.int64)
    ids = BlockIds(offsets, _array(token for row in tokens for token in row), 1)
    drawn = None if sampling is None else Labels(np.zeros(len(trace), dtype=np.int64), (sampling,))
    if ignored := sorted(seen - KNOWN):
        trace = trace.assuming(f"ignored: {', '.join(ignored)}")
    return trace.with_columns(tokens=ids, sampling=drawn).sorted()


def _columns(batch: Batch) -> dict[str, Any]:
    """What a batch says beside its prompts; what is not said is unknown (-1): no cap, and a live request."""
    columns: dict[str, Any] = {"source_row": batch.rows(), "output_tokens": np.full(len(batch), -1, dtype=np.int64)}
    columns |= {name: _optional(batch, name) for name in LENGTHS if batch.has(name)}
    columns |= {name: batch.labels(name) for name in NAMES if batch.has(name)}
    if batch.has("priority"):
        columns["priority"] = batch.parse("priority", lambda v: integers(v, -MAX_NS, MAX_NS, absent=0))
    if batch.has("arrival_s"):
        columns["arrival_ns"] = batch.times("arrival_s", "s")
    return columns


def _optional(batch: Batch, name: str) -> np.ndarray:
    """Counts of at least 1, -1 where a row has none."""
    out = np.full(len(batch), -1, dtype=np.int64)
    for row, value in enumerate(batch.column(name)):
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise batch.fault(row, f"{name} is {shown(value)}, expected an integer of at least 1")
        out[row] = value
    return out


def _timed(batch: Batch, row: int, tokenizer: Tokenizer, chat: bool) -> tuple[list[int], int]:
    began = time.thread_time_ns()
    encoded = _encode(batch, row, tokenizer, chat)
    return encoded, time.thread_time_ns() - began


def _encode(batch: Batch, row: int, tokenizer: Tokenizer, chat: bool) -> list[int]:
    prompt, messages = batch.column("prompt")[row], batch.column("messages")[row]
    try:
        if type(messages) is list and prompt is None and all(type(message) is dict for message in messages):
            return tokenizer.encode(messages)
        if type(prompt) is str and messages is None:
            return tokenizer.encode(prompt, chat)
    except ModelError as error:
        raise batch.fault(row, str(error)) from None
    found = f"prompt {shown(prompt)} and messages {shown(messages)}"
    raise batch.fault(row, f"expected a text as prompt, or a list of objects as messages; found {found}")


def _check_vocabulary(trace: Trace, vocab_size: int | None) -> None:
    if vocab_size is None or trace.tokens is None or not len(trace.tokens.values):
        return
    if (highest := int(trace.tokens.values.max())) >= vocab_size:
        raise ConfigError(
            f"workload.tokenizer does not fit the model: expected token ids below its vocab_size of {vocab_size}, "
            f"found {highest}"
        )


def _array(values: Any) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)
