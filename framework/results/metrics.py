"""Every definition of a latency, a rate and a share, once.

Times are integer nanoseconds inside and seconds in the summary; what is unknown is None, never 0 and never NaN.

Stages of a request: intended arrival, preparation, visible, queue, prefill, first token, decode, last token, delivery.
Latencies run from the intended arrival. Which requests enter:
  ttft, queue            served ones; ttft also aborted ones that had a first token
  tpot, e2e              served ones, tpot with two output tokens or more
  itl                    every gap after a first token, whatever became of its request
  goodput, attainment    finished ones that meet every limit of their class; the rest misses
  attainment_limited     the same share of those that have a limit, where others have none
Served is finished or length_capped. Percentiles are numpy's linear ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlab.framework.errors import ConfigError
from schedlab.framework.request import NS, SLO, to_ns
from schedlab.framework.results.histogram import Histogram
from schedlab.framework.results.step_totals import BOUNDS, StepTotals

Summary = dict[str, float | int | None]

UNKNOWN = -1
"""Stands for a stamp, a count or a class that a request does not have."""
STATUSES = ("finished", "rejected", "aborted", "length_capped", "failed")
PERCENTILES = (50, 90, 95, 99)
GAP_NS = 1_000
"""Resolution of the gap histogram."""

MEASURED = np.dtype(
    [
        ("arrival_ns", np.int64),
        ("visible_ns", np.int64),
        ("first_scheduled_ns", np.int64),
        ("first_token_ns", np.int64),
        ("finished_ns", np.int64),
        ("delivery_ns", np.int64),
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),
        ("demanded_tokens", np.int32),
        ("cached_tokens", np.int32),
        ("resumed_tokens", np.int32),
        ("recomputed_tokens", np.int32),
        ("preemptions", np.int32),
        ("swaps", np.int32),
        ("client", np.int32),
        ("slo", np.int16),
        ("status", np.int8),
    ]
)
"""What the summary needs of a request, in 91 bytes: `client`, `slo` and `status` are indices."""
MEASURED_FROM = {
    **{name: name.removesuffix("_ns") + "_s" for name in MEASURED.names or () if name.endswith("_ns")},
    **{f"{name}_tokens": f"{name}_tokens" for name in ("prompt", "output", "cached", "resumed", "recomputed")},
    "preemptions": "preemptions",
    "swaps": "swaps",
}
"""The columns of MEASURED that are columns of the requests table, the times in other units."""

_LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
_STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
SUMMARY_KEYS = (
    *(f"{name}/{statistic}" for name in _LATENCIES for statistic in _STATISTICS),
    "throughput/requests_per_s",
    "throughput/output_tokens_per_s",
    "throughput/total_tokens_per_s",
    "goodput/requests_per_s",
    "slo/attainment",
    "slo/attainment_limited",
    "prefix/hit_rate",
    "prefix/tokens_reused",
    "prefix/tokens_resumed",
    "preemptions/recompute",
    "preemptions/swap",
    "recomputed_tokens",
    "kv/utilization_mean",
    "kv/utilization_max",
    "batch/tokens_mean",
    "batch/requests_mean",
    "batch/idle_slot_share",
    "fairness/jain",
    "requests/offered",
    *(f"requests/{status}" for status in STATUSES),
    "backlog_end",
    "makespan_s",
    "scheduler/us_per_step",
    "steps",
    *(f"bound/{bound}" for bound in BOUNDS),
)
"""The keys of every summary, in order; the same in files, on the terminal and in Weights & Biases."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run is measured against, stated in its result.

    `slo` judges requests that bring no class of their own. Requests that arrive before `start_s` (warm-up) or from
    `stop_s` on (drain) are left out of the summary and counted as outside the window; so are steps that begin there and
    gaps that end there. The pool's `num_blocks` and the engine's `max_num_seqs` are the bases of the shares.
    `at_client`: times are a client's, by configured stages or by its own clock.
    """

    max_num_seqs: int
    num_blocks: int
    slo: SLO | None = None
    start_s: float | None = None
    stop_s: float | None = None
    at_client: bool = False

    def __post_init__(self) -> None:
        if self.start_s is not None and self.stop_s is not None and not self.start_s < self.stop_s:
            raise ConfigError(f"measure: expected start_s < stop_s, found {self.start_s:g} and {self.stop_s:g}")

    @property
    def windowed(self) -> bool:
        return self.start_s is not None or self.stop_s is not None

    def inside(self, ns: Any) -> Any:
        """Whether an instant, or each of an array of instants, lies in the window."""
        after = True if self.start_s is None else ns >= to_ns(self.start_s)
        before = True if self.stop_s is None else ns < to_ns(self.stop_s)
        return after & before

    @property
    def window(self) -> str:
        """The measured window in words."""
        start, stop = (bound if bound is None else f"{bound:g}" for bound in (self.start_s, self.stop_s))
        return f"from {start or 0} s on" if stop is None else f"in [{start or 0}, {stop}) s"


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a summary is computed from. `requests` has dtype MEASURED and lies in the window already.

    `slos` and `clients` are what the columns of these names index. `served` is the tokens served to each client up to
    the last arrival; `demanded` the tokens asked for by then, or None to take them from `requests`.
    """

    requests: np.ndarray
    slos: Sequence[SLO]
    clients: Sequence[str]
    steps: StepTotals
    gaps_us: Histogram
    max_num_seqs: float
    num_blocks: float
    backlog_end: int = 0
    served: Mapping[str, int] | None = None
    demanded: Mapping[str, int] | None = None


def from_table(table: Mapping[str, Any], slos: Sequence[SLO], clients: Sequence[str]) -> np.ndarray:
    """MEASURED [N] of a requests table. What was demanded is not in it: prompt and output stand for that."""
    out = np.empty(len(table["request_id"]), dtype=MEASURED)
    for column, name in MEASURED_FROM.items():
        values = np.asarray(table[name], dtype=np.float64) * (NS if name.endswith("_s") else 1)
        out[column] = np.where(np.isnan(values), UNKNOWN, np.rint(values))
    codes = {slo.name: i for i, slo in enumerate(slos)}
    out["slo"] = [codes.get(name, UNKNOWN) for name in table["slo"]]
    out["client"] = [clients.index(client) for client in table["client"]]
    out["status"] = [STATUSES.index(status) for status in table["status"]]
    out["demanded_tokens"] = out["prompt_tokens"] + out["output_tokens"]
    return out


def with_status(requests: np.ndarray, *statuses: str) -> np.ndarray:
    """bool [N]"""
    return np.isin(requests["status"], [STATUSES.index(status) for status in statuses])


def served(requests: np.ndarray) -> np.ndarray:
    """bool [N]: ran to an end of its own."""
    return with_status(requests, "finished", "length_capped")


def ttft_ns(requests: np.ndarray) -> np.ndarray:
    """Preparation, queue, prefill and delivery of the first token, frozen when it is first emitted."""
    counted = (served(requests) | with_status(requests, "aborted")) & (requests["first_token_ns"] != UNKNOWN)
    return np.asarray(_ttft_ns(requests)[counted])


def _ttft_ns(requests: np.ndarray) -> np.ndarray:
    return np.asarray(requests["first_token_ns"] - requests["arrival_ns"] + requests["delivery_ns"])


def queue_ns(requests: np.ndarray) -> np.ndarray:
    """From visible to the policy until the first grant."""
    return np.asarray((requests["first_scheduled_ns"] - requests["visible_ns"])[served(requests)])


def tpot_ns(requests: np.ndarray) -> np.ndarray:
    """(last - first) / (n - 1), float64; requests of one token have none."""
    counted = served(requests) & (requests["output_tokens"] > 1)
    return np.asarray(
        (requests["finished_ns"] - requests["first_token_ns"])[counted] / (requests["output_tokens"][counted] - 1)
    )


def e2e_ns(requests: np.ndarray) -> np.ndarray:
    """Up to the delivery of the last token."""
    return np.asarray(_e2e_ns(requests)[served(requests)])


def _e2e_ns(requests: np.ndarray) -> np.ndarray:
    return np.asarray(requests["finished_ns"] - requests["arrival_ns"] + requests["delivery_ns"])


def observed_at(requests: np.ndarray) -> str:
    """`client` if latencies include a delivery, else `engine`."""
    return "client" if np.any(requests["delivery_ns"] > 0) else "engine"


def distribution(name: str, values_ns: np.ndarray) -> Summary:
    """Mean, percentiles and maximum in seconds, under `name/`."""
    if not len(values_ns):
        return {f"{name}/{statistic}": None for statistic in _STATISTICS}
    values = [values_ns.mean(), *np.percentile(values_ns, PERCENTILES), values_ns.max()]
    return {f"{name}/{statistic}": float(v) / NS for statistic, v in zip(_STATISTICS, values, strict=True)}


def gap_distribution(gaps_us: Histogram) -> Summary:
    """The same of all gaps between tokens, from their histogram at 1 us."""
    values = [gaps_us.mean(), *gaps_us.percentiles(PERCENTILES), gaps_us.max()]
    seconds = [None if v is None else v * GAP_NS / NS for v in values]
    return {f"itl/{statistic}": v for statistic, v in zip(_STATISTICS, seconds, strict=True)}


def meets_slo(requests: np.ndarray, slos: Sequence[SLO]) -> np.ndarray:
    """bool [N]: finished within every limit of its class; without a class there is no limit to miss.

    Limits are inclusive. A request of one output token has no TPOT and meets that limit.
    """
    meets = with_status(requests, "finished")
    for i, slo in enumerate(slos):
        meets &= (requests["slo"] != i) | _within(requests, slo)
    return meets


def _within(requests: np.ndarray, slo: SLO) -> np.ndarray:
    """bool [N]; of use for finished requests alone."""
    within = np.ones(len(requests), dtype=bool)
    if slo.ttft_s is not None:
        within &= _ttft_ns(requests) <= to_ns(slo.ttft_s)
    if slo.e2e_s is not None:
        within &= _e2e_ns(requests) <= to_ns(slo.e2e_s)
    if slo.tpot_s is not None:
        gaps = requests["output_tokens"].astype(np.int64) - 1
        within &= requests["finished_ns"] - requests["first_token_ns"] <= to_ns(slo.tpot_s) * gaps
    return within


def makespan_ns(requests: np.ndarray) -> int | None:
    """First intended arrival to last token (of an aborted request: to its end)."""
    emitting = requests["output_tokens"] > 0
    if not emitting.any():
        return None
    return int(requests["finished_ns"][emitting].max() - requests["arrival_ns"].min())


def jain(shares: Sequence[float]) -> float | None:
    """Jain's index (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything."""
    squares = sum(x * x for x in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def demanded_tokens(requests: np.ndarray, clients: Sequence[str]) -> dict[str, int]:
    """Prompt and output tokens asked for by each client, whatever became of its requests."""
    totals = np.zeros(len(clients), dtype=np.int64)
    np.add.at(totals, requests["client"], requests["demanded_tokens"])
    return dict(zip(clients, totals.tolist(), strict=True))


def fairness(run: Measured) -> float | None:
    """Jain's index over clients of tokens served per token demanded, both at the last arrival."""
    if run.served is None:
        return None
    demanded = run.demanded if run.demanded is not None else demanded_tokens(run.requests, run.clients)
    return jain([run.served.get(client, 0) / tokens for client, tokens in demanded.items() if tokens])


def per(amount: float, base: float | None) -> float | None:
    """`amount / base`, or None where that is undefined."""
    return amount / base if base else None


def summarise(run: Measured) -> Summary:
    """Every key of SUMMARY_KEYS, in that order: seconds, tokens, ratios and counts."""
    requests = run.requests
    values: Summary = {
        **distribution("ttft", ttft_ns(requests)),
        **distribution("tpot", tpot_ns(requests)),
        **gap_distribution(run.gaps_us),
        **distribution("e2e", e2e_ns(requests)),
        **distribution("queue", queue_ns(requests)),
        **_rates(run),
        **_prefix(requests),
        **_preemptions(requests),
        **_steps(run),
        **_counts(run),
        "fairness/jain": fairness(run),
    }
    return {key: values[key] for key in SUMMARY_KEYS}


def empty_summary() -> Summary:
    """The summary of a run that did not get to its end."""
    return dict.fromkeys(SUMMARY_KEYS)


def _counts(run: Measured) -> Summary:
    counts = {status: int(with_status(run.requests, status).sum()) for status in STATUSES}
    return {
        "requests/offered": sum(counts.values()) + run.backlog_end,
        **{f"requests/{status}": count for status, count in counts.items()},
        "backlog_end": run.backlog_end,
    }


def _rates(run: Measured) -> Summary:
    """Tokens of all requests that emitted one, finished requests, over the makespan; attainment over the offered."""
    requests = run.requests
    output = int(requests["output_tokens"].sum())
    prompt = int(requests["prompt_tokens"][requests["output_tokens"] > 0].sum())
    span = makespan_ns(requests)
    seconds = None if span is None else span / NS
    meets = meets_slo(requests, run.slos) if run.slos else None
    good, offered = None if meets is None else int(meets.sum()), len(requests) + run.backlog_end
    return {
        "makespan_s": seconds,
        "throughput/requests_per_s": per(int(with_status(requests, "finished").sum()), seconds),
        "throughput/output_tokens_per_s": per(output, seconds),
        "throughput/total_tokens_per_s": per(prompt + output, seconds),
        "goodput/requests_per_s": None if good is None or not offered else per(good, seconds) or 0.0,
        "slo/attainment": None if good is None else per(good, offered),
        "slo/attainment_limited": None if meets is None else _attainment_limited(run, meets),
    }


def _attainment_limited(run: Measured, meets: np.ndarray) -> float | None:
    """None where all have a limit, for it is the attainment then. What never ended counts as limited and missed."""
    limited = np.isin(run.requests["slo"], [i for i, slo in enumerate(run.slos) if slo.limited])
    if limited.all():
        return None
    return per(int((meets & limited).sum()), int(limited.sum()) + run.backlog_end)


def _prefix(requests: np.ndarray) -> Summary:
    """Reuse at the first admission; None throughout where no prompt has an identity."""
    admitted = requests["first_scheduled_ns"] != UNKNOWN
    identified = admitted & (requests["cached_tokens"] != UNKNOWN)
    if not identified.any():
        return {"prefix/hit_rate": None, "prefix/tokens_reused": None, "prefix/tokens_resumed": None}
    reused = int(requests["cached_tokens"][identified].sum())
    return {
        "prefix/hit_rate": per(reused, int(requests["prompt_tokens"][admitted].sum())),
        "prefix/tokens_reused": reused,
        "prefix/tokens_resumed": int(requests["resumed_tokens"][admitted].sum()),
    }


def _preemptions(requests: np.ndarray) -> Summary:
    swaps = int(requests["swaps"].sum())
    return {
        "preemptions/recompute": int(requests["preemptions"].sum()) - swaps,
        "preemptions/swap": swaps,
        "recomputed_tokens": int(requests["recomputed_tokens"].sum()),
    }


def _steps(run: Measured) -> Summary:
    totals = run.steps
    sequences = per(totals.sequence_ns, totals.duration_ns)
    free_mean = per(totals.free_block_ns, totals.duration_ns)
    return {
        "kv/utilization_mean": _utilization(free_mean, run.num_blocks),
        "kv/utilization_max": _utilization(totals.free_blocks_min, run.num_blocks),
        "batch/tokens_mean": per(totals.token_ns, totals.duration_ns),
        "batch/requests_mean": sequences,
        "batch/idle_slot_share": None if sequences is None else 1 - sequences / run.max_num_seqs,
        "scheduler/us_per_step": per(totals.scheduler_ns / 1e3, totals.scheduled_steps),
        "steps": totals.steps,
        **{f"bound/{bound}": _bound_share(totals, bound) for bound in BOUNDS},
    }


def _utilization(free_blocks: float | None, num_blocks: float) -> float | None:
    """Share of the pool that requests own; cached blocks that nobody owns count as free."""
    return None if free_blocks is None or not num_blocks else (num_blocks - free_blocks) / num_blocks


def _bound_share(totals: StepTotals, bound: str) -> float | None:
    return per(totals.bound_ns.get(bound, 0), totals.duration_ns) if totals.bound_ns else None
