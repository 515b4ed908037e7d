"""A ragged batch in which a position is always attended by the same kernel, however it came to be computed.

A prompt's positions go through the prefill kernel, whatever the chunk, and generated ones through the decode kernel,
each as a sequence of its own, also where a preempted request computes many of them again. The two kernels round
differently, so a token's bits would else depend on who was preempted when. Knows positions; knows no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from schedlab.framework.batch import Inputs
from schedlab.framework.model.decoder import RaggedBatch, Span


@dataclass(slots=True)
class _Run:
    """Neighbouring rows of one phase, as sequences: their first rows and the end, contexts, and whose tables."""

    decode: bool
    rows_N1: list[int]
    contexts_N: list[int]
    sequences_N: list[int]


def batch_by_phase(inputs: Inputs, device: torch.device) -> RaggedBatch:
    """`RaggedBatch.of`, cut by phase."""

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    last_rows = inputs.query_starts_N1[inputs.emitting_S + 1] - 1
    spans = tuple(
        Span(
            decode=run.decode,
            rows=slice(run.rows_N1[0], run.rows_N1[-1]),
            query_starts_N1=tensor(np.array(run.rows_N1) - run.rows_N1[0]),
            context_lens_N=tensor(np.array(run.contexts_N)),
            block_tables_NB=tensor(inputs.block_tables_NB[run.sequences_N]),
        )
        for run in _runs(inputs)
    )
    return RaggedBatch(
        tensor(inputs.token_ids_T), tensor(inputs.positions_T), tensor(inputs.slots_T), tensor(last_rows), spans
    )


def all_generated(inputs: Inputs) -> bool:
    """Whether every grant is one generated position that emits the next: a step of decodes."""
    if len(inputs.token_ids_T) != len(inputs.requests) or len(inputs.emitting_S) != len(inputs.requests):
        return False
    return bool((inputs.positions_T >= [request.num_prompt_tokens for request in inputs.requests]).all())


def _runs(inputs: Inputs) -> list[_Run]:
    runs: list[_Run] = []
    for n, request in enumerate(inputs.requests):
        first, stop = int(inputs.query_starts_N1[n]), int(inputs.query_starts_N1[n + 1])
        start = int(inputs.positions_T[first])
        generated = min(max(first + request.num_prompt_tokens - start, first), stop)  # the first generated row
        if generated > first:
            _append(runs, False, generated, start + generated - first, n)
        for row in range(generated, stop):
            _append(runs, True, row + 1, start + row + 1 - first, n)
    return runs


def _append(runs: list[_Run], decode: bool, stop: int, context: int, sequence: int) -> None:
    """A sequence whose rows end at `stop`, with the run before it if that is of the same phase."""
    if not runs or runs[-1].decode != decode:
        runs.append(_Run(decode, [runs[-1].rows_N1[-1] if runs else 0], [], []))
    runs[-1].rows_N1.append(stop)
    runs[-1].contexts_N.append(context)
    runs[-1].sequences_N.append(sequence)
