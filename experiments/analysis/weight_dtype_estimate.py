"""What narrower weights would make of a run's time per output token.

At a given stream of arrivals, faster steps also mean fewer requests at a time (Little's law) and fewer prompts in the
time of a token, so the gain is more than that of the weights alone; where a queue stands, both stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from schedlab.experiments.analysis.history import Histories
from schedlab.experiments.analysis.step_work import machine_of, works
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.roofline import Work
from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables

QUEUED = 0.5
"""Share of the steps' time with a queue from which on batches are taken to stay as large as they are."""


def tpot_with(run: RunTables, past: Histories, dtype: str, tpot: Mapping[str, float], weights: float) -> float | None:
    """Mean TPOT in seconds with weights of `dtype`; `tpot` are its parts now, `weights` the part of moving weights.

    None for an engine whose model is not known.
    """
    if (machine := machine_of(run.manifest or {})) is None:
        return None
    line, hardware = machine
    before = Coefficients.from_roofline(line, hardware)
    after = Coefficients.from_roofline(replace(line, weight_dtype=dtype), hardware)
    saved = 1 - (after.weights_ns + after.head_ns) / (before.weights_ns + before.head_ns)
    prompts = tpot["stalls"] * _ratio_of_prompts(run, past, before, after)
    others, present = tpot["preemption"] + tpot["left_out"], sum(tpot.values())
    decode = tpot["decode"] - weights * saved
    duration = run.steps["duration_ns"]
    if (duration * (run.steps["waiting"] > 0)).sum() >= QUEUED * duration.sum():
        return decode + prompts + others
    growing = min(_growing_with_the_batch(run, before), decode)
    return (decode - growing + others) / (1 - (growing + prompts) / present)


def _ratio_of_prompts(run: RunTables, past: Histories, before: Coefficients, after: Coefficients) -> float:
    """What prompts add to steps, after over before."""
    rows = np.flatnonzero(run.steps["prefill_tokens"] > 0)
    found = works(run, past)
    mixed = [found[row] for row in rows.tolist()]
    was = _added_ns(before, mixed)
    return _added_ns(after, mixed) / was if was else 1.0


def _added_ns(rates: Coefficients, mixed: Sequence[Work]) -> float:
    """Time of steps beyond that of their decodes alone."""
    return sum(rates.total_ns(work) - rates.total_ns(_decodes_of(work)) for work in mixed)


def _decodes_of(work: Work) -> Work:
    n = work.decodes
    return Work(n, n, n, decode_keys=work.decode_keys) if n else Work()


def _growing_with_the_batch(run: RunTables, rates: Coefficients) -> float:
    """Seconds of a mean decode step that grow with the number of its requests: their contexts, tokens and overheads."""
    steps = run.steps
    rows = steps["decode_requests"] > 0
    n, context, duration = (steps[name][rows] for name in ("decode_requests", "context_tokens", "duration_ns"))
    a_request = rates.token_ns + rates.row_ns + rates.request_ns
    return float(np.average(n * a_request + context * rates.decode_key_ns, weights=duration)) / NS
