"""Writing workloads: the offered requests of a run with every private field, and traces in public formats.

A row describes the request as offered: its intended arrival, never its dispatch, and nothing that was measured.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path
from typing import IO, Any

import numpy as np

from schedlab.framework.content import IdContent, SessionContent, TokenContent, UniqueContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, SLO, EngineRequest
from schedlab.framework.results.packed import PackedText
from schedlab.workloads.builder import previous_turns
from schedlab.workloads.content import SegmentContent
from schedlab.workloads.dependencies import depths
from schedlab.workloads.soundness import request_names
from schedlab.workloads.source import Rows, Terms, TraceRequest, visible_ns
from schedlab.workloads.trace import BlockIds, Trace

BUFFERED = 256
"""Lines that are compressed together."""
MOONCAKE_BLOCK = 512
"""Tokens of a Mooncake id, where a file does not say."""
encode_json = json.JSONEncoder(separators=(",", ":")).encode


def encode_request(request: EngineRequest) -> str:
    """One line of a run's workload log, without its newline; fields at their default are left out.

    `deadline_ns`, `abort_ns`, `preparation_ns` count from the arrival; `after` names the request that this one
    followed, `think_ns` after its end, or lists all that it waited for, the one that it continued first. Of an attempt
    after the first, `waited_ns` is how long after that one it arrived.
    """
    content, recorded, row = request.content, request.recorded_output_tokens, request.source_row
    if type(content) is UniqueContent:  # by hand, as most are: it takes a fifth of the time
        written = f'{{"row":{content.row},"seed":{content.seed}}}'
    else:
        written = encode_json(_content(request))
    return (
        f'{{"request_id":{quote(request.request_id)},"source_row":{"null" if row is None else row},'
        f'"arrival_ns":{request.arrival_ns},"prompt_tokens":{request.num_prompt_tokens},'
        f'"output_tokens":{"null" if recorded is None else recorded},"content":{written}'
        f"{_optional(request)}}}"
    )


def _optional(request: EngineRequest) -> str:
    """The fields that are not at their default, each after a comma."""
    arrival, text = request.arrival_ns, ""
    if request.max_tokens >= 0:
        text += f',"max_tokens":{request.max_tokens}'
    if request.client != "default":
        text += f',"client":{quote(request.client)}'
    if request.priority:
        text += f',"priority":{request.priority}'
    if request.session is not None:
        text += f',"session":{quote(request.session)}'
    if request.own_program is not None:
        text += f',"program":{quote(request.own_program)},"depth":{request.depth}'
    if request.deadline_ns is not None:
        text += f',"deadline_ns":{request.deadline_ns - arrival}'
    if request.abort_ns is not None:
        text += f',"abort_ns":{request.abort_ns - arrival}'
    if request.slo is not None:
        text += f',"slo":{_limits(request.slo)}'
    if request.tried is not None and request.attempt:
        text += f',"attempt":{request.attempt},"waited_ns":{arrival - request.tried.first_arrival_ns}'
    if request.sampling is not None:
        text += f',"sampling":{encode_json(asdict(request.sampling))}'
    if request.visible_ns != arrival:
        text += f',"preparation_ns":{request.visible_ns - arrival}'
    if request.delivery_ns:
        text += f',"delivery_ns":{request.delivery_ns}'
    if isinstance(request, TraceRequest):
        if request.turn is not None:
            text += f',"turn":{request.turn}'
        if request.after is not None:
            text += f',"after":{_followed(request)}'
        if request.think_ns is not None:
            text += f',"think_ns":{request.think_ns}'
    return text


def _followed(request: TraceRequest) -> str:
    """The request that this one continued, or that and all others it waited for."""
    assert request.after is not None
    names = [quote(name) for name in (request.after, *request.also_after)]
    return names[0] if len(names) == 1 else f"[{','.join(names)}]"


@lru_cache
def _limits(slo: SLO) -> str:
    """Name and limits of a class, which many requests share."""
    return encode_json({k: v for k, v in asdict(slo).items() if v is not None})


def _content(request: EngineRequest) -> dict[str, Any]:
    content = request.content
    if isinstance(content, IdContent):
        return {"ids": list(content.ids), "width": content.width, "scope": content.namespace, "seed": content.seed}
    if isinstance(content, SegmentContent):
        ids, widths = list(content.ids), list(content.widths)
        return {"ids": ids, "widths": widths, "scope": content.namespace, "seed": content.seed}
    if isinstance(content, SessionContent):
        return {"session": content.session, "grows": getattr(request, "grows", False), "seed": content.seed}
    if isinstance(content, TokenContent):
        return {"tokens": content.token_ids.tolist()}
    raise AssertionError(f"no written form for {type(content).__name__}")


class WorkloadWriter:
    """Writes the requests that a run is offered, compressed; a killed run leaves a readable beginning after `flush`."""

    def __init__(self, path: str | Path) -> None:
        self._file = PackedText(Path(path))
        self._lines: list[str] = []

    def write(self, request: EngineRequest) -> None:
        self._lines.append(encode_request(request))
        if len(self._lines) >= BUFFERED:
            self._pass_on()

    def flush(self) -> None:
        self._pass_on()
        self._file.sync()

    def close(self) -> None:
        self._pass_on()
        self._file.close()

    def _pass_on(self) -> None:
        self._file.write("".join([f"{line}\n" for line in self._lines]))
        self._lines.clear()

    def __enter__(self) -> WorkloadWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def write_offered(trace: Trace, path: str | Path, terms: Terms | None = None) -> None:
    """A whole trace as the offered workload that a run of it writes, in which no request takes any time."""
    rows, made = Rows(trace, terms or Terms()), dict[int, TraceRequest]()
    after = np.full(len(trace), -1) if trace.after is None else trace.after
    followed = set(after.tolist())
    with WorkloadWriter(path) as writer:
        for row in np.lexsort((np.arange(len(trace)), depths(trace), visible_ns(trace))).tolist():
            request = rows.request(row, int(trace.arrival_ns[row]), made.get(int(after[row])))
            if row in followed:
                made[row] = request
            writer.write(request)


def write_mooncake(trace: Trace, path: str | Path) -> None:
    """Mooncake jsonl: `timestamp` and `delay` in whole ms, as its readers demand, the exact ns in keys of ours; agentic
    rows where requests wait for others than the turn before.

    So is `block_size`, where ids are not 512 tokens wide. Scopes become one, by new numbers for their ids; a tail
    without an id gets one of its own. Raises ConfigError for what the format cannot say: segments of unequal length,
    and requests whose output is not known.
    """
    check_outputs_known(trace)
    if trace.ids is not None and trace.ids.widths is not None:
        raise ConfigError(f"{trace.name}: prompts of segments of unequal length have no Mooncake form")
    ids = None if trace.ids is None else covering_ids(trace, trace.ids)
    names = request_names(trace) if trace.also_after is not None or starts_session(trace).any() else None
    with open_out(path) as file:
        for row in range(len(trace)):
            file.write(encode_json(_mooncake_row(trace, ids, row, names)) + "\n")


def _mooncake_row(trace: Trace, ids: BlockIds | None, row: int, names: Sequence[str] | None) -> dict[str, Any]:
    """With `names` as an agentic row, which says what it waits for."""
    arrival = int(trace.arrival_ns[row])
    out: dict[str, Any] = {} if names is None else {"request_id": names[row]}
    if trace.stamped is None or trace.stamped[row]:
        out |= {"timestamp": round(arrival / 1e6), "arrival_ns": arrival}
    out |= {"input_length": int(trace.prompt_tokens[row]), "output_length": int(trace.output_tokens[row])}
    if ids is not None and ids.counts[row]:
        out["hash_ids"] = ids.row(row).tolist()
        if ids.width != MOONCAKE_BLOCK:
            out["block_size"] = ids.width
    if trace.session is not None and (session := trace.session[row]) is not None:
        out["session_id"] = session
    if trace.think_ns is not None and (think := int(trace.think_ns[row])) >= 0:
        out |= {"delay": round(think / 1e6), "think_ns": think}
        if names is not None and trace.after is not None:
            others = [] if trace.also_after is None else trace.also_after.row(row).tolist()
            out["wait_for"] = [names[other] for other in (int(trace.after[row]), *others)]
    return out


def starts_session(trace: Trace) -> np.ndarray:
    """bool [N]: tied, but not to the turn before in its session, as a sub-agent's first call is."""
    if trace.after is None:
        return np.zeros(len(trace), dtype=bool)
    other: np.ndarray = (trace.after >= 0) & (trace.after != previous_turns(trace))
    return other


def check_outputs_known(trace: Trace) -> None:
    live = np.flatnonzero(trace.output_tokens < 0)
    if len(live):
        row = trace.source_row[live[0]]
        raise ConfigError(
            f"{trace.name}: the output of row {row} is not known ({len(live)} such rows), the request is live"
        )


def covering_ids(trace: Trace, ids: BlockIds) -> BlockIds:
    """Ids of one scope that cover every prompt that has any, ceil(prompt / width) of them."""
    values = ids.values
    if trace.scope is not None:
        scope = np.repeat(trace.scope.codes, ids.counts)
        _, values = np.unique(np.stack([scope, values]), axis=1, return_inverse=True)
    missing = (ids.counts > 0) & (ids.counts * ids.width < trace.prompt_tokens)
    if not missing.any():
        return BlockIds(ids.offsets, values, ids.width)
    fresh = int(values.max()) + 1 + np.arange(int(missing.sum()))
    tails = np.insert(values, ids.offsets[1:][missing], fresh)
    return BlockIds(np.concatenate([[0], np.cumsum(ids.counts + missing)]), tails, ids.width)


def write_vidur(trace: Trace, path: str | Path) -> None:
    """vidur csv: arrived_at in seconds, num_prefill_tokens, num_decode_tokens."""
    check_outputs_known(trace)
    with open_out(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["arrived_at", "num_prefill_tokens", "num_decode_tokens"])
        columns = trace.arrival_ns.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
        for arrival, prompt, output in zip(*columns, strict=True):
            writer.writerow([f"{arrival // NS}.{arrival % NS:09d}", prompt, output])


@contextmanager
def open_out(path: str | Path) -> Iterator[IO[str]]:
    """A text file to write, gzip if its name ends so (the same bytes for the same content)."""
    path = Path(path)
    if path.suffix != ".gz":
        with path.open("w", encoding="utf-8", newline="") as file:
            yield file
        return
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8", newline="") as file,
    ):
        yield file
