"""ShareGPT-style conversations, a JSON array of {id, conversations: [{from, value}, ...]}: lengths by a tokenizer.

Every answer (`gpt`, `chatgpt`, `assistant`) is one request: its prompt is everything said before it, without a chat
template, which would add 10 to 30 tokens. There are no times: sessions start when an arrival process says, and a turn
follows the one before it at once. Needs `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.builder import Builder, finish
from schedlab.workloads.files import open_text, shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import parse_object
from schedlab.workloads.trace import Trace

OPTIONS = frozenset({"tokenizer"})
ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant")


def matches(record: Mapping[str, Any]) -> bool:
    return type(record.get("conversations")) is list


def read(path: Path, options: ReadOptions) -> Trace:
    if options.tokenizer is None:
        raise ConfigError(f"{path}: conversations are text; set tokenizer to a directory or name to count tokens with")
    return read_with(path, tokenizer(options.tokenizer), options)


def tokenizer(name: str) -> Callable[[str], int]:
    """Token counts by a `transformers` tokenizer, without special tokens."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer={name} cannot be loaded: {str(error).splitlines()[0]}") from None
    return lambda text: len(loaded.encode(text, add_special_tokens=False))


def read_with(path: Path, count: Callable[[str], int], options: ReadOptions) -> Trace:
    """As `read`, with any function from text to its number of tokens."""
    names, turns, prompts, outputs = list[str](), list[int](), list[int](), list[int]()
    for number, conversation in enumerate(conversations(path)):
        name = str(conversation.get("id", number))
        for turn, (prompt, output) in enumerate(_turns(path, number, conversation, count)):
            names.append(f"{number}/{name}")
            turns.append(turn)
            prompts.append(prompt)
            outputs.append(output)
    builder, n = Builder(), len(names)
    builder.add(
        n, source_row=np.arange(n), prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64), session=names, turn=np.array(turns, dtype=np.int64),
        think_ns=np.where(np.array(turns, dtype=np.int64) > 0, 0, -1),
    )  # fmt: skip
    trace = finish(builder.trace(path, "sharegpt"), options)
    trace = trace.assuming("no times: a turn follows the one before at once", "no chat template")
    return trace if trace.after is None else replace(trace, grows=trace.after >= 0)


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, or of a file of one object a line."""
    with open_text(path) as text:
        body = text.read()
    if body.lstrip()[:1] != "[":
        lines = ((n, line) for n, line in enumerate(body.splitlines(), 1) if line.strip())
        yield from (parse_object(path, row, n, line) for row, (n, line) in enumerate(lines))
        return
    try:
        items = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not JSON: {error}") from None
    for number, item in enumerate(items):
        if type(item) is not dict:
            raise TraceError(f"{path}: conversation {number} is a JSON {type(item).__name__}, expected an object")
        yield item


def _turns(path: Path, number: int, item: Mapping[str, Any], count: Callable[[str], int]) -> Iterator[tuple[int, int]]:
    """(prompt, output) tokens of each answer."""
    said = 0
    messages = item.get("conversations")
    for message in messages if type(messages) is list else [None]:
        if type(message) is not dict or type(message.get("value")) is not str or "from" not in message:
            raise TraceError(f"{path}: conversation {number} has a message {shown(message)}, expected from and value")
        tokens = count(message["value"])
        if message["from"] in ANSWERS:
            yield said, tokens
        said += tokens
