"""Jump rows of a step log as the steps that they stand for, by the rates that the run's manifest keeps.

A jump is one row: how many steps, the cost inputs of the first, the total duration. What a step of it costs follows
from the cost model's rates alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from schedlab.framework.cost.coefficients import Coefficients, DecodeCost
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.tables import Columns, RunTables

UNKNOWN_WITHIN = ("free_blocks", "cached_blocks", "device_us")
"""Columns that a jump does not know of each step: when blocks were taken on the way is not logged, and nothing ran."""


def rates_of(executor: object) -> dict[str, Any] | None:
    """What a manifest keeps of the executor of a virtual run; None for one that measures or makes up its durations.

    With a profile, the error that it states too: the mean relative one over steps that its fit had not seen.
    """
    if not isinstance(executor, CostExecutor):
        return None
    profile = executor.profile
    stated = "unknown" if profile is None else profile.error.held_out_mean
    rates = {"coefficients": asdict(executor.coefficients), "explained": asdict(executor.explained)}
    return {**rates, "held_out_error": stated}


def expanded_steps(run: RunTables) -> Columns:
    """The steps of `run`, a row for each, equal to those of a run that was executed step by step.

    Left out are the columns of UNKNOWN_WITHIN; a run with `engine.fast_forward=false` logs them. ConfigError where
    jumps cannot be expanded: no rates in the manifest, or rates that do not give the durations of the log.
    """
    rates = (run.manifest or {}).get("cost")
    if rates is None and (run.steps["repeat"] != 1).any():
        raise ConfigError("steps: the log has jumps, and there is no manifest with the cost to expand them by")
    return expand(run.steps, rates or {}, (run.manifest or {}).get("engine", {}).get("max_chained_steps", 1))


def expand(steps: Columns, rates: Mapping[str, Any], chained: int = 1) -> Columns:
    """One row a step of the columns `steps`; `rates` as `rates_of` gives them.

    A row's steps are chains of `chained` and one of the rest, or are not chained, if that gives its duration.
    """
    repeat = steps["repeat"]
    row, within = _unrolled(repeat)
    out: Columns = {name: _taken(column, row) for name, column in steps.items() if name not in UNKNOWN_WITHIN}
    out["index"] += within
    out["context_tokens"] += within * out["decode_tokens"]
    out["scheduler_us"] = out["scheduler_us"] / repeat[row]
    out["repeat"] = np.ones_like(row)
    jumped = np.flatnonzero(repeat[row] != 1)
    if len(jumped):
        out["duration_ns"][jumped] = durations(steps, rates, chained, np.flatnonzero(repeat != 1))[0]
    for n in np.unique(out["decode_tokens"][jumped]):
        mine = jumped[out["decode_tokens"][jumped] == n]
        cost = _cost(rates, n)
        for at, context in zip(mine.tolist(), out["context_tokens"][mine].tolist(), strict=True):
            out["bound"][at] = cost.bound(context)
    _check(steps, out["duration_ns"], row)
    since = np.cumsum(out["duration_ns"]) - out["duration_ns"]
    out["now_ns"] += since - since[np.searchsorted(row, row)]
    return out


def boundaries(run: RunTables, rows: np.ndarray, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The row and the end (ns) of each boundary of the rows `rows`, in order; int64 [B]. The steps of a chain are one.

    Where the rates do not give a row's duration, which a chain that lacked a block does not, its boundaries are spread
    over the duration that is logged; `exact`: ConfigError for such a row of several.
    """
    if not len(rows):
        return rows, rows
    steps, manifest = run.steps, run.manifest or {}
    repeat, logged = steps["repeat"][rows], steps["duration_ns"][rows]
    took, begins = durations(steps, manifest.get("cost"), manifest.get("engine", {}).get("max_chained_steps", 1), rows)
    starts = np.cumsum(repeat) - repeat
    since = np.cumsum(took)
    since -= np.repeat(since[starts] - took[starts], repeat)
    last, total = np.append(begins[1:], True), np.add.reduceat(took, starts)
    row = np.repeat(rows, repeat)[last]
    wrong = (total != logged) & (np.add.reduceat(last, starts, dtype=int) > 1)
    if exact and wrong.any():
        raise _unexplained(steps, int(rows[wrong][0]), int(total[wrong][0]))
    share = np.repeat(logged / np.maximum(total, 1), repeat)[last]
    return row, steps["now_ns"][row] + np.rint(since[last] * share).astype(np.int64)


def durations(
    steps: Columns, rates: Mapping[str, Any] | None, chained: int, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What each step of the jump rows `rows` takes by `rates` (ns), and whether it begins a chain, end to end.

    Steps are chains of `chained` and one of the rest; single steps where these, and not the chains, give the row's
    duration. Without rates all steps of a row take the same.
    """
    repeat = steps["repeat"][rows]
    place, within = _unrolled(repeat)
    chains = within % chained == 0
    if not rates:
        return np.maximum(steps["duration_ns"][rows] // repeat, 1)[place], chains
    decodes, logged = steps["decode_tokens"][rows], steps["duration_ns"][rows]
    contexts = steps["context_tokens"][rows][place] + within * decodes[place]
    base, further, slope = (np.empty(len(rows), dtype=np.int64) for _ in range(3))
    for n in np.unique(decodes):
        cost = _cost(rates, n)
        mine = decodes == n
        base[mine], further[mine], slope[mine] = cost.base, cost.further, cost.slope
    single = (base[place] + slope[place] * contexts) >> DecodeCost.shift
    both = np.where(chains, single, (further[place] + slope[place] * contexts) >> DecodeCost.shift)
    sums = (np.add.reduceat(values, np.flatnonzero(within == 0)) for values in (both, single))
    by_chains, by_steps = (total == logged for total in sums)
    alone = (by_steps & ~by_chains)[place]
    return np.where(by_chains[place], both, single), chains | alone


def _unrolled(repeat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The row of each step, and its place in that row."""
    row = np.repeat(np.arange(len(repeat)), repeat)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(repeat) - repeat, repeat)


def _cost(rates: Mapping[str, Any], decodes: Any) -> DecodeCost:
    return DecodeCost(Coefficients(**rates["coefficients"]), Coefficients(**rates["explained"]), int(decodes))


def _taken(column: Any, row: np.ndarray) -> Any:
    return [column[i] for i in row.tolist()] if isinstance(column, list) else column[row]


def _check(steps: Columns, durations: np.ndarray, row: np.ndarray) -> None:
    total = np.bincount(row, weights=durations, minlength=len(steps["repeat"]))
    if len(wrong := np.flatnonzero(total != steps["duration_ns"])):
        raise _unexplained(steps, int(wrong[0]), int(total[wrong[0]]))


def _unexplained(steps: Columns, row: int, found_ns: int) -> ConfigError:
    return ConfigError(
        f"steps: the {steps['repeat'][row]} steps from {steps['index'][row]} on take {found_ns} ns by the cost in the "
        f"manifest, expected {steps['duration_ns'][row]} ns as in the log"
    )
