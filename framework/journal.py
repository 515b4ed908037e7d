"""Turns a decided step into the rows of the log. Knows the step, the batch and the recorder's columns; decides
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from schedlab.framework.batch import Batch
from schedlab.framework.executor import StepResult
from schedlab.framework.results.rows import StepRow
from schedlab.framework.step import Decision

if TYPE_CHECKING:
    from schedlab.framework.engine import Engine


def log_step(
    engine: Engine, decision: Decision, batch: Batch, result: StepResult, duration_ns: int, scheduler_us: float
) -> None:
    """One decision row and one step row; called after execution and before the commit changes the books."""
    log_decision(engine, decision, batch.steps)
    decodes, prefills, ledger = batch.decodes, batch.prefills, engine.ledger
    context = batch.decode_context
    for _, start, count in prefills:
        context += start + count
    engine.recorder.step(StepRow(
        engine.num_steps, batch.steps, decision.now_ns, duration_ns, batch.prefill_tokens, len(decodes), len(prefills),
        len(decodes), context, len(ledger.running), len(ledger.waiting), ledger.cache.num_free,
        ledger.cache.num_unowned,
        len(batch.copies_out) + len(batch.copies_in), result.bound, scheduler_us, result.device_us,
    ))  # fmt: skip
    engine.num_steps += batch.steps


def log_decision(engine: Engine, decision: Decision, steps: int = 1) -> None:
    """The decision row: what was granted and preempted, and what was refused. A chain decides all its steps at once."""
    if decision.decodes_all and not (decision.prefills or decision.preempted or decision.refusals):
        engine.recorder.decode_all(engine.num_steps, decision.now_ns, steps)
        return
    grants, starts = [], []
    for request, start, count in decision.prefills:
        grants.append((request._request_id, count))
        starts.append(start)
    idle = decision.idle_until_ns
    engine.recorder.decision(
        engine.num_steps,
        decision.now_ns,
        [(victim._request_id, mode) for victim, mode, _ in decision.preempted] if decision.preempted else [],
        grants,
        "all" if decision.decodes_all else [request._request_id for request in decision.decodes],
        decision.decodes_at,
        decision.refusals,
        None if idle is None or math.isinf(idle) else int(idle),
        starts,
    )
    if steps > 1:
        engine.recorder.decode_all(engine.num_steps + 1, decision.now_ns, steps - 1)
