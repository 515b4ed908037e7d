"""Weights of fewer bits, under one workload: what they change in quality and in speed, and what the model predicts.

    python -m schedlab.experiments.bench.quantisation [--quick] [--dtypes bf16,int8,int4]

Quality: over a text given token by token, the mean Kullback-Leibler divergence of the logits from those of bf16 weights
and the mean log-likelihood of the text; over the greedy answers to the package's prompts, the share of tokens before
the first that differs from bf16's. Speed: these prompts arrive one a second, answers have a forced length; one thread
by the busy clock. The prediction is the same run on the virtual clock, on a machine with the bandwidth and the products
a second that are measured here first.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from schedlab.experiments.bench.batch_invariant import inputs
from schedlab.experiments.bench.cpu_engine import BLOCK, MODEL, Machine, Tokens, agreement
from schedlab.experiments.engines import hardware_preset, model_preset
from schedlab.framework.clock import BusyClock, Clock, VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.executor import Executor
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.files import model_directory
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement, Summary
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.policies.chunked_prefill import ChunkedPrefill

TEXT = """The lighthouse keeper wrote in his book every evening. He noted the wind, the height of the waves and the
ships that had passed, and when nothing had happened he wrote that nothing had happened. In winter the supply boat came
once a month. It brought flour, oil for the lamp, newspapers that were already old, and letters from his sister, who
lived in the city and could not understand why he stayed. He answered each letter with care. He told her that the sea is
never the same on two days, that the light must be lit an hour before sunset, and that somebody has to be there to light
it."""
METRICS = ("ttft/p50", "tpot/p50", "throughput/output_tokens_per_s")
SPEEDS = ("TTFT p50 ms", "TPOT p50 ms", "tokens/s")
NS = 1_000_000_000
NUM_BLOCKS = 512


@dataclass(frozen=True)
class Quality:
    log_probs_TV: torch.Tensor
    log_likelihood: float


def quality(executor: ModelExecutor, tokens: list[int]) -> Quality:
    """Teacher-forced: each token but the first is predicted from those before it, by a step of one token."""
    executor.allocate(-(-len(tokens) // BLOCK) + 64, BLOCK, 0, 1)
    rows = []
    with torch.inference_mode():
        for position, token in enumerate(tokens[:-1]):
            step = inputs(executor, 1, position, 1)
            step.token_ids_T[:] = token
            rows.append(executor.logits(step)[0].log_softmax(-1))
    log_probs_TV = torch.stack(rows)
    return Quality(log_probs_TV, -float(F.nll_loss(log_probs_TV, torch.tensor(tokens[1:]))))


def divergence(exact: Quality, other: Quality) -> float:
    """Mean over positions of KL(exact || other), in nats."""
    return float(F.kl_div(other.log_probs_TV, exact.log_probs_TV, log_target=True, reduction="batchmean"))


def serve(executor: Executor, clock: Clock, prompts: Tokens, count: int) -> tuple[Summary, Tokens]:
    """The prompts at one a second, `count` tokens each."""
    requests = [
        EngineRequest(str(i), i * NS, len(p), TokenContent(p), recorded_output_tokens=count)
        for i, p in enumerate(prompts)
    ]
    config = EngineConfig(num_blocks=NUM_BLOCKS, max_model_len=1024, max_num_seqs=32)
    recorder = Recorder(Measurement(max_num_seqs=32, num_blocks=NUM_BLOCKS))
    Engine(ChunkedPrefill(), executor, ListSource(requests), config, clock, recorder).run()
    summary = recorder.close(backlog_end=0, counters={}).result["summary"]
    return summary, [request.output_token_ids for request in requests]


def this_machine() -> Hardware:
    """One thread of it: the shipped constants, but with what is measured now."""
    found = Machine.probe(time.process_time)
    cpu = hardware_preset("cpu")
    rate = found.gflops / 1e3 / cpu.linear_share(("fp32",))
    bandwidth = found.gb_s / cpu.memory_efficiency
    return replace(cpu, peak_tflops={"fp32": rate, "bf16": rate}, memory_gb_s=bandwidth, sequence_us=0.0)


def prompts_of(tokenizer: Tokenizer, count: int) -> Tokens:
    lines = files("schedlab.workloads.data").joinpath("prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line) for line in lines][:count]
    return [tokenizer.encode(p.get("prompt") or p["messages"], chat="messages" in p) for p in prompts]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="weights of fewer bits: quality and speed")
    parser.add_argument("--quick", action="store_true", help="less text, fewer prompts, shorter answers")
    parser.add_argument("--dtypes", default="bf16,int8,int4")
    parser.add_argument("--kernels", default="auto")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    shape, extras = model_preset(MODEL)
    directory = model_directory(extras["path"])
    tokenizer, hardware = Tokenizer(directory, shape.vocab_size), this_machine()
    text = tokenizer.encode(TEXT.replace("\n", " "))[: 48 if args.quick else None]
    prompts, count = prompts_of(tokenizer, 6 if args.quick else 20), 12 if args.quick else 48
    table = Table(title=f"{MODEL}: one thread, measured / predicted")
    for column in ("weights", "KL to bf16", "log-likelihood", "answers as bf16", *SPEEDS):
        table.add_column(column, justify="right")
    exact, answers = None, None
    for weight_dtype in args.dtypes.split(","):
        executor = ModelExecutor(
            shape, path=directory, dtype="bfloat16", weight_dtype=weight_dtype, kernels=args.kernels
        )
        found = quality(executor, text)
        measured, tokens = serve(executor, BusyClock(), prompts, count)
        predicted, _ = serve(CostExecutor(shape, hardware, weight_dtype=weight_dtype), VirtualClock(), prompts, count)
        exact, answers = exact or found, answers or tokens
        speeds = [(measured[key], predicted[key]) for key in METRICS]
        table.add_row(
            weight_dtype, f"{divergence(exact, found):.4f}", f"{found.log_likelihood:.3f}",
            f"{agreement(tokens, answers):.0%}", *(_both(*pair, 1e3) for pair in speeds[:2]), _both(*speeds[2], 1),
        )  # fmt: skip
    Console(width=120).print(table)


def _both(measured: float | None, predicted: float | None, unit: float) -> str:
    return " / ".join("–" if value is None else f"{value * unit:.0f}" for value in (measured, predicted))


if __name__ == "__main__":
    main()
