"""What a fleet's run leaves: the requests once, as they finally ended, the routes, and figures over all replicas.

Steps and decisions are the replicas' own; each replica's recorder keeps them as that of a plain run does.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from schedlab.framework.cluster.replica import Replica
from schedlab.framework.cluster.transfer import Transfer
from schedlab.framework.request import NS, EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.metrics import Measured, Summary, per
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.step_totals import StepTotals
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter

ROUTES, TRANSFERS = "routes.jsonl", "transfers.jsonl"


class Rows:
    """Rows of one kind, in order, with a digest; where there is a directory, they are written there as `name`."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self._file = None
        if directory is not None:
            for path in packed.paths(directory, name):
                path.unlink(missing_ok=True)
            self._file = packed.PackedText(packed.find(directory, name))

    def add(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, separators=(",", ":")) + "\n"
        self.hash.update(line.encode())
        if self._file is not None:
            self._file.write(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Transfers:
    """What came over the links: figures, and rows as they came."""

    def __init__(self, directory: Path | None) -> None:
        self.rows = Rows(TRANSFERS, directory)
        self._took_ns = list[int]()
        self._waited_ns = self._busy_ns = 0

    def add(self, transfer: Transfer) -> None:
        self.rows.add(
            {
                "request_id": transfer.request_id, "source": transfer.source, "target": transfer.target,
                "tokens": transfer.tokens, "bytes": transfer.num_bytes, "ready_s": transfer.ready_ns / NS,
                "reserved_s": transfer.reserved_ns / NS, "begun_s": transfer.begun_ns / NS,
                "done_s": transfer.done_ns / NS,
            }
        )  # fmt: skip
        self._took_ns.append(transfer.done_ns - transfer.ready_ns)
        self._waited_ns += transfer.begun_ns - transfer.reserved_ns
        self._busy_ns += transfer.wire_ns

    def figures(self, link_ns: int) -> Summary:
        """Seconds; utilization is of the replicas' ways out, over `link_ns` together."""
        number = len(self._took_ns)
        return {
            "transfers": number,
            "transfer/mean": per(sum(self._took_ns), number * NS),
            "transfer/p99": float(np.percentile(self._took_ns, 99)) / NS if number else None,
            "link/wait": per(self._waited_ns, number * NS),
            "link/utilization": per(self._busy_ns, link_ns),
        }


class TokensInFlight:
    """Time-weighted tokens in flight of each replica, for `load/imbalance`: integers of any size."""

    def __init__(self, num_replicas: int) -> None:
        self._token_ns = [0] * num_replicas
        self._sent: dict[EngineRequest, tuple[int, int]] = {}

    def send(self, request: EngineRequest, index: int, now_ns: int) -> None:
        self._sent[request] = index, now_ns

    def end(self, request: EngineRequest) -> None:
        if request in self._sent and request.finished_ns is not None:
            index, since_ns = self._sent.pop(request)
            self._token_ns[index] += request.num_tokens * (request.finished_ns - since_ns)

    def imbalance(self) -> float | None:
        """The largest over the mean; 1 where all are equal."""
        return per(max(self._token_ns) * len(self._token_ns), sum(self._token_ns))


class FleetNotes(Recorder):
    """The recorder of a fleet: its requests are told to it, all else it takes over from the replicas' recorders."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        folder: Path | None = getattr(self, "directory", None)
        self.routes = Rows(ROUTES, folder)
        self.transfers: Transfers | None = None
        if folder is not None:
            for path in packed.paths(folder, TRANSFERS):
                path.unlink(missing_ok=True)
        self.counts: Counter[str] = Counter()
        self._replicas: Sequence[Replica] = ()
        self._parts: list[Recorder] = []
        self._closed: list[RunTables] = []
        self._tokens = TokensInFlight(0)

    def begin(self, replicas: Sequence[Replica], counts: Counter[str], senders: int = 0) -> None:
        """`counts` are events of the fleet that happen more than once to a request, as they are counted; `senders`
        replicas send keys and values to others."""
        if senders:
            self.transfers, self._senders = Transfers(getattr(self, "directory", None)), senders
        self._replicas, self.counts = replicas, counts
        self._parts = [replica.engine.recorder for replica in replicas]
        self._tokens = TokensInFlight(len(replicas))

    # -- told by the clock --

    def routed(self, request: EngineRequest, replica: Replica | None, now_ns: int) -> None:
        name = None if replica is None else replica.name
        self.routes.add({"time_s": now_ns / NS, "request_id": request.request_id, "replica": name})
        if replica is not None:
            self._tokens.send(request, replica.index, now_ns)

    def left(self, request: EngineRequest) -> None:
        self._tokens.end(request)

    def transferred(self, transfer: Transfer) -> None:
        assert self.transfers is not None
        self.transfers.add(transfer)

    def ended(self, request: EngineRequest) -> None:
        self._tokens.end(request)
        self.request(request)

    # -- the end --

    def close_fleet(self, counters: Sequence[dict[str, int]], fleet_counters: dict[str, int]) -> RunTables:
        """Close the replicas' recorders, then this one. `counters` are those of each replica."""
        unfinished = [replica.engine.num_unfinished for replica in self._replicas]
        self._closed = [
            part.close(backlog_end=left, counters=counted)
            for part, left, counted in zip(self._parts, unfinished, counters, strict=True)
        ]
        self._step_rows = sum(tables.result["rows"]["steps"] for tables in self._closed)
        self.routes.close()
        if self.transfers is not None:
            self.transfers.rows.close()
        return self.close(backlog_end=sum(unfinished), counters=fleet_counters)

    def _hexdigest(self) -> str:
        """Of the routes, the transfers, and the replicas' digests in order."""
        whole = self.routes.hash.copy()
        if self.transfers is not None:
            whole.update(self.transfers.rows.hash.digest())
        for tables in self._closed:
            whole.update(str(tables.digest).encode())
        return whole.hexdigest()

    def _told_pressure(self) -> dict[str, float | int | None]:
        steps = [tables.summary["steps"] or 0 for tables in self._closed]
        told = [tables.result["pressure"] for tables in self._closed]
        queued = sum(n * (one["queue"] or 0.0) for n, one in zip(steps, told, strict=True))
        return {"queue": per(queued, sum(steps)), "split_prompts": sum(one["split_prompts"] for one in told)}

    def _measured(self, backlog_end: int) -> tuple[Measured, int]:
        run, outside = super()._measured(backlog_end)
        return merged(run, self._parts), outside

    def _more_result(self) -> dict[str, Any]:
        """What the result of a fleet says beyond that of an engine."""
        return {
            "replicas": [
                {"name": replica.name, "digest": tables.digest, "routed": replica.load.num_routed}
                for replica, tables in zip(self._replicas, self._closed, strict=True)
            ]
        }

    def _more_figures(self) -> Summary:
        most = [tables.summary["kv/utilization_max"] for tables in self._closed]
        span_ns = max(replica.engine.now_ns for replica in self._replicas)
        figures: Summary = {
            "kv/utilization_max": max((value for value in most if value is not None), default=None),
            "load/imbalance": self._tokens.imbalance(),
            "replica_seconds": len(self._replicas) * span_ns / NS,
            "routed": sum(replica.load.num_routed for replica in self._replicas),
        }
        if self.transfers is not None:
            figures |= self.transfers.figures(self._senders * span_ns)
        figures |= {name: count for name, count in sorted(self.counts.items()) if count}
        if len(self._replicas) > 1:
            for replica, tables in zip(self._replicas, self._closed, strict=True):
                figures[f"replica/{replica.name}/routed"] = replica.load.num_routed
                figures[f"replica/{replica.name}/hit_rate"] = tables.summary["prefix/hit_rate"]
        return figures


class FleetRecorder(FleetNotes):
    """In memory."""


class FleetWriter(FleetNotes, RunWriter):
    """Into a run directory, in which `replicas/NAME` is that of each replica."""

    logged = ("requests",)


def merged(run: Measured, parts: Sequence[Recorder]) -> Measured:
    """`run`, which has the requests, with the steps and gaps of all `parts`.

    Shares of slots and blocks are of those that a replica has, weighted by the time in which its steps ran.
    """
    runs = [part.steps_and_gaps() for part in parts]
    steps, gaps = StepTotals(), Counter[int]()
    for totals, counted in runs:
        steps.merge(totals)
        gaps.update(counted)
    weights = [totals.duration_ns for totals, _ in runs] if steps.duration_ns else [1] * len(runs)
    sizes = [part.measurement for part in parts]
    return replace(
        run,
        steps=steps,
        gaps_us=Histogram(gaps),
        max_num_seqs=_mean([size.max_num_seqs for size in sizes], weights),
        num_blocks=_mean([size.num_blocks for size in sizes], weights),
        served=_sums([part.served for part in parts]),
        demanded=_sums([part.demanded for part in parts]),
    )


def _mean(values: Sequence[int], weights: Sequence[int]) -> float:
    whole = sum(map(int.__mul__, values, weights))
    return values[0] if len(set(values)) == 1 else whole / sum(weights)


def _sums(parts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    """By client; None where no part has any."""
    known = [part for part in parts if part is not None]
    total: dict[str, int] = {}
    for part in known:
        for client, tokens in part.items():
            total[client] = total.get(client, 0) + tokens
    return total if known else None
