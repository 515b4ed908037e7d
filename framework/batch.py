"""What an executor consumes: the batch, and its ragged arrays. How they are gathered is columns.py's.

Knows grants; knows nothing of policies or of why a token was granted.
Shape letters: N grants, T tokens of all grants, S grants that emit a token, B blocks of the widest table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from schedlab.framework.request import EngineRequest


class Prefill(NamedTuple):
    """A grant that is not a plain decode: `tokens` of `request` from position `start`."""

    request: EngineRequest
    start: int
    tokens: int


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

    def following(self, tokens_N: np.ndarray, block_size: int) -> Inputs:
        """The next step of a chain of decodes, which computes the tokens that this one emitted."""
        positions = self.positions_T + 1
        block_N, offset_N = np.divmod(positions, block_size)
        slots = self.block_tables_NB[np.arange(len(positions)), block_N] * block_size + offset_N
        return replace(
            self, token_ids_T=tokens_N, positions_T=positions, slots_T=slots,
            context_lens_N=self.context_lens_N + 1, output_positions_S=self.output_positions_S + 1,
        )  # fmt: skip


class Batch:
    """One step's work in grant order: `prefills[:decodes_at]`, then `decodes`, then the rest of `prefills`.

    `decodes` each compute one token from `num_computed_tokens` on and emit one. `copies_out` are (device block, host
    block) pairs and run first; `copies_in` are (host block, device block) pairs and run next. `inputs` is None unless
    the executor needs them. `decodes_all`: `decodes` are all that decode, in their order. `steps` > 1: a chain
    of so many decode steps, each computing the token that the one before emitted; all blocks are in the tables.
    """

    __slots__ = (
        "copies_in", "copies_out", "decode_context", "decodes", "decodes_all", "decodes_at", "inputs",
        "prefill_tokens", "prefills", "steps",
    )  # fmt: skip

    def __init__(
        self,
        prefills: list[Prefill] | None = None,
        decodes: list[EngineRequest] | None = None,
        decodes_at: int = 0,
        prefill_tokens: int = 0,
        decode_context: int = 0,
        copies_out: list[tuple[int, int]] | None = None,
        copies_in: list[tuple[int, int]] | None = None,
        inputs: Inputs | None = None,
        steps: int = 1,
        decodes_all: bool = False,
    ) -> None:
        self.prefills = prefills or []
        self.decodes = decodes or []
        self.decodes_at = decodes_at
        self.prefill_tokens = prefill_tokens
        self.decode_context = decode_context
        self.copies_out = copies_out or []
        self.copies_in = copies_in or []
        self.inputs = inputs
        self.steps = steps
        self.decodes_all = decodes_all

    def requests(self) -> list[EngineRequest]:
        """The batch's requests in batch order."""
        if not self.prefills:
            return self.decodes
        granted = [prefill.request for prefill in self.prefills]
        return granted[: self.decodes_at] + self.decodes + granted[self.decodes_at :]
