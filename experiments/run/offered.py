"""Around a source: counts what comes and goes, and in a run directory writes what was offered and what came out.

Changes no request and no order. `workload.jsonl.zst` has every offered request with its private fields, so that a run
can be repeated from its own folder; `attempts.jsonl.zst` those that clients sent again; `outputs.jsonl.zst` has the
tokens of executors that make any (`.gz` without zstandard).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.source import Source
from schedlab.workloads.readers import OFFERED
from schedlab.workloads.trace import Trace
from schedlab.workloads.writers import WorkloadWriter

ATTEMPTS = "attempts.jsonl"
"""Requests after the first attempt, in a file of their own: what is offered does not depend on a policy, these do."""
OUTPUTS = "outputs.jsonl"
FLUSH_S = 1.0


def offered(trace: Trace) -> str:
    """What a run of `trace` is offered, in words: requests, and the span and mean rate of those that have a time."""
    stamped = trace.arrival_ns if trace.stamped is None else trace.arrival_ns[trace.stamped]
    span_s = float(np.ptp(stamped)) / NS if len(stamped) else 0.0
    rate = f", {(len(stamped) - 1) / span_s:.4g} requests/s" if span_s else ""
    tied = f", {len(trace) - len(stamped):,} of them after others end" if len(trace) > len(stamped) else ""
    return f"{len(trace):,} requests over {span_s:,.4g} s{rate}{tied}"


class Counted:
    """A source that counts; `total` is the number of requests in all.

    The lag of a request is how long it had been visible when the engine took it: between two steps, or late.
    """

    def __init__(self, source: Source, total: int) -> None:
        self._source = source
        self.total = total
        self.done = 0
        self.peek = source.peek
        self._taken = self._lag_ns = self._longest_lag_ns = 0

    def pop(self, now_ns: int) -> list[EngineRequest]:
        requests = self._source.pop(now_ns)
        for request in requests:
            lag = now_ns - request.visible_ns
            self._lag_ns += lag
            if lag > self._longest_lag_ns:
                self._longest_lag_ns = lag
            if request.attempt:
                self.total += 1
        self._taken += len(requests)
        return requests

    def abandoned(self) -> dict[str, int]:
        """How many requests never arrived because one that they follow failed, for a run's counters; none: nothing."""
        number = getattr(self._source, "abandoned", 0)
        return {"abandoned": number} if number else {}

    def lag_us(self) -> dict[str, int]:
        """Mean and longest lag of the requests that were taken, for a run's counters."""
        mean = round(self._lag_ns / self._taken / 1e3) if self._taken else 0
        return {"arrival_lag_mean_us": mean, "arrival_lag_max_us": round(self._longest_lag_ns / 1e3)}

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        self.done += 1
        self._source.finished(request, now_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pass


class Logged(Counted):
    """A source that also writes its requests into `directory`, and with `text` what their tokens say. `apart`: retries
    are no part of what was offered."""

    def __init__(
        self, source: Source, total: int, directory: Path, text: Callable[[EngineRequest], str] | None = None,
        apart: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(source, total)
        self._text = text
        for name in (OFFERED, ATTEMPTS, OUTPUTS):
            for path in packed.paths(directory, name):
                path.unlink(missing_ok=True)
        self._offered = WorkloadWriter(packed.find(directory, OFFERED))
        self._attempts_path = packed.find(directory, ATTEMPTS)
        self._attempts = None if apart else self._offered
        self._outputs_path = packed.find(directory, OUTPUTS)
        self._outputs: packed.PackedText | None = None
        self._flushed_at = time.monotonic()

    def pop(self, now_ns: int) -> list[EngineRequest]:
        requests = super().pop(now_ns)
        for request in requests:
            (self._retried() if request.attempt else self._offered).write(request)
        self._flush_sometimes()
        return requests

    def finished(self, request: EngineRequest, now_ns: int) -> None:
        if request.output_token_ids:
            if self._outputs is None:
                self._outputs = packed.PackedText(self._outputs_path)
            self._outputs.write(output_line(request, self._text))
        super().finished(request, now_ns)

    def _retried(self) -> WorkloadWriter:
        if self._attempts is None:
            self._attempts = WorkloadWriter(self._attempts_path)
        return self._attempts

    def _flush_sometimes(self) -> None:
        if (now := time.monotonic()) < self._flushed_at + FLUSH_S:
            return
        self._flushed_at = now
        self._offered.flush()
        if self._attempts is not None:
            self._attempts.flush()
        if self._outputs is not None:
            self._outputs.sync()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._offered.close()
        if self._attempts is not None and self._attempts is not self._offered:
            self._attempts.close()
        if self._outputs is not None:
            self._outputs.close()


def output_line(request: EngineRequest, text: Callable[[EngineRequest], str] | None = None) -> str:
    row = {"request_id": request.request_id, "status": request.state, "token_ids": request.output_token_ids}
    if text is not None:
        row["text"] = text(request)
    return json.dumps(row, separators=(",", ":")) + "\n"


def read_outputs(directory: Path) -> Iterator[tuple[str, list[int]]]:
    """Request and tokens of each finished request of a run; nothing where the executor made no tokens."""
    path = packed.find(directory, OUTPUTS)
    if not path.exists():
        return
    with packed.opened(path) as file:
        try:
            for line in file:
                row = json.loads(line)
                if row["status"] == "finished":
                    yield row["request_id"], row["token_ids"]
        except (EOFError, json.JSONDecodeError, KeyError) as error:
            raise ConfigError(f"{path}: damaged or cut short ({error})") from None


# ---- what was offered, from a run's folder ----


def offered_hash(directory: Path) -> str:
    """Equal for runs that were offered the same requests: times, lengths, what prompts share, who asks how urgently.

    Names of requests, rows and sessions do not count, nor do SLO classes. A turn that follows another one arrives when
    the policy lets it and is left out: what it follows stands for it. ConfigError for a run without its workload.
    """
    path = packed.find(directory, OFFERED)
    if not path.exists():
        raise ConfigError(f"{path}: not there; runs are paired by what they were offered")
    shape = hashlib.sha256()
    numbers: dict[Any, int] = {}
    with packed.opened(path) as file:
        try:
            for line in file:
                row = json.loads(line)
                if "after" not in row:
                    shape.update(repr(_shape(row, numbers)).encode())
        except (EOFError, OSError, json.JSONDecodeError, KeyError) as error:
            raise ConfigError(f"{path}: damaged or cut short ({error})") from None
    return shape.hexdigest()


_TERMS = ("max_tokens", "client", "priority", "deadline_ns", "abort_ns", "preparation_ns", "delivery_ns", "sampling")


def _shape(row: Mapping[str, Any], numbers: dict[Any, int]) -> tuple[Any, ...]:
    """What of a row matters, with names replaced by the order in which they first appear."""
    content = row["content"]
    scope = content.get("scope")
    shared = [numbers.setdefault((scope, i), len(numbers)) for i in content.get("ids", ())]
    session = row.get("session")
    return (
        row["arrival_ns"], row["prompt_tokens"], row["output_tokens"],
        *(row.get(name) for name in _TERMS),
        shared, content.get("width"), content.get("widths"), content.get("tokens"),
        None if session is None else numbers.setdefault(("session", session), len(numbers)),
    )  # fmt: skip
