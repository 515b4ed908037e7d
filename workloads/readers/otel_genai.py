"""OpenTelemetry spans of GenAI calls, as inference-perf and vLLM record them: `{"spans": […]}` or OTLP's
`resourceSpans`.

A call is a span with `gen_ai.usage.*` (input_tokens or prompt_tokens, output_tokens or completion_tokens), or with
messages, whose tokens `tokenizer` counts. Where texts are recorded a call waits for those of its session whose answers
stand in its messages; else for those that had ended when it began, as far as no other lies between. It follows the last
of their ends by what lay between. Calls that wait for none arrive as stamped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.builder import Builder, finish
from schedlab.workloads.calls import Calls
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers.sharegpt import tokenizer
from schedlab.workloads.records import json_objects
from schedlab.workloads.trace import Trace
from schedlab.workloads.values import parse_count, parse_stamp, parse_time

OPTIONS = frozenset({"tokenizer"})
INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
MESSAGES, ANSWER = "gen_ai.input.messages", "gen_ai.output.text"
SESSIONS = ("gen_ai.conversation.id", "session.id")
Count = Callable[[str], int]


def matches(record: Mapping[str, Any]) -> bool:
    return type(record.get("spans")) is list or type(record.get("resourceSpans")) is list


def read(path: Path, options: ReadOptions) -> Trace:
    return read_with(path, None if options.tokenizer is None else tokenizer(options.tokenizer), options)


def read_with(path: Path, count: Count | None, options: ReadOptions) -> Trace:
    """As `read`, with any function from text to its number of tokens, or none."""
    spans, others = list[Span](), 0
    for record in _spans(path):
        span = _span(path, len(spans) + others, record)
        others += span is None
        spans += [] if span is None else [span]
    if not spans:
        raise TraceError(f"{path}: {others} spans, none of them a GenAI call")
    calls, sessions = Calls(), dict[str, list[int]]()
    for row, span in enumerate(spans):
        calls.add(span.start_ns, span.end_ns)
        sessions.setdefault(span.session, []).append(row)
    texts = all(span.messages is not None for span in spans)
    for members in sessions.values():
        _link_by_text(calls, members, spans) if texts else _link_by_time(calls, members)
    trace = calls.tie(_trace(path, spans, [_lengths(path, span, count) for span in spans]), options)
    how = "whose answers stand in its messages" if texts else "that had ended when it began"
    trace = trace.assuming(f"a call waits for the calls of its session {how}").counted(spans_of_other_kinds=others)
    return finish(trace, options, wall_clock=True, by_session=True)


@dataclass(frozen=True, slots=True)
class Span:
    """One call: `messages` are the texts of its prompt, where recorded."""

    name: str
    session: str
    start_ns: int
    end_ns: int
    model: str | None
    attributes: Mapping[str, Any]
    messages: list[str] | None
    answer: str | None


def _spans(path: Path) -> Iterator[Mapping[str, Any]]:
    for _, record in json_objects(path):
        if type(record.get("spans")) is list:
            yield from record["spans"]
            continue
        try:
            for resource in record["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    yield from scope["spans"]
        except (TypeError, KeyError):
            raise TraceError(f"{path}: expected objects with spans, or with resourceSpans of scopeSpans") from None


def _span(path: Path, number: int, record: Any) -> Span | None:
    """The call that a span is; None for one of another kind."""
    try:
        attributes = _attributes(record.get("attributes") or {})
        if not any(key in attributes for key in (*INPUT, *OUTPUT, MESSAGES)):
            return None
        start, end = (_time(record, *names) for names in (("start_time", "startTimeUnixNano"),
                                                          ("end_time", "endTimeUnixNano")))  # fmt: skip
        trace_id = record.get("trace_id") or record.get("traceId")
        found = [attributes[key] for key in attributes if key in SESSIONS or key.endswith(".session.id")]
        name = attributes.get("gen_ai.request.id") or record.get("span_id") or record.get("spanId")
        return Span(
            str(name), str(found[0] if found else trace_id), start, end, attributes.get("gen_ai.request.model"),
            attributes, _messages(attributes.get(MESSAGES)), attributes.get(ANSWER),
        )  # fmt: skip
    except (TypeError, KeyError, ValueError, AttributeError, ArithmeticError) as error:
        raise TraceError(f"{path}: span {number}: {type(error).__name__} {error}") from None


def _attributes(attributes: Any) -> dict[str, Any]:
    """By name; OTLP lists them as keys with typed values."""
    if type(attributes) is dict:
        return attributes
    return {each["key"]: next(iter(each["value"].values()), None) for each in attributes}


def _time(record: Mapping[str, Any], stamp: str, nanoseconds: str) -> int:
    if nanoseconds in record:
        return parse_time(record[nanoseconds], 1)
    return parse_stamp(record[stamp])


def _messages(value: Any) -> list[str] | None:
    if value is None:
        return None
    listed = json.loads(value) if type(value) is str else value
    return [each["content"] if type(each.get("content")) is str else json.dumps(each) for each in listed]


def _lengths(path: Path, span: Span, count: Count | None) -> tuple[int, int]:
    """(prompt, output) tokens."""
    said = [next((span.attributes[key] for key in keys if key in span.attributes), None) for keys in (INPUT, OUTPUT)]
    if None not in said:
        try:
            return parse_count(said[0]), parse_count(said[1])
        except (ValueError, TypeError, ArithmeticError):
            raise TraceError(f"{path}: span {shown(span.name)} has usage {said}, expected token counts") from None
    if count is None:
        raise ConfigError(
            f"{path}: span {shown(span.name)} has no {INPUT[0]} and {OUTPUT[0]}; set tokenizer to a directory or name "
            f"to count its texts with"
        )
    return sum(map(count, span.messages or [])), count(span.answer or "")


def _link_by_text(calls: Calls, members: list[int], spans: list[Span]) -> None:
    """A call waits for the earlier ones whose answers are among its messages; of a chain of them for the last."""
    ordered, above = calls.by_start(members), dict[int, set[int]]()
    for place, call in enumerate(ordered):
        said = set(spans[call].messages or [])
        found = [
            other for other in ordered[:place]
            if spans[other].answer in said and calls.end_ns[other] <= calls.start_ns[call]
        ]  # fmt: skip
        above[call] = set(found).union(*(above[other] for other in found))
        implied = set[int]().union(*(above[other] for other in found))
        calls.parents[call] = [other for other in found if other not in implied]


def _link_by_time(calls: Calls, members: list[int]) -> None:
    """A call waits for those that had ended, but not for one that another one in between had waited for."""
    ordered = calls.by_start(members)
    for place, call in enumerate(ordered):
        ended = [other for other in ordered[:place] if calls.end_ns[other] <= calls.start_ns[call]]
        latest = max((calls.start_ns[other] for other in ended), default=0)
        calls.parents[call] = [other for other in ended if calls.end_ns[other] > latest or other == ended[-1]]


def _trace(path: Path, spans: list[Span], lengths: list[tuple[int, int]]) -> Trace:
    builder, n = Builder(), len(spans)
    prompt, output = (np.array(column, dtype=np.int64) for column in zip(*lengths, strict=True))
    builder.add(
        n, source_row=np.arange(n), arrival_ns=np.array([span.start_ns for span in spans], dtype=np.int64),
        prompt_tokens=prompt, output_tokens=output, session=[span.session for span in spans],
        request_id=[span.name for span in spans], model=[span.model for span in spans],
    )  # fmt: skip
    return builder.trace(path, "otel_genai")
