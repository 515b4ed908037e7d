"""An executor without a model whose KV memory is fake but real in kind, so that a wrong block table changes the tokens.

Every granted position stores a hash of the previous position's value, read through the block table, and its token; the
next token derives from the last slot alone. Freed blocks are poisoned, swaps move slots. All starting slots of a step
are read before any slot is written. Durations are made up: a constant a step and a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.framework.batch import Batch, Inputs
from schedlab.framework.executor import StepResult
from schedlab.framework.request import EngineRequest

_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)
_POISON = 0xDEAD_BEEF_DEAD_BEEF
_START = np.uint64(0x243F6A8885A308D3)


def mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit finalizer, so that near values give far ones."""
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x81DADEF4BC2DD44D)
    return np.asarray(x ^ (x >> np.uint64(33)))


class StubExecutor:
    """`step_ns` a step and `token_ns` a token of virtual time; tokens from a vocabulary of `vocab_size`."""

    needs_inputs = True
    jumpable = False
    adjacent_blocks = True
    chains = True

    def __init__(self, vocab_size: int = 1000, step_ns: int = 1_000_000, token_ns: int = 10_000) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids: tuple[int, ...] = ()
        self.step_ns = step_ns
        self.token_ns = token_ns
        self._freed: list[int] = []

    def block_bytes(self, block_size: int) -> int:
        return 8 * block_size

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.memory = np.full((num_blocks, block_size), _POISON, dtype=np.uint64)
        self.host = np.full((num_host_blocks, block_size), _POISON, dtype=np.uint64)

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    def discard(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing any more; poisoned once pending copies have read them."""
        self._freed.extend(blocks)

    def execute(self, batch: Batch) -> StepResult:
        for block, host in batch.copies_out:
            self.host[host] = self.memory[block]
        self.memory[self._freed] = _POISON
        self._freed.clear()
        for host, block in batch.copies_in:
            self.memory[block] = self.host[host]
        inputs = batch.inputs
        if inputs is None or not inputs.requests:
            return StepResult(self.step_ns)
        tokens_NK = np.empty((len(inputs.requests), batch.steps), dtype=np.int64)
        for step in range(batch.steps):
            inputs = inputs.following(tokens_NK[:, step - 1], self.block_size) if step else inputs
            tokens_NK[:, step : step + 1] = self._compute(inputs)
        return StepResult(batch.steps * (self.step_ns + self.token_ns * len(inputs.token_ids_T)), tokens_NK)

    def _compute(self, inputs: Inputs) -> np.ndarray:
        starts_N = inputs.positions_T[inputs.query_starts_N1[:-1]]
        values_N = self._before(inputs.block_tables_NB, starts_N)
        memory = self.memory.reshape(-1)
        last_N = np.empty_like(values_N)
        for n, (first, stop) in enumerate(zip(inputs.query_starts_N1, inputs.query_starts_N1[1:], strict=False)):
            chain = chain_values(values_N[n], inputs.token_ids_T[first:stop])
            memory[inputs.slots_T[first:stop]] = chain
            last_N[n] = chain[-1]
        tokens_N1 = np.full((len(starts_N), 1), -1, dtype=np.int64)
        emitting = inputs.emitting_S
        tokens_N1[emitting, 0] = (mix(last_N[emitting]) % np.uint64(self.vocab_size)).astype(np.int64)
        return tokens_N1

    def _before(self, block_tables_NB: np.ndarray, starts_N: np.ndarray) -> np.ndarray:
        """Value of the position before each start, through the block table; a constant before position 0."""
        block, offset = np.divmod(np.maximum(starts_N - 1, 0), self.block_size)
        values = self.memory[block_tables_NB[np.arange(len(starts_N)), block], offset]
        return np.where(starts_N > 0, values, _START)


def start_value() -> np.uint64:
    """What stands before position 0."""
    return _START


def chain_values(before: np.uint64, tokens_T: np.ndarray) -> np.ndarray:
    """v[i] = v[i-1] * FACTOR + hash(token[i]) modulo 2^64 for all i at once."""
    count = len(tokens_T)
    hashed = mix(tokens_T.astype(np.uint64) + np.uint64(1))
    powers, inverses = _powers(count)
    with np.errstate(over="ignore"):
        return np.asarray(powers * (before + np.cumsum(hashed * inverses, dtype=np.uint64)))


def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    powers = np.cumprod(np.full(count, _FACTOR, dtype=np.uint64), dtype=np.uint64)
    inverses = np.cumprod(np.full(count, _INVERSE, dtype=np.uint64), dtype=np.uint64)
    return powers, inverses
