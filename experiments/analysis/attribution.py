"""Where the time of every request went, in parts that add up to its latencies to the nanosecond.

TTFT = preparation + queue + prefill + interference + recompute + delivery
    queue         visible to the first grant
    prefill       what its own grants would have taken as steps of their own
    interference  the rest of the steps it shared, and steps of others after its first grant
    recompute     waiting after a preemption, and computing again what had been computed before
last - first token = decode + stalls + preemption + left_out
    decode        what its steps would have taken with the decodes alone; of this, `weights` moved weights
    stalls        what prompts added to steps it shared, and steps without decodes
    preemption    from each preemption until it decodes again
    left_out      steps that decoded others only, and the policy's idling

"Would have taken" is asked of the cost model of the run; of a measured run, of a fit to its own steps (StepCosts). An
estimate is never more than the step took, so that the parts stay exact and none is negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from schedlab.experiments.analysis.history import Histories, History, LoggedGrant, Phase, histories
from schedlab.framework.cost.coefficients import Coefficients, DecodeCost
from schedlab.framework.cost.windows import attention_reach
from schedlab.framework.results.tables import Columns, RunTables

TTFT_PARTS = ("preparation", "queue", "prefill", "interference", "recompute", "delivery")
TPOT_PARTS = ("decode", "stalls", "preemption", "left_out")
FEW = 8
"""Steps of one kind below which nothing is fitted to them."""


# ---- what a part of a step would have taken alone ----


class StepCosts(Protocol):
    """Nanoseconds of a step that never ran, beside one that did."""

    def decodes_ns(self, row: int, decodes: int, context: int) -> int:
        """Of row `row` had it had its decodes only; `context` is the sum of theirs after the step."""

    def grant_ns(self, row: int, grant: LoggedGrant) -> int:
        """Of row `row` had it had this grant only."""

    def weights_ns(self, decodes: int) -> int:
        """Time that a decode step spends on moving weights; 0 where that is not known."""


class ModelledCosts:
    """From the rates in a manifest (`cost.expand.rates_of`)."""

    def __init__(self, rates: Mapping[str, Any]) -> None:
        self._rates, self.explained = Coefficients(**rates["coefficients"]), Coefficients(**rates["explained"])
        self._decodes: dict[int, DecodeCost] = {}

    def decodes_ns(self, row: int, decodes: int, context: int) -> int:
        cost = self._decodes.get(decodes)
        if cost is None:
            cost = self._decodes[decodes] = DecodeCost(self._rates, self.explained, decodes)
        return cost.duration_ns(context)

    def grant_ns(self, row: int, grant: LoggedGrant) -> int:
        pairs, keys = attention_reach(grant.start, grant.tokens)
        if grant.tokens == 1:
            return round(sum(self._rates.shares_ns(1, grant.emits, 1, 0, 0, 0, keys, 0)))
        return round(sum(self._rates.shares_ns(grant.tokens, grant.emits, 0, 1, pairs, keys, 0, 0)))

    def weights_ns(self, decodes: int) -> int:
        rates = self.explained
        moved = rates.weights_ns if decodes <= rates.linear_ridge else 0.0
        return round(moved + (rates.head_ns if decodes <= rates.logits_ridge else 0.0))


class FittedCosts:
    """From the run's own steps: those of decodes only and those of prompts only, each by least squares.

    Where there are too few of a kind, tokens share a step.
    """

    def __init__(self, steps: Columns) -> None:
        self._steps = steps
        self._tokens = steps["prefill_tokens"] + steps["decode_tokens"]
        self._of_decodes = self._fit(steps["prefill_tokens"] == 0, steps["decode_tokens"])
        self._of_prompts = self._fit(steps["decode_tokens"] == 0, steps["prefill_tokens"])

    def _fit(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        rows = rows & (tokens > 0)
        if rows.sum() < FEW:
            return None
        repeat = self._steps["repeat"][rows]
        inputs = np.column_stack([np.ones(rows.sum()), tokens[rows], self._steps["context_tokens"][rows]])
        rates: np.ndarray = np.linalg.lstsq(inputs, self._steps["duration_ns"][rows] / repeat, rcond=None)[0]
        return rates

    def _estimate(self, rates: np.ndarray | None, row: int, tokens: int, context: int) -> int:
        if rates is None:
            return int(self._steps["duration_ns"][row]) * tokens // int(self._tokens[row])
        return max(round(float(rates @ (1, tokens, context))), 0)

    def decodes_ns(self, row: int, decodes: int, context: int) -> int:
        return self._estimate(self._of_decodes, row, decodes, context)

    def grant_ns(self, row: int, grant: LoggedGrant) -> int:
        return self._estimate(self._of_prompts, row, grant.tokens, grant.start + grant.tokens)

    def weights_ns(self, decodes: int) -> int:
        return 0


def costs_of(run: RunTables) -> StepCosts:
    rates = (run.manifest or {}).get("cost")
    return ModelledCosts(rates) if rates else FittedCosts(run.steps)


# ---- parts ----


@dataclass(frozen=True)
class Attribution:
    """int64 nanoseconds [N] of each part, by name, for the requests table's rows; 0 where there is no such latency.

    `has_ttft`, `has_tpot`: bool [N], the rows that enter these latencies' statistics; `gaps`: their tokens after the
    first. `weights` is a part of `decode`.
    """

    ttft: Mapping[str, np.ndarray]
    tpot: Mapping[str, np.ndarray]
    weights: np.ndarray
    has_ttft: np.ndarray
    has_tpot: np.ndarray
    gaps: np.ndarray


def attribute(run: RunTables, past: Histories | None = None) -> Attribution:
    """The parts of every latency of `run`, which must have its logs; `past` saves reading them again."""
    past = past or histories(run)
    rows = _StepParts.of(run, past, costs_of(run))
    ttft = np.array([_ttft(past, rows, history) for history in past.requests], dtype=np.int64).reshape(-1, 6)
    tpot = np.array([_tpot(past, rows, history) for history in past.requests], dtype=np.int64).reshape(-1, 5)
    output = run.requests["output_tokens"]
    served = np.isin(run.requests["status"], ["finished", "length_capped"])
    first, inside = ~np.isnan(run.requests["first_token_s"]), _inside(run)
    return Attribution(
        ttft=dict(zip(TTFT_PARTS, ttft.T, strict=True)),
        tpot=dict(zip(TPOT_PARTS, tpot.T[:4], strict=True)),
        weights=tpot[:, 4],
        has_ttft=inside & first & (served | np.isin(run.requests["status"], ["aborted"])),
        has_tpot=inside & served & (output > 1),
        gaps=np.maximum(output - 1, 0),
    )


def _inside(run: RunTables) -> np.ndarray:
    """bool [N]: arrived in the measured window."""
    window, arrival = run.result["measurement"]["window"], run.requests["arrival_s"]
    start, stop = window["start_s"], window["stop_s"]
    return np.asarray((arrival >= (start or 0.0)) & (arrival < (np.inf if stop is None else stop)))


@dataclass(frozen=True)
class _StepParts:
    """Per row: the time a decoding request is stalled, left out, and moves weights, summed over the rows before it.

    int64 [R + 1]; `grant_ns` answers for one grant.
    """

    stalled: np.ndarray
    idle: np.ndarray
    weights: np.ndarray
    costs: StepCosts

    @classmethod
    def of(cls, run: RunTables, past: Histories, costs: StepCosts) -> _StepParts:
        steps, slot = run.steps, np.diff(past.slots.now_ns)
        prompts, decodes = steps["prefill_requests"] > 0, steps["decode_requests"] > 0
        alone, granted = steps["duration_ns"].copy(), _granted_context(past, len(slot))
        for row in np.flatnonzero(prompts & decodes).tolist():
            context = int(steps["context_tokens"][row] - granted[row])
            alone[row] = min(costs.decodes_ns(row, int(steps["decode_requests"][row]), context), int(alone[row]))
        stalled = np.where(decodes, steps["duration_ns"] - alone, np.where(prompts, slot, 0))
        sizes, which = np.unique(steps["decode_requests"], return_inverse=True)
        moved = np.array([costs.weights_ns(n) if n else 0 for n in sizes.tolist()], dtype=np.int64)[which]
        weights = np.where(decodes, np.minimum(moved * steps["repeat"], alone), 0)
        idle = np.where(prompts | decodes, 0, slot)
        return cls(_running(stalled), _running(idle), _running(weights), costs)


def _running(values: np.ndarray) -> np.ndarray:
    """Sums over what comes before each place and, last, over all."""
    return np.concatenate([[0], np.cumsum(values)])


def _granted_context(past: Histories, rows: int) -> np.ndarray:
    """Context that a row's prompts hold after it, int64 [R]."""
    context = np.zeros(rows, dtype=np.int64)
    for history in past.requests:
        for phase in history.phases:
            for grant in phase.grants:
                context[grant.row] += grant.start + grant.tokens
    return context


def _ttft(past: Histories, rows: _StepParts, history: History) -> tuple[int, ...]:
    if history.first_token_ns is None or history.first_scheduled_ns is None:
        return (0,) * 6
    preparation = history.visible_ns - history.arrival_ns
    queue = history.first_scheduled_ns - history.visible_ns
    own = again = reached = 0
    for phase in _before_first_token(past, history):
        if phase.kind != "prefill":
            again += _lasting(past, history, phase)
            reached = reached if phase.kind == "recompute" else 0  # what is swapped in is not computed again
        for grant in phase.grants:
            lasted = min(int(past.slots.now_ns[grant.row + 1]), history.first_token_ns)
            took = min(rows.costs.grant_ns(grant.row, grant), lasted - int(past.slots.now_ns[grant.row]))
            twice = took * min(max(reached - grant.start, 0), grant.tokens) // grant.tokens
            own, again = own + took - twice, again + twice
        reached = max([reached, *(grant.start + grant.tokens for grant in phase.grants)])
    interference = history.first_token_ns - history.first_scheduled_ns - own - again
    return preparation, queue, own, interference, again, history.delivery_ns


def _before_first_token(past: Histories, history: History) -> list[Phase]:
    assert history.first_token_ns is not None
    return [phase for phase in history.phases if past.slots.now_ns[phase.first] < history.first_token_ns]


def _lasting(past: Histories, history: History, phase: Phase) -> int:
    """Nanoseconds of a phase."""
    return min(int(past.slots.now_ns[phase.stop]), history.finished_ns) - int(past.slots.now_ns[phase.first])


def _of(sums: np.ndarray, row: int) -> int:
    """What one row adds to running sums."""
    return int(sums[row + 1] - sums[row])


def _tpot(past: Histories, rows: _StepParts, history: History) -> tuple[int, ...]:
    if history.first_token_ns is None:
        return (0,) * 5
    total = history.finished_ns - history.first_token_ns
    stalls = preemption = left_out = weights = 0
    for phase in history.phases[len(_before_first_token(past, history)) :]:
        if phase.kind != "decode":
            preemption += _lasting(past, history, phase)
            continue
        stalled, idle, moved = (
            int(sums[phase.stop] - sums[phase.first]) for sums in (rows.stalled, rows.idle, rows.weights)
        )
        for row in past.left_out(history, phase):
            left_out += _of(past.slots.now_ns, row) - _of(rows.stalled, row)
            moved -= _of(rows.weights, row)
        stalled -= sum(_of(rows.stalled, row) for row in past.decoded_apart(history, phase))
        stalls, left_out, weights = stalls + stalled, left_out + idle, weights + moved
    decode = total - stalls - preemption - left_out
    return decode, stalls, preemption, left_out, min(weights, decode)
