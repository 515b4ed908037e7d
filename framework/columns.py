"""From grants to arrays: the running requests' tokens and block tables, a row a slot, and what a batch gathers from
them.

Rows are written when something about a request changes; what all of decoding need is kept between steps and moved on by
one, so that a decode-only step costs a few array operations. Knows slots, tables and lengths; knows no policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from schedlab.framework.batch import Batch, Inputs, Prefill
from schedlab.framework.decode_set import DecodeSet
from schedlab.framework.request import EngineRequest


@dataclass(slots=True)
class DecodeRows:
    """Arrays of all of decoding in decode_set order, as of one tick: first token's position, slot and table of each."""

    version: int
    tick: int
    rows_N: np.ndarray
    starts_N: np.ndarray
    slots_N: np.ndarray
    tables_NB: np.ndarray
    counting_N1: np.ndarray
    place: dict[int, int]


TOUCHED = 8192
"""Entries of each row that are brought into memory at once: 64 KiB a row, however long requests may become."""


class Columns:
    """The arrays behind `Batch.inputs`. `widest` is the longest block table that can occur."""

    def __init__(self, max_num_seqs: int, max_model_len: int, widest: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.block_tables = np.zeros((max_num_seqs, widest), dtype=np.int64)
        for array in (
            self.tokens,
            self.block_tables,
        ):  # a page's first touch may take milliseconds, which no step should
            array[:, :TOUCHED] = 0
        self._cohort: DecodeRows | None = None

    # -- rows --

    def enter(self, request: EngineRequest, prompt_T: np.ndarray) -> None:
        """A request was given a slot: write its prompt and what it has generated."""
        row = self.tokens[request.slot]
        row[: len(prompt_T)] = prompt_T
        row[len(prompt_T) : request.num_tokens] = request.output_token_ids

    def leave(self, request: EngineRequest, slot: int) -> None:
        """A request gives up `slot`: keep what it has generated."""
        request.output_token_ids = self.tokens[slot, request.num_prompt_tokens : request.num_tokens].tolist()

    def refresh(self, request: EngineRequest) -> None:
        """The request's whole block table may have changed."""
        self.block_tables[request.slot, : len(request.block_table)] = request.block_table

    def store(self, batch: Batch, tokens_NK: np.ndarray) -> None:
        """Write the emitted tokens behind the last token of each request that emitted; before the commit."""
        inputs = batch.inputs
        assert inputs is not None, "tokens of a batch without inputs"
        emitting = inputs.emitting_S
        for step in range(batch.steps):
            self.tokens[inputs.rows_N[emitting], inputs.output_positions_S + step] = tokens_NK[emitting, step]

    # -- inputs --

    def inputs(self, batch: Batch, decode_set: DecodeSet) -> Inputs:
        """The ragged arrays of `batch`, before its commit."""
        if batch.decodes_all and not batch.prefills:
            rows = self._moved_on(decode_set) if batch.steps == 1 else self._chained(decode_set, batch.steps)
            return self._decode_only(batch, rows)
        for request, _, _ in batch.prefills:
            self.refresh(request)
        for request in batch.decodes:
            table = request.block_table
            self.block_tables[request.slot, len(table) - 1] = table[-1]
        return self._ragged(batch)

    def _decode_only(self, batch: Batch, rows: DecodeRows) -> Inputs:
        count = len(rows.rows_N)
        context_N = rows.starts_N + 1
        return Inputs(
            token_ids_T=self.tokens[rows.rows_N, rows.starts_N],
            positions_T=rows.starts_N,
            slots_T=rows.slots_N,
            query_starts_N1=rows.counting_N1,
            context_lens_N=context_N,
            rows_N=rows.rows_N,
            block_tables_NB=rows.tables_NB,
            emitting_S=rows.counting_N1[:count],
            output_positions_S=context_N,
            requests=batch.decodes,
        )

    def _moved_on(self, decode_set: DecodeSet) -> DecodeRows:
        """The decode_set's arrays for this tick: the last ones plus one, or built anew when its members changed."""
        rows = self._cohort
        if rows is None or rows.version != decode_set.version or rows.tick + 1 != decode_set.tick:
            rows = self._cohort = self._build(decode_set)
            return rows
        rows.tick += 1
        rows.starts_N = rows.starts_N + 1
        rows.slots_N = rows.slots_N + 1
        for request in decode_set.needing_block():
            index, block = len(request.block_table) - 1, request.block_table[-1]
            if index >= rows.tables_NB.shape[1]:
                rows = self._cohort = self._build(decode_set)
                return rows
            place = rows.place[request.slot]
            self.block_tables[request.slot, index] = rows.tables_NB[place, index] = block
            rows.slots_N[place] = block * self.block_size
        return rows

    def _chained(self, decode_set: DecodeSet, steps: int) -> DecodeRows:
        """The decode_set's arrays for the first of `steps` steps, with the blocks of all of them."""
        for ahead in range(steps):
            for request in decode_set.buckets[(decode_set.tick + ahead) % decode_set.block_size]:
                self._refresh_tail(request, request.num_computed_tokens // self.block_size)
        rows = self._cohort = self._build(decode_set, steps)
        return rows

    def _refresh_tail(self, request: EngineRequest, first: int) -> None:
        table = request.block_table
        self.block_tables[request.slot, first : len(table)] = table[first:]

    def _build(self, decode_set: DecodeSet, steps: int = 1) -> DecodeRows:
        members, size = decode_set.members, self.block_size
        rows_N = _array(request.slot for request in members)
        starts_N = _array(request._base_computed for request in members) + decode_set.tick
        for request in decode_set.needing_block():
            table = request.block_table
            self.block_tables[request.slot, len(table) - 1] = table[-1]
        block_N, offset_N = np.divmod(starts_N, size)
        most = int(starts_N.max(initial=0)) + steps
        room = -(-most // size) + 4  # a few blocks of growth before the table must be widened
        place = {request.slot: i for i, request in enumerate(members)}
        slots_N = self.block_tables[rows_N, block_N] * size + offset_N
        tables_NB = self.block_tables[rows_N, :room]
        counting = np.arange(len(members) + 1)
        return DecodeRows(decode_set.version, decode_set.tick, rows_N, starts_N, slots_N, tables_NB, counting, place)

    def _ragged(self, batch: Batch) -> Inputs:
        before, after = batch.prefills[: batch.decodes_at], batch.prefills[batch.decodes_at :]
        decodes = [Prefill(request, request.num_computed_tokens, 1) for request in batch.decodes]
        grants = before + decodes + after
        rows_N = _array(request.slot for request, _, _ in grants)
        starts_N = _array(start for _, start, _ in grants)
        counts_N = _array(count for _, _, count in grants)
        query_starts = np.zeros(len(grants) + 1, dtype=np.int64)
        np.cumsum(counts_N, out=query_starts[1:])
        rows_T = np.repeat(rows_N, counts_N)
        positions_T = np.arange(query_starts[-1]) + np.repeat(starts_N - query_starts[:-1], counts_N)
        block_T, offset_T = np.divmod(positions_T, self.block_size)
        context_N = starts_N + counts_N
        emitting = np.flatnonzero(context_N == _array(request.num_tokens for request, _, _ in grants))
        return Inputs(
            token_ids_T=self.tokens[rows_T, positions_T],
            positions_T=positions_T,
            slots_T=self.block_tables[rows_T, block_T] * self.block_size + offset_T,
            query_starts_N1=query_starts,
            context_lens_N=context_N,
            rows_N=rows_N,
            block_tables_NB=self.block_tables[rows_N, : -(-int(context_N.max(initial=0)) // self.block_size)],
            emitting_S=emitting,
            output_positions_S=context_N[emitting],
            requests=[request for request, _, _ in grants],
        )


def _array(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)
