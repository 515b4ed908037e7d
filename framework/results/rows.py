"""The rows of a run's three tables, as the engine's side hands them over: a step, a request, a decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from schedlab.framework.request import EngineRequest


class StepRow(NamedTuple):
    """An executed batch, or `repeat` equal ones with durations and scheduler times summed: the columns of STEPS.

    Of several batches, the other columns are those of the first. `free_blocks` counts cached blocks that nobody owns,
    as `Step.free_blocks` does; `cached_blocks` are these. `scheduler_us` is None where the policy was not asked or its
    time is not known; `device_us`, what the device itself took, where no executor measures it.
    """

    index: int  # type: ignore[assignment]  # the column, where a tuple has a method
    repeat: int
    now_ns: int
    duration_ns: int
    prefill_tokens: int
    decode_tokens: int
    prefill_requests: int
    decode_requests: int
    context_tokens: int
    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    copied_blocks: int
    bound: str | None
    scheduler_us: float | None
    device_us: float | None = None


def request_row(request: EngineRequest) -> tuple[Any, ...]:
    """The columns of REQUESTS, in order; times in nanoseconds, the SLO class itself, a limit of -1 for none."""
    return (
        request._request_id, request.source_row, request._client, request._session, request._priority,
        request._deadline_ns, request._slo, request._max_tokens, request._arrival_ns, request.visible_ns,
        request.first_scheduled_ns, request._first_token_ns, request.finished_ns, request.delivery_ns,
        request._num_prompt_tokens, request.num_output_tokens, request.cached_tokens, request.resumed_tokens,
        request._num_preemptions, request.swaps, request.recomputed_tokens, request._state, request.reason,
    )  # fmt: skip


class DecisionRow(NamedTuple):
    """What a policy decided at a boundary, or `repeat` times in a row.

    `batch`, `refusals` and `idle_s` are JSON: the members of digest.batch_text, the elements of an array, a number or
    null. `starts` are the positions from which the grants compute.
    """

    index: int  # type: ignore[assignment]  # the column, where a tuple has a method
    repeat: int
    now_ns: int
    batch: str
    refusals: str
    idle_s: str
    starts: Sequence[int]


def decision_line(row: DecisionRow) -> str:
    """JSON of a row, with its newline."""
    index, repeat, now_ns, batch, refusals, idle_s, starts = row
    return (
        f'{{"index":{index},"repeat":{repeat},"now_ns":{now_ns},{batch},"starts":[{",".join(map(str, starts))}],'
        f'"refusals":[{refusals}],"idle_until_s":{idle_s}}}\n'
    )
