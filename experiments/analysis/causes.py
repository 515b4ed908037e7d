"""What made a run slow: four causes, the evidence for each, the change that it suggests and what that should bring.

A cause is named where its share of the latency that it is about reaches a threshold; named causes are ranked by the
seconds of a mean request that they took. Predictions hold everything else as it was, so they state an error. From
attributions and configurations; runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from schedlab.experiments.analysis.attribution import Attribution, StepCosts, attribute, costs_of
from schedlab.experiments.analysis.history import histories
from schedlab.experiments.analysis.rerun import Changes, repeatable
from schedlab.experiments.analysis.weight_dtype_estimate import tpot_with
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.windows import attention_reach
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables

ERROR = 0.1
"""Stated error of a prediction, as a share of the metric before the change."""
DOMINATES = 0.5
"""Share of TTFT from which on the queue, and of TPOT from which on the moving of weights, is a cause."""
DISTURBS = 0.3
"""Share of TPOT from which on prompts beside streams are a cause."""
WASTES = 0.15
"""Share of TTFT or of TPOT from which on preemptions are a cause."""
MATERIAL = 0.05
"""Share of a mean request's time below which nothing is named."""
CHUNK = 512


@dataclass(frozen=True)
class Suggestion:
    """A change, the summary key that it should move, and to what (seconds); None where nothing can be predicted."""

    words: str
    changes: Changes
    metric: str
    predicted: float | None


@dataclass(frozen=True)
class Cause:
    """`lost_s`: seconds of a mean request that it took; `share`: of the latency that `evidence` speaks of.

    `suggest` says what to change in a run like the one of a view; None where nothing can be.
    """

    name: str
    share: float
    lost_s: float
    evidence: str
    suggest: Callable[[View], Suggestion | None]


class View:
    """What the causes look at: means over requests, in seconds, and the steps."""

    def __init__(self, run: RunTables) -> None:
        self.run = run
        self.past = histories(run)
        self.parts: Attribution = attribute(run, self.past)
        config = (run.manifest or {}).get("config", {})
        self.config: Mapping[str, Any] = config if repeatable(config) else {}
        self.limits: Mapping[str, Any] = (run.manifest or {}).get("engine", {})

    @cached_property
    def costs(self) -> StepCosts:
        return costs_of(self.run)

    def summary(self, key: str) -> float:
        return float(self.run.summary[key] or 0.0)

    @cached_property
    def ttft(self) -> dict[str, float]:
        """Mean seconds of each part of TTFT."""
        return _means(self.parts.ttft, self.parts.has_ttft)

    @cached_property
    def tpot(self) -> dict[str, float]:
        """Mean seconds a token of each part of TPOT."""
        return _means(self._a_token(self.parts.tpot), self.parts.has_tpot)

    @cached_property
    def weights(self) -> float:
        """Mean seconds a token of moving weights, a part of `decode`."""
        return _means(self._a_token({"weights": self.parts.weights}), self.parts.has_tpot)["weights"]

    def slowest(self) -> tuple[dict[str, float], dict[str, float]]:
        """The parts of TTFT and of TPOT again, of the hundredth of the requests that has most of it."""
        tpot = self._a_token(self.parts.tpot)
        return (
            _means(self.parts.ttft, _last_hundredth(self.parts.ttft, self.parts.has_ttft)),
            _means(tpot, _last_hundredth(tpot, self.parts.has_tpot)),
        )

    def _a_token(self, parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: values / np.maximum(self.parts.gaps, 1) for name, values in parts.items()}

    def lost(self, *values: np.ndarray) -> float:
        """Seconds of a mean request."""
        return _mean(sum(values)[self.parts.has_ttft]) / NS  # type: ignore[index]

    @cached_property
    def request_s(self) -> float:
        """Seconds of a mean request from arrival to delivery."""
        return self.lost(*self.parts.ttft.values(), *self.parts.tpot.values())

    @cached_property
    def waiting(self) -> np.ndarray:
        """bool [R]: steps with a queue."""
        return np.asarray(self.run.steps["waiting"] > 0)

    def time_share(self, rows: np.ndarray, among: np.ndarray) -> float:
        """Share of the time of steps `among` that is of steps `rows`."""
        duration = self.run.steps["duration_ns"]
        return float((duration * (rows & among)).sum() / max((duration * among).sum(), 1))


def causes(view: View) -> list[Cause]:
    """Named causes, the costliest first; none for a run that nothing dominates."""
    if not view.parts.has_ttft.any():
        return []
    found = (find(view) for find in FINDERS)
    named = [cause for cause in found if cause is not None and cause.lost_s >= MATERIAL * view.request_s]
    return sorted(named, key=lambda cause: -cause.lost_s)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _means(parts: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, float]:
    """Seconds."""
    return {name: _mean(values[rows]) / NS for name, values in parts.items()}


def _last_hundredth(parts: Mapping[str, np.ndarray], rows: np.ndarray) -> np.ndarray:
    """bool [N]: those of `rows` whose sum is at or above the 99th percentile."""
    whole = np.sum(list(parts.values()), axis=0)
    return rows & (whole >= np.percentile(whole[rows], 99)) if rows.any() else rows


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---- the queue ----


def queueing(view: View) -> Cause | None:
    share = _share(view.ttft["queue"], sum(view.ttft.values()))
    if share < DOMINATES:
        return None
    words, _ = _what_holds_the_queue(view)
    evidence = f"{share:.0%} of TTFT passes before a first grant, so faster prefill would leave it untouched; {words}"
    return Cause("queueing", share, view.lost(view.parts.ttft["queue"]), evidence, _more_capacity)


def _what_holds_the_queue(view: View) -> tuple[str, str]:
    """What was short for most of the time with a queue: slots, blocks for one more mean prompt, or the steps."""
    steps, limits, among = view.run.steps, view.limits, view.waiting
    slots = view.time_share(steps["running"] >= limits.get("max_num_seqs", np.inf), among)
    needed = _mean(view.run.requests["prompt_tokens"]) / limits.get("block_size", 16)
    blocks = view.time_share(steps["free_blocks"] < needed, among)
    if max(slots, blocks) < DOMINATES:
        return "slots and blocks were free, the steps themselves are too slow for what arrives", "steps"
    if slots >= blocks:
        return f"all {limits['max_num_seqs']} slots were taken in {slots:.0%} of the time with a queue", "slots"
    return f"KV blocks for one more prompt were missing in {blocks:.0%} of the time with a queue", "blocks"


def _more_capacity(view: View) -> Suggestion:
    _, limit = _what_holds_the_queue(view)
    present, wait = view.summary("ttft/mean"), view.ttft["queue"]
    predicted = present - wait + _queue_with(view, replicas=2)
    words = "a second engine for every other request, or an admission limit that keeps what arrives at half of it"
    if limit == "slots":
        words = "a second engine, or more slots (max_num_seqs), for every other request"
    elif limit == "blocks":
        words = "a second engine, or more KV blocks (num_blocks, kv_cache_dtype), for every other request"
    return Suggestion(words, Changes(replicas=2), "ttft/mean", predicted)


def _queue_with(view: View, replicas: int) -> float:
    """Mean wait if each engine got every so many-th request and went on admitting as fast as it did with a queue.

    Lindley's recursion (Proc. Camb. Phil. Soc. 48, 1952): a wait is the last one's plus a service less a gap.
    """
    first, visible = (np.sort(view.run.requests[name]) for name in ("first_scheduled_s", "visible_s"))
    first = first[~np.isnan(first)]
    steps = view.run.steps
    busy = float((steps["duration_ns"] * view.waiting).sum()) / NS
    starts = np.searchsorted(steps["now_ns"] / NS, first, "right") - 1
    admitted = int(view.waiting[np.clip(starts, 0, None)].sum())
    if not admitted:
        return 0.0
    service, wait, total = busy / admitted, 0.0, 0.0
    gaps = np.diff(visible[::replicas])
    for gap in gaps.tolist():
        wait = max(wait + service - gap, 0.0)
        total += wait
    return total / (len(gaps) + 1)


# ---- prompts beside streams ----


def interference(view: View) -> Cause | None:
    share = _share(view.tpot["stalls"], sum(view.tpot.values()))
    if share < DISTURBS:
        return None
    evidence = (
        f"{share:.0%} of TPOT is waiting for the prompts of others; the longest gap between two tokens is "
        f"{view.summary('itl/max') * 1e3:,.0f} ms where the median is {view.summary('itl/p50') * 1e3:,.1f} ms"
    )
    return Cause("prefill interference", share, view.lost(view.parts.tpot["stalls"]), evidence, _smaller_chunks)


def _smaller_chunks(view: View) -> Suggestion:
    policy = view.config.get("policy", {})
    for knob in ("chunk_size", "stall_tokens"):
        if isinstance(policy.get(knob), int):
            tokens = max(int(policy[knob]) // 2, 1)
            changes = Changes({f"policy.{knob}": tokens})
            return Suggestion(f"policy.{knob}={tokens}", changes, "itl/p99", _gap_with_chunks(view, tokens))
    target = "schedlab.policies.chunked_prefill.ChunkedPrefill"
    node = {"_target_": target, "chunk_size": CHUNK}
    words = f"policy=chunked_prefill policy.chunk_size={CHUNK}"
    return Suggestion(words, Changes({"policy": node}), "itl/p99", _gap_with_chunks(view, CHUNK))


def _gap_with_chunks(view: View, tokens: int) -> float | None:
    """The 99th percentile of gaps if every prompt were computed in chunks beside as many decodes as now."""
    if (rates := _rates(view)) is None:
        return None
    steps = view.run.steps
    rows = steps["decode_requests"] > 0
    decodes = round(np.average(steps["running"][rows], weights=steps["duration_ns"][rows]))
    context = round(np.average(steps["context_tokens"][rows] / steps["decode_requests"][rows])) * decodes
    chunk = max(tokens - decodes, 1)
    starts = np.concatenate([np.arange(0, prompt, chunk) for prompt in view.run.requests["prompt_tokens"].tolist()])
    undisturbed = int(steps["repeat"][rows & (steps["prefill_tokens"] == 0)].sum())
    beyond = 0.01 * (len(starts) + undisturbed) / len(starts)  # the share of chunks with a longer gap
    start = int(np.quantile(starts, max(1 - beyond, 0)))
    pairs, keys = attention_reach(start, chunk)
    return sum(rates.shares_ns(chunk + decodes, decodes + 1, decodes, 1, pairs, keys, context, 0)) / NS


def _rates(view: View) -> Coefficients | None:
    cost = (view.run.manifest or {}).get("cost")
    return Coefficients(**cost["coefficients"]) if cost else None


# ---- weights ----

NARROWER = {"fp32": "bf16", "bf16": "fp8", "fp16": "fp8", "fp8": "int4", "int8": "int4"}


def weights(view: View) -> Cause | None:
    share = _share(view.weights, sum(view.tpot.values()))
    if share < DOMINATES:
        return None
    evidence = (
        f"{share:.0%} of TPOT is moving weights from memory, once a step for {view.summary('batch/requests_mean'):.0f} "
        f"requests"
    )
    return Cause("weight movement", share, view.lost(view.parts.weights), evidence, _narrower_weights)


def _narrower_weights(view: View) -> Suggestion | None:
    engine = view.config.get("engine", {})
    dtype = NARROWER.get(engine.get("weight_dtype", ""))
    if dtype is None:
        return None
    if dtype == "fp8" and "fp8" not in (engine.get("hardware") or {}).get("peak_tflops", ()):
        dtype = "int8"
    words = f"engine.weight_dtype={dtype}, or a device with more memory bandwidth"
    predicted = tpot_with(view.run, view.past, dtype, view.tpot, view.weights)
    return Suggestion(words, Changes({"engine.weight_dtype": dtype}), "tpot/mean", predicted)


# ---- preemption ----


def preemption(view: View) -> Cause | None:
    of_ttft = _share(view.ttft["recompute"], sum(view.ttft.values()))
    of_tpot = _share(view.tpot["preemption"], sum(view.tpot.values()))
    if max(of_ttft, of_tpot) < WASTES:
        return None
    summary = view.run.summary
    evidence = (
        f"{of_tpot:.0%} of TPOT and {of_ttft:.0%} of TTFT is waiting after preemptions and catching up; requests were "
        f"preempted {summary['preemptions/recompute']:,} times and swapped {summary['preemptions/swap']:,} times, and "
        f"{summary['recomputed_tokens']:,} tokens were computed again"
    )
    lost = view.lost(view.parts.tpot["preemption"], view.parts.ttft["recompute"])
    return Cause("preemption", max(of_ttft, of_tpot), lost, evidence, _more_blocks)


def _more_blocks(view: View) -> Suggestion:
    blocks = max(_blocks_together(view), int(view.limits["num_blocks"]) + 1)
    words = f"engine.num_blocks={blocks}, or another victim rule or preempt_mode of the policy"
    return Suggestion(words, Changes({"engine.num_blocks": blocks}), "tpot/mean", _without_preemption(view))


def _blocks_together(view: View) -> int:
    """Blocks for all that were admitted and not finished at one time, at their full lengths: the most at any time."""
    requests = view.run.requests
    admitted = ~np.isnan(requests["first_scheduled_s"])
    tokens = (requests["prompt_tokens"] + requests["output_tokens"])[admitted]
    blocks = -(-tokens // int(view.limits["block_size"]))
    times = np.concatenate([requests["finished_s"][admitted], requests["first_scheduled_s"][admitted]])
    changes = np.concatenate([-blocks, blocks])
    return int(np.cumsum(changes[np.argsort(times, kind="stable")]).max(initial=0))


def _without_preemption(view: View) -> float:
    """TPOT without its preemptions, its decodes in batches that hold the preempted ones too."""
    steps, decodes = view.run.steps, view.run.steps["decode_requests"]
    rows = decodes > 0
    mean = float(np.average(decodes[rows], weights=steps["duration_ns"][rows])) if rows.any() else 0.0
    absent = float(view.parts.tpot["preemption"].sum()) / max(float(steps["duration_ns"].sum()), 1.0)
    context = float(np.average(steps["context_tokens"][rows] / decodes[rows])) if rows.any() else 0.0
    row = int(np.flatnonzero(rows)[0]) if rows.any() else 0
    before, after = (view.costs.decodes_ns(row, max(round(n), 1), round(n * context)) for n in (mean, mean + absent))
    return view.summary("tpot/mean") - view.tpot["preemption"] + view.tpot["decode"] * (after / before - 1)


FINDERS: tuple[Callable[[View], Cause | None], ...] = (queueing, interference, weights, preemption)
