"""The rows of a run's three tables, as the engine's side hands them over, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, NamedTuple

from schedlab.framework.request import NS, EngineRequest


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


STEP_WIDTH = len(StepRow._fields)


def step_lines(rows: list[Any]) -> str:
    """JSON of step rows that lie end to end, a line each."""
    lines = []
    for at in range(0, len(rows), STEP_WIDTH):
        row = rows[at : at + STEP_WIDTH]
        (
            index, repeat, now_ns, duration_ns, prefill_tokens, decode_tokens, prefill_requests, decode_requests,
            context_tokens, running, waiting, free_blocks, cached_blocks, copied_blocks, bound, scheduler_us, device_us,
        ) = row  # fmt: skip
        lines.append(
            f'{{"index":{index},"repeat":{repeat},"now_ns":{now_ns},"duration_ns":{duration_ns},'
            f'"prefill_tokens":{prefill_tokens},"decode_tokens":{decode_tokens},'
            f'"prefill_requests":{prefill_requests},"decode_requests":{decode_requests},'
            f'"context_tokens":{context_tokens},"running":{running},"waiting":{waiting},"free_blocks":{free_blocks},'
            f'"cached_blocks":{cached_blocks},"copied_blocks":{copied_blocks},'
            f'"bound":{"null" if bound is None else quote(bound)},'
            f'"scheduler_us":{"null" if scheduler_us is None else scheduler_us},'
            f'"device_us":{"null" if device_us is None else device_us}}}\n'
        )
    return "".join(lines)


def request_row(request: EngineRequest) -> tuple[Any, ...]:
    """The columns of REQUESTS, in order; times in nanoseconds, the SLO class itself, a limit of -1 for none."""
    return (
        request._request_id, request.source_row, request._client, request._session, request._priority,
        request._deadline_ns, request._slo, request._max_tokens, request._arrival_ns, request.visible_ns,
        request.first_scheduled_ns, request._first_token_ns, request.finished_ns, request.delivery_ns,
        request._num_prompt_tokens, request.num_output_tokens, request.cached_tokens, request.resumed_tokens,
        request._num_preemptions, request.swaps, request.recomputed_tokens, request._state, request.reason,
    )  # fmt: skip


REQUEST_WIDTH = 23


def request_lines(rows: list[Any]) -> str:
    """JSON of request rows that lie end to end, with names of SLO classes and no limit as None: a line each."""
    lines = []
    for at in range(0, len(rows), REQUEST_WIDTH):
        row = rows[at : at + REQUEST_WIDTH]
        (
            request_id, source_row, client, session, priority, deadline_ns, slo, max_tokens, arrival_ns, visible_ns,
            first_scheduled_ns, first_token_ns, finished_ns, delivery_ns, prompt_tokens, output_tokens, cached_tokens,
            resumed_tokens, preemptions, swaps, recomputed_tokens, status, reason,
        ) = row  # fmt: skip
        lines.append(
            f'{{"request_id":{quote(request_id)},"source_row":{"null" if source_row is None else source_row},'
            f'"client":{quote(client)},"session":{"null" if session is None else quote(session)},'
            f'"priority":{priority},"deadline_s":{_seconds(deadline_ns)},"slo":{"null" if slo is None else quote(slo)},'
            f'"max_tokens":{"null" if max_tokens is None else max_tokens},"arrival_s":{_seconds(arrival_ns)},'
            f'"visible_s":{_seconds(visible_ns)},"first_scheduled_s":{_seconds(first_scheduled_ns)},'
            f'"first_token_s":{_seconds(first_token_ns)},"finished_s":{_seconds(finished_ns)},'
            f'"delivery_s":{_seconds(delivery_ns)},"prompt_tokens":{prompt_tokens},"output_tokens":{output_tokens},'
            f'"cached_tokens":{"null" if cached_tokens is None else cached_tokens},'
            f'"resumed_tokens":{resumed_tokens},"preemptions":{preemptions},"swaps":{swaps},'
            f'"recomputed_tokens":{recomputed_tokens},"status":{quote(status)},'
            f'"reason":{"null" if reason is None else quote(reason)}}}\n'
        )
    return "".join(lines)


def _seconds(ns: int | None) -> str:
    """JSON of a time in seconds, with all of its nanoseconds: the shortest text of the number takes ten times as long.
    """
    if ns is None:
        return "null"
    n, second = ns, NS
    return f"{n // second}.{n % second:09d}" if n > 0 else repr(ns / NS)


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
