"""The offered workload of a run, `workload.jsonl.zst` or `.gz`: replays as it was, ties between turns included.

Written by `writers.encode_request`. Rows keep the order of the file, in which they became visible.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.errors import TraceError
from schedlab.framework.request import SLO
from schedlab.workloads.builder import Builder
from schedlab.workloads.files import shown
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.records import Batch, json_batches
from schedlab.workloads.soundness import check
from schedlab.workloads.source import decode_sampling, visible_ns
from schedlab.workloads.trace import Trace, ragged
from schedlab.workloads.values import MAX_NS, integers

OPTIONS = frozenset[str]()
REQUIRED = ("request_id", "source_row", "arrival_ns", "prompt_tokens", "output_tokens", "content")
NUMBERS = ("max_tokens", "deadline_ns", "abort_ns", "turn", "think_ns", "preparation_ns", "delivery_ns", "depth")
NAMES = ("client", "session", "program")


def matches(record: Mapping[str, Any]) -> bool:
    return record.keys() >= set(REQUIRED)


def read(path: Path, options: ReadOptions) -> Trace:
    builder, contents, extras = Builder(), Contents(), Extras()
    for batch in json_batches(path, REQUIRED):
        columns: dict[str, Any] = {
            "source_row": batch.parse("source_row", integers),
            "arrival_ns": batch.times("arrival_ns", "ns"),
            "prompt_tokens": batch.counts("prompt_tokens"),
            "output_tokens": batch.parse("output_tokens", integers),
            "request_id": batch.labels("request_id"),
        }
        columns |= {n: batch.parse(n, lambda v: integers(v, 0, MAX_NS)) for n in NUMBERS if batch.has(n)}
        columns |= {n: batch.labels(n) for n in NAMES if batch.has(n)}
        columns["priority"] = batch.parse("priority", lambda v: integers(v, -MAX_NS, MAX_NS, absent=0))
        builder.add(len(batch), **columns, **contents.add(batch), **extras.add(batch))
    trace = extras.onto(contents.onto(builder.trace(path, "offered")))
    check(trace, np.arange(len(trace)))
    backwards = np.flatnonzero(np.diff(visible_ns(trace)) < 0)
    if len(backwards):
        raise TraceError(f"{path}: row {backwards[0] + 1} becomes visible before the row above it")
    return trace


class Contents:
    """The `content` objects of the rows, as columns."""

    def __init__(self) -> None:
        self._ids: list[list[int]] = []
        self._widths: list[list[int]] = []
        self._tokens: list[list[int]] = []
        self._width = 0
        self._seeds: dict[int, None] = {}
        self._grows: list[bool] = []
        self._has_sessions = False

    def add(self, batch: Batch) -> dict[str, Any]:
        scopes: list[str | None] = []
        rows = np.full(len(batch), -1, dtype=np.int64)
        prompts = batch.counts("prompt_tokens").tolist()
        for row, (content, prompt) in enumerate(zip(batch.column("content"), prompts, strict=True)):
            try:
                rows[row] = self._one(content, prompt)
                scopes.append(content.get("scope") or None)
            except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
                raise batch.fault(row, f"content is {shown(content)}: {error}") from None
        return {"scope": scopes, "content_row": rows}

    def _one(self, content: dict[str, Any], prompt: int) -> int:
        """Takes in one content; the row number of an unshared prompt, else -1."""
        ids, widths, tokens = (_int_list(content.get(name, [])) for name in ("ids", "widths", "tokens"))
        if prompt < 1 or (tokens and len(tokens) != prompt):
            raise ValueError(f"{len(tokens)} tokens in a prompt of {prompt}")
        if ids:
            self._check_ids(ids, widths, content.get("width"), prompt)
        self._ids.append(ids)
        self._widths.append(widths)
        self._tokens.append(tokens)
        self._grows.append(content.get("grows", False) is True)
        self._has_sessions |= "session" in content
        if "seed" in content:
            self._seeds[int(content["seed"])] = None
        if len(self._seeds) > 1:
            raise ValueError(f"its seed differs from the rows above ({list(self._seeds)})")
        return int(content.get("row", -1))

    def _check_ids(self, ids: list[int], widths: list[int], width: Any, prompt: int) -> None:
        if widths:
            if len(widths) != len(ids) or min(widths) < 1 or sum(widths) > prompt:
                raise ValueError(f"widths do not divide a prompt of {prompt} tokens among {len(ids)} ids")
            return
        if type(width) is not int or width < 1 or self._width not in (0, width):
            raise ValueError(f"width is {shown(width)}, expected the tokens of an id, in all rows the same")
        if (len(ids) - 1) * width >= prompt:
            raise ValueError(f"{len(ids)} ids of {width} tokens for a prompt of {prompt}")
        self._width = width

    def onto(self, trace: Trace) -> Trace:
        widths = ragged(self._widths, 0) if any(self._widths) else None
        changes: dict[str, Any] = {
            "ids": ragged(self._ids, self._width) if any(self._ids) else None,
            "tokens": ragged(self._tokens, 1) if any(self._tokens) else None,
            "grows": np.array(self._grows) if self._has_sessions else None,
            "scope": trace.scope if trace.scope is not None and trace.scope.names else None,
            "content_row": None if trace.content_row is None or _is_default(trace) else trace.content_row,
        }
        if widths is not None and changes["ids"] is not None:
            changes["ids"] = replace(changes["ids"], width=0, widths=widths.values)
        seed = next(iter(self._seeds), None)
        return trace.with_columns(**changes, provenance=replace(trace.provenance, prompt_seed=seed))


class Extras:
    """SLO classes, sampling parameters and the requests that others follow."""

    def __init__(self) -> None:
        self._classes: dict[str, SLO] = {}
        self._row_of: dict[str, int] = {}
        self._after: list[list[int]] = []

    def add(self, batch: Batch) -> dict[str, Any]:
        out: dict[str, Any] = {}
        followed = batch.column("after") if batch.has("after") else [None] * len(batch)
        if untimed := [i for i, a in enumerate(followed) if a is not None and batch.column("think_ns")[i] is None]:
            raise batch.fault(untimed[0], f"follows request {shown(followed[untimed[0]])} without think_ns")
        for row, (name, after) in enumerate(zip(batch.labels("request_id"), followed, strict=True)):
            if name is None or name in self._row_of:
                raise batch.fault(row, f"request_id is {shown(name)}, expected a name that stands in no row above")
            names = [] if after is None else after if type(after) is list else [after]
            for other in names:
                if type(other) is not str or other not in self._row_of:
                    raise batch.fault(row, f"follows request {shown(other)}, which is not above it")
            self._after.append([self._row_of[other] for other in dict.fromkeys(names)])
            self._row_of[name] = batch.first_row + row
        if batch.has("slo"):
            out["slo"] = [self._slo(batch, row, value) for row, value in enumerate(batch.column("slo"))]
        if batch.has("sampling"):
            out["sampling"] = [self._sampling(batch, row, value) for row, value in enumerate(batch.column("sampling"))]
        return out

    def _sampling(self, batch: Batch, row: int, value: Any) -> str | None:
        try:
            text = None if value is None else json.dumps(value)
            if text is not None:
                decode_sampling(text)
            return text
        except (TypeError, AttributeError) as error:
            raise batch.fault(row, f"sampling is {shown(value)}: {error}") from None

    def _slo(self, batch: Batch, row: int, value: Any) -> str | None:
        if value is None:
            return None
        try:
            slo = SLO(**value)
        except TypeError as error:
            raise batch.fault(row, f"slo is {shown(value)}: {error}") from None
        if self._classes.setdefault(slo.name, slo) != slo:
            raise batch.fault(row, f"SLO class {shown(slo.name)} has other limits than in the rows above")
        return slo.name

    def onto(self, trace: Trace) -> Trace:
        after = np.array([rows[0] if rows else -1 for rows in self._after], dtype=np.int64)
        others = ragged([rows[1:] for rows in self._after])
        tied = bool((after >= 0).any())
        think = trace.think_ns if tied else None
        assert trace.priority is not None
        return trace.with_columns(
            after=after if tied else None, think_ns=think, slo_classes=self._classes,
            also_after=others if len(others.values) else None,
            priority=trace.priority if trace.priority.any() else None,
        )  # fmt: skip


def _int_list(values: Any) -> list[int]:
    if type(values) is not list or not set(map(type, values)) <= {int}:
        raise TypeError("expected a list of integers")
    return values


def _is_default(trace: Trace) -> bool:
    """Unshared prompts are generated from the row numbers themselves."""
    assert trace.content_row is not None
    own = trace.content_row >= 0
    return bool((trace.content_row[own] == trace.source_row[own]).all())
