"""Figures of parts of a run: of each SLO class and each client, where there are several; of requests turned away.

A pooled share can hide that a class starves. These keys stand in a summary only where a run has what they tell of.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schedlab.framework.attempts import TIMED_OUT
from schedlab.framework.request import NS, SLO, EngineRequest
from schedlab.framework.results.metrics import (
    UNKNOWN,
    Measured,
    Summary,
    makespan_ns,
    meets_slo,
    per,
    tpot_ns,
    ttft_ns,
    with_status,
)

GROUP_FIGURES = {
    "offered": "requests",
    "finished": "requests that came to their end",
    "rejected": "requests that were turned away",
    "slo_attainment": "share of the offered requests that meet every limit; null for a class without limits",
    "ttft_p99": "seconds",
    "tpot_p99": "seconds",
    "output_tokens_per_s": "over the run's makespan",
    "service_share": "of the tokens computed and generated for all",
}
"""What `class/NAME/…` and `client/NAME/…` say."""
TURNED_AWAY = ("shed", "queue_full", "rate_limited")
"""Reasons, up to a colon, of requests that were rejected although they would fit: `requests/REASON`."""
MOST_CLIENTS = 16
"""With more clients than these a summary has none of their figures; the logs do."""


def group_figures(run: Measured, reasons: Mapping[str, int]) -> Summary:
    """Keys beyond SUMMARY_KEYS; `reasons` counts the requests of the measured window that were rejected or whose
    clients left."""
    figures: Summary = {f"requests/{reason}": reasons[reason] for reason in TURNED_AWAY if reasons.get(reason)}
    if figures:
        figures["shed_share"] = per(sum(v or 0 for v in figures.values()), len(run.requests) + run.backlog_end)
    if reasons.get(TIMED_OUT):
        figures["requests/timed_out"] = reasons[TIMED_OUT]
    codes = np.unique(run.requests["slo"]).tolist()
    if len(codes) > 1:
        for code in codes:
            slo = None if code == UNKNOWN else run.slos[code]
            name = "best_effort" if slo is None else slo.name
            figures |= _figures(f"class/{name}", run, run.requests["slo"] == code, _limited(slo))
    if 1 < len(run.clients) <= MOST_CLIENTS:
        limited = any(map(_limited, run.slos))
        for code, client in enumerate(run.clients):
            figures |= _figures(f"client/{client}", run, run.requests["client"] == code, limited)
    return figures


def _limited(slo: SLO | None) -> bool:
    return slo is not None and any(limit is not None for limit in (slo.ttft_s, slo.tpot_s, slo.e2e_s))


def _figures(prefix: str, run: Measured, members: np.ndarray, limited: bool) -> Summary:
    requests = run.requests[members]
    span = makespan_ns(run.requests)
    met = float(meets_slo(requests, run.slos).mean()) if limited and len(requests) else None
    values = {
        "offered": len(requests),
        "finished": int(with_status(requests, "finished").sum()),
        "rejected": int(with_status(requests, "rejected").sum()),
        "slo_attainment": met,
        "ttft_p99": _p99(ttft_ns(requests)),
        "tpot_p99": _p99(tpot_ns(requests)),
        "output_tokens_per_s": per(int(requests["output_tokens"].sum()), None if span is None else span / NS),
        "service_share": per(_service(requests), _service(run.requests)),
    }
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _p99(values_ns: np.ndarray) -> float | None:
    return float(np.percentile(values_ns, 99)) / NS if len(values_ns) else None


def _service(requests: np.ndarray) -> int:
    """Prompt tokens of requests that had a first token, and tokens generated."""
    had = requests["first_token_ns"] != UNKNOWN
    return int(requests["prompt_tokens"][had].sum() + requests["output_tokens"].sum())


class ProgramTimes:
    """First arrival and last end of each program whose requests span sessions or wait for several others."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        self._unserved: dict[str, set[str]] = {}  # requests of programs that had no answer, as yet

    def add(self, program: str, request: EngineRequest) -> None:
        """A request of `program` reached its terminal state."""
        assert request.finished_ns is not None
        began, ended = self._spans.get(program, (request.arrival_ns, request.finished_ns))
        end = request.finished_ns + request.delivery_ns
        self._spans[program] = min(began, request.arrival_ns), max(ended, end)
        unserved = self._unserved.setdefault(program, set())
        if request.state not in ("finished", "length_capped"):
            unserved.add(request.logical_id)
        elif request.attempt:
            unserved.discard(request.logical_id)

    def figures(self) -> Summary:
        """Seconds from the first arrival to the last delivery, of programs all of whose requests were served."""
        if not self._spans:
            return {}
        times = [end - began for name, (began, end) in self._spans.items() if not self._unserved[name]]
        values = np.array(times, dtype=np.int64) / NS
        told: Summary = {"program/count": len(self._spans), "program/unserved": sum(map(bool, self._unserved.values()))}
        if not len(values):
            return told
        told["program/duration/mean"] = float(values.mean())
        return told | {f"program/duration/p{p}": float(np.percentile(values, p)) for p in (50, 99)}
