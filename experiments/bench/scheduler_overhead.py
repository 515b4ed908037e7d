"""What a decode-only engine step costs the host, and what a prefix lookup costs: thread CPU time, medians, best of
runs.

    python -m schedlab.experiments.bench.scheduler_overhead

The executor does nothing, so a step is boundary, policy, checks, log rows and commit. Holds are not honoured: the
policy decides every step. Requests have prompts of 512 tokens, different for each, and do not finish while measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.table import Table

from schedlab import core
from schedlab.framework.batch import Batch
from schedlab.framework.block_pool import BlockPool
from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent, UniqueContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.executor import StepResult
from schedlab.framework.ledger import Ledger
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.step import Step
from schedlab.framework.stub import StubExecutor
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

PROMPT, WARM_UP, STEPS, RUNS = 512, 20, 300, 3


class OneByOne(Policy):
    """Grants every decode with a call of its own."""

    def schedule(self, step: Step) -> None:
        for request in step.waiting:
            step.grant(request)
        for request in step.decoding:
            step.grant(request)


class NullExecutor(StubExecutor):
    """Takes no time and gives no tokens; `needs_inputs` chooses whether the engine prepares inputs."""

    def __init__(self, needs_inputs: bool) -> None:
        super().__init__()
        self.needs_inputs = needs_inputs

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(1_000_000)


@dataclass(frozen=True)
class Case:
    name: str
    policy: Callable[[], Policy]
    inputs: bool


CASES = [
    Case("fcfs", FCFS, False),
    Case("chunked_prefill", lambda: ChunkedPrefill(chunk_size=1 << 20), False),
    Case("decode_priority", DecodePriority, False),
    Case("prefix_reuse", lambda: PrefixReuse(chunk_size=1 << 20), False),
    Case("fcfs, inputs prepared", FCFS, True),
    Case("one by one", OneByOne, False),
]


def engine_with(running: int, case: Case) -> Engine:
    """An engine in which `running` requests decode."""
    output = WARM_UP + STEPS + 64
    blocks = running * (-(-(PROMPT + output) // 16))
    requests = [
        EngineRequest(str(i), 0, PROMPT, UniqueContent(i), recorded_output_tokens=output) for i in range(running)
    ]
    config = EngineConfig(
        num_blocks=blocks, max_model_len=2048, max_num_seqs=running, max_num_batched_tokens=running * PROMPT,
        honour_holds=False,
    )  # fmt: skip
    recorder = Recorder(Measurement(max_num_seqs=running, num_blocks=blocks))
    engine = Engine(case.policy(), NullExecutor(case.inputs), ListSource(requests), config, VirtualClock(), recorder)
    while len(engine.ledger.decode_set.members) < running:
        engine.step()
    return engine


def step_costs(running: int, case: Case) -> list[float]:
    """Microseconds of thread CPU time of each of `STEPS` decode-only steps."""
    engine = engine_with(running, case)
    for _ in range(WARM_UP):
        engine.step()
    costs = []
    for _ in range(STEPS):
        begin = time.thread_time_ns()
        engine.step()
        costs.append((time.thread_time_ns() - begin) / 1000)
    return costs


def best_of(measure: Callable[[], list[float]]) -> tuple[float, float]:
    """Median and 99th percentile of the run with the smallest median."""
    runs = [sorted(measure()) for _ in range(RUNS)]
    best = min(runs, key=statistics.median)
    return statistics.median(best), best[int(0.99 * len(best))]


def lookup_costs(tokens: int = 8192) -> tuple[list[float], list[float]]:
    """Microseconds to look up a fully cached prompt, and to compute its digest chain (once a request)."""
    ledger = Ledger(BlockPool(tokens // 16 + 64), 16, 0, 4)
    first = EngineRequest("first", 0, tokens, TokenContent(range(tokens)), recorded_output_tokens=1)
    ledger.arrive(first)
    ledger.admit(first, ledger.quote(first), tokens)
    ledger.enter_running(first)
    first.mirror("running", tokens, tokens)
    ledger.publish(first)
    lookups, chains = [], []
    for i in range(200):
        request = EngineRequest(str(i), 0, tokens, TokenContent(range(tokens)), recorded_output_tokens=1)
        begin = time.thread_time_ns()
        chain = request.content.chain(tokens, 16)
        chains.append((time.thread_time_ns() - begin) / 1000)
        begin = time.thread_time_ns()
        hit = ledger.cache.longest_hit(chain, tokens // 16 - 1)
        lookups.append((time.thread_time_ns() - begin) / 1000)
        assert hit == tokens // 16 - 1
    return lookups, chains


def main() -> None:
    table = Table(title=f"decode-only step, µs of thread CPU time: median (p99); core {core.mode()}")
    table.add_column("policy")
    sizes = (64, 256, 1024)
    for running in sizes:
        table.add_column(f"{running} running", justify="right")
    for case in CASES:
        cells = [best_of(partial(step_costs, running, case)) for running in sizes]
        table.add_row(case.name, *(f"{median:.1f} ({p99:.0f})" for median, p99 in cells))
    console = Console()
    console.print(table)
    lookup, _ = best_of(lambda: lookup_costs()[0])
    chain, _ = best_of(lambda: lookup_costs()[1])
    console.print(
        f"fully cached prompt of 8,192 tokens: lookup {lookup:.1f} µs, digest chain {chain:.0f} µs once a request"
    )


if __name__ == "__main__":
    main()
