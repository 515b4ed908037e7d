"""From grants to what an executor consumes: the batch, and its ragged arrays.

Knows slots, block tables and lengths; knows nothing of policies or of why a token was granted.
Shape letters: N grants, T tokens of all grants, S grants that emit a token, B blocks of the widest table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from schedlab.framework.cohort import DecodeCohort
    from schedlab.framework.request import EngineRequest


class Prefill(NamedTuple):
    """A grant that is not a plain decode: `count` tokens of `request` from position `start`."""

    request: EngineRequest
    start: int
    count: int


@dataclass(slots=True)
class Inputs:
    """A ragged batch, all granted tokens concatenated in batch order.

    token_ids_T, positions_T, slots_T : int64; slot = block * block_size + offset, where the token's K and V go
    query_starts_N1                   : int64 [N + 1], first token of each grant, and T
    context_lens_N                    : int64, tokens of each sequence in the cache after the step (start + count)
    rows_N                            : int64, the engine's slot of each sequence
    block_tables_NB                   : int64, valid up to ceil(context_len / block_size), padded with 0
    emitting_S                        : int64, indices of the grants whose last token yields a next token
    output_positions_S                : int64, position of the token to be drawn, for seeded sampling
    requests                          : the N requests, for sampling parameters
    """

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    query_starts_N1: np.ndarray
    context_lens_N: np.ndarray
    rows_N: np.ndarray
    block_tables_NB: np.ndarray
    emitting_S: np.ndarray
    output_positions_S: np.ndarray
    requests: list[EngineRequest]


@dataclass(slots=True)
class Batch:
    """One step's work in grant order: `prefills[:decodes_at]`, then `decodes`, then the rest of `prefills`.

    `decodes` each compute one token from `num_computed_tokens` on and emit one. `copies_out` are (device block, host
    block) pairs and run first; `copies_in` are (host block, device block) pairs and run next. `inputs` is None unless
    the executor needs them.
    """

    prefills: list[Prefill] = field(default_factory=list)
    decodes: list[EngineRequest] = field(default_factory=list)
    decodes_at: int = 0
    prefill_tokens: int = 0
    decode_context: int = 0
    copies_out: list[tuple[int, int]] = field(default_factory=list)
    copies_in: list[tuple[int, int]] = field(default_factory=list)
    inputs: Inputs | None = None

    def requests(self) -> list[EngineRequest]:
        """The batch's requests in batch order."""
        if not self.prefills:
            return self.decodes
        granted = [prefill.request for prefill in self.prefills]
        return granted[: self.decodes_at] + self.decodes + granted[self.decodes_at :]


class Columns:
    """The running requests' tokens and block tables as arrays, a row a slot, from which a batch's inputs are gathered.

    Rows are written when something about a request changes; a decode-only step then costs a few array operations.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, max_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int64)
        self._cohort_version = -1
        self._cohort_slots = np.empty(0, dtype=np.int64)
        self._cohort_bases = np.empty(0, dtype=np.int64)

    def enter(self, request: EngineRequest, prompt_T: np.ndarray) -> None:
        """A request was given a slot: write its prompt and what it has generated."""
        row = self.tokens[request.slot]
        row[: len(prompt_T)] = prompt_T
        row[len(prompt_T) : request.num_tokens] = request.output_token_ids

    def leave(self, request: EngineRequest, slot: int) -> None:
        """A request gives up `slot`: keep what it has generated."""
        row = self.tokens[slot, request.num_prompt_tokens : request.num_tokens]
        request.output_token_ids = row.tolist()

    def refresh(self, request: EngineRequest) -> None:
        """The request's whole block table may have changed."""
        self.block_tables[request.slot, : len(request.block_table)] = request.block_table

    def inputs(self, batch: Batch, cohort: DecodeCohort) -> Inputs:
        """The ragged arrays of `batch`, before its commit."""
        before, after = batch.prefills[: batch.decodes_at], batch.prefills[batch.decodes_at :]
        for request, _, _ in batch.prefills:
            self.refresh(request)
        slots_N, starts_N, counts_N = (
            np.concatenate(parts)
            for parts in zip(_columns(before), self._decode_columns(batch, cohort), _columns(after), strict=True)
        )
        return self._gather(batch, slots_N, starts_N, counts_N)

    def _decode_columns(self, batch: Batch, cohort: DecodeCohort) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if batch.decodes is cohort.members or batch.decodes == cohort.members:
            if self._cohort_version != cohort.version:
                self._cohort_version = cohort.version
                self._cohort_slots = _int_array(request.slot for request in batch.decodes)
                self._cohort_bases = _int_array(request._computed for request in batch.decodes)
            slots, starts = self._cohort_slots, self._cohort_bases + cohort.tick
        else:
            slots = _int_array(request.slot for request in batch.decodes)
            starts = _int_array(request.num_computed_tokens for request in batch.decodes)
        for i in np.flatnonzero(starts % self.block_size == 0):
            table = batch.decodes[i].block_table
            self.block_tables[slots[i], len(table) - 1] = table[-1]
        return slots, starts, np.ones_like(slots)

    def _gather(self, batch: Batch, slots_N: np.ndarray, starts_N: np.ndarray, counts_N: np.ndarray) -> Inputs:
        query_starts = np.zeros(len(counts_N) + 1, dtype=np.int64)
        np.cumsum(counts_N, out=query_starts[1:])
        if len(batch.prefills):
            rows_T = np.repeat(slots_N, counts_N)
            positions_T = np.arange(query_starts[-1]) + np.repeat(starts_N - query_starts[:-1], counts_N)
        else:
            rows_T, positions_T = slots_N, starts_N
        context_N = starts_N + counts_N
        block_index_T, offset_T = np.divmod(positions_T, self.block_size)
        widest = -(-int(context_N.max(initial=0)) // self.block_size)
        emitting = self._emitting(batch)
        return Inputs(
            token_ids_T=self.tokens[rows_T, positions_T].astype(np.int64),
            positions_T=positions_T,
            slots_T=self.block_tables[rows_T, block_index_T] * self.block_size + offset_T,
            query_starts_N1=query_starts,
            context_lens_N=context_N,
            rows_N=slots_N,
            block_tables_NB=self.block_tables[slots_N, :widest],
            emitting_S=emitting,
            output_positions_S=context_N[emitting],
            requests=batch.requests(),
        )

    def _emitting(self, batch: Batch) -> np.ndarray:
        """Indices of the grants that reach the last token of their request."""
        at, decodes = batch.decodes_at, len(batch.decodes)
        done = [start + count == request.num_tokens for request, start, count in batch.prefills]
        emits = np.ones(len(done) + decodes, dtype=bool)
        emits[:at] = done[:at]
        emits[at + decodes :] = done[at:]
        return np.flatnonzero(emits)

    def store(self, batch: Batch, tokens_NK: np.ndarray) -> None:
        """Write the emitted tokens behind the last token of each request that emitted; before the commit."""
        inputs = batch.inputs
        assert inputs is not None, "tokens of a batch without inputs"
        emitting = inputs.emitting_S
        self.tokens[inputs.rows_N[emitting], inputs.output_positions_S] = tokens_NK[emitting, 0]


def _int_array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)


def _columns(prefills: list[Prefill]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, starts and counts of a run of grants."""
    return (
        _int_array(request.slot for request, _, _ in prefills),
        _int_array(start for _, start, _ in prefills),
        _int_array(count for _, _, count in prefills),
    )
