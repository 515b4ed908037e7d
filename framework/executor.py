"""What the engine asks of an executor: run one batch, say how long it took and which tokens came out.

Knows nothing of scheduling, and implements nothing: see stub.py, cost/model.py and model/executor.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from schedlab.framework.batch import Batch
    from schedlab.framework.request import EngineRequest

LONGEST_STEP_NS = 3_600_000_000_000


def check_duration(ns: float) -> None:
    """ConfigError for a modelled step of more than an hour: what sums of times are kept in has 64 bits."""
    if not ns <= LONGEST_STEP_NS:
        raise ConfigError(
            f"a step would take {ns / LONGEST_STEP_NS:.3g} hours; expected one at most, of the rates and times of "
            "hardware and serving, or of the profile"
        )


@dataclass(slots=True)
class StepResult:
    """Outcome of one batch.

    `duration_ns` is the modelled duration, or the measured device time where the executor knows one; clocks that
    measure ignore it. `tokens` is int64 [num_grants, k], row i the new tokens of grant i in batch order, padded with
    -1 (an inner chunk is all -1); None from an executor without tokens, which then stands for one unnamed token a
    finished grant. `bound` names what limited the step (compute, memory, overhead). `failed` maps grant index to a
    reason. Of a chain, a failed grant keeps what it had before. `device_us` is what the device itself took, where
    that is measured.
    """

    duration_ns: int
    tokens: np.ndarray | None = None
    bound: str | None = None
    failed: dict[int, str] = field(default_factory=dict)
    device_us: float | None = None


class Executor(Protocol):
    """Runs batches. One executor serves one engine.

    `needs_inputs`: the engine builds `batch.inputs` before each `execute`. `eos_token_ids` end a live request.
    An executor with a true attribute `chains` runs batches of several steps; one with `adjacent_blocks` reads a
    request's blocks faster where they are neighbours. One with a method `release` gives back what `allocate` reserved.
    """

    needs_inputs: bool
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        """Reserve KV memory; called once, before the first step. Raises ConfigError if it does not fit."""

    def block_bytes(self, block_size: int) -> int:
        """Bytes of keys and values in one block over all layers; sizes the pool and the host pool."""

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        """int64 [num_prompt_tokens]; the tokens that stand for the request's content."""

    def execute(self, batch: Batch) -> StepResult:
        """Run copies out, copies in, then compute, in this order. `batch` may be empty but for copies."""
