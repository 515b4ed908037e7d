"""What batch-invariant mode costs: thread CPU time of the same steps in both modes, on one thread, best of repetitions.

    python -m schedlab.experiments.bench.batch_invariant [model] [dtype]

Requests have different random prompts. Decode steps run at a context of 128 over keys and values drawn at random. The
bits of one request's logits are compared alone and beside others.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import chain

import numpy as np
from rich.console import Console
from rich.table import Table

from schedlab.experiments.engines import model_preset
from schedlab.framework.batch import Batch, Inputs
from schedlab.framework.content import UniqueContent
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.request import EngineRequest

BLOCK, CONTEXT, STEPS, RUNS = 16, 128, 8, 3
PREFILL = 512
BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Mode:
    name: str
    executor: ModelExecutor


def inputs(executor: ModelExecutor, batch: int, start: int, count: int) -> Inputs:
    """`count` tokens from `start` on for each of the requests 0..batch, whose blocks lie one after the other."""
    requests = [EngineRequest(str(i), 0, PREFILL + STEPS, UniqueContent(i)) for i in range(batch)]
    positions = np.tile(np.arange(start, start + count), batch)
    blocks = -(-(PREFILL + STEPS) // BLOCK)
    first_blocks = np.arange(batch) * blocks
    tokens = np.concatenate([executor.prompt_token_ids(r)[start : start + count] for r in requests])
    return Inputs(
        token_ids_T=tokens,
        positions_T=positions,
        slots_T=np.repeat(first_blocks, count) * BLOCK + positions,
        query_starts_N1=np.arange(batch + 1) * count,
        context_lens_N=np.full(batch, start + count),
        rows_N=np.arange(batch),
        block_tables_NB=first_blocks[:, None] + np.arange(blocks),
        emitting_S=np.arange(batch),
        output_positions_S=np.full(batch, start + count),
        requests=requests,
    )


def milliseconds(executor: ModelExecutor, batch: int, start: int, count: int) -> float:
    """One step's thread CPU time."""
    step = Batch(inputs=inputs(executor, batch, start, count))
    begin = time.thread_time_ns()
    executor.execute(step)
    return (time.thread_time_ns() - begin) / 1e6


def prefill_cost(executor: ModelExecutor) -> float:
    return min(milliseconds(executor, 1, 0, PREFILL) for _ in range(RUNS))


def decode_cost(executor: ModelExecutor, batch: int) -> float:
    return min(milliseconds(executor, batch, CONTEXT + i, 1) for _ in range(RUNS) for i in range(STEPS))


def same_bits(executor: ModelExecutor) -> bool:
    """Whether the first request's logits are the same alone and beside others, at a decode step."""
    alone, beside = (executor.logits(inputs(executor, batch, CONTEXT, 1))[0] for batch in (1, BATCHES[-1]))
    return bool((alone == beside).all())


def modes(model: str, dtype: str) -> list[Mode]:
    shape, extras = model_preset(model)
    found = []
    for name, invariant in (("ordinary", False), ("batch-invariant", True)):
        executor = ModelExecutor(
            shape, path=extras.get("path"), seed=extras.get("seed", 0), dtype=dtype, batch_invariant=invariant
        )
        executor.allocate(BATCHES[-1] * -(-(PREFILL + STEPS) // BLOCK), BLOCK, 0, BATCHES[-1])
        for cache in chain.from_iterable(executor.kv_caches):
            cache.normal_()
        found.append(Mode(name, executor))
    return found


def main(model: str = "smollm2-135m", dtype: str = "float32") -> None:
    table = Table(title=f"{model}, {dtype}: ms of thread CPU time a step")
    columns = ("mode", f"prefill {PREFILL}", *(f"decode × {batch}" for batch in BATCHES), "bits alone and in a batch")
    for column in columns:
        table.add_column(column, justify="right")
    costs = []
    for mode in modes(model, dtype):
        costs.append([prefill_cost(mode.executor), *(decode_cost(mode.executor, batch) for batch in BATCHES)])
        bits = "the same" if same_bits(mode.executor) else "differ"
        table.add_row(mode.name, *(f"{cost:.1f}" for cost in costs[-1]), bits)
    table.add_row("price", *(f"{b / a:.2f} ×" for a, b in zip(*costs, strict=True)), "")
    Console(width=120).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
