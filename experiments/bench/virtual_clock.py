"""How fast the virtual clock is: requests a wall second with workload, checks and full logs, a process for each row.

    python -m schedlab.experiments.bench.virtual_clock [--quick] [--against CHECKOUT [--rounds N]] [WORD …]

`--against` runs each row, and two whole commands, in turn here and in another checkout of schedlab (its core compiled
as it is there), and prints how many times less CPU they take here: medians of all threads' time, and whether digests
are equal.

Words choose the rows that contain them all, as in `overloaded fcfs`. llama3.1-8b on one h100, 128 sequences, a budget
of 2,048 tokens. `wall` and `CPU` are of the run, from the loading of the workload to the closing of the logs;
`process` has interpreter, imports and presets in it too. Targets: common work 25,000 requests a second in at most
120 MB, overloaded 20,000, Mooncake in 8 s and 200 MB, the Azure hour in 1.5 s (process 2.5 s).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from schedlab import core
from schedlab.framework.policy import Policy
from schedlab.framework.step import Step
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse
from schedlab.workloads.populations import CommonWork
from schedlab.workloads.workload import Recorded

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "chunked_prefill": lambda: ChunkedPrefill(chunk_size=2048),
    "decode_priority": DecodePriority,
    "prefix_reuse": lambda: PrefixReuse(chunk_size=2048),
}
QUICK = 2_000


@dataclass(frozen=True)
class Row:
    """One run. `trace` is a file below TRACES, where the work is a recorded one."""

    work: str
    policy: str
    num_requests: int | None = None
    rate: float = 8.0
    trace: str | None = None
    format: str | None = None

    @property
    def name(self) -> str:
        size = "" if self.num_requests is None else f" {self.num_requests // 1000}k"
        return f"{self.work}{size} {self.policy}"

    @property
    def missing(self) -> str | None:
        """Why the row cannot be run here."""
        path = None if self.trace is None else TRACES / self.trace
        return None if path is None or path.exists() else f"there is no {path}"

    def workload(self) -> Any:
        if self.trace is None:
            assert self.num_requests is not None
            return CommonWork(num_requests=self.num_requests, rate=self.rate)
        path = str(TRACES / self.trace)
        return Recorded(name=self.work, path=path, format=self.format, max_requests=self.num_requests)


def rows(quick: bool) -> Iterator[Row]:
    """All of them, or short ones of each kind."""
    for policy in POLICIES:
        yield Row("common", policy, QUICK if quick else 10_000)
    if not quick:
        yield Row("common", "chunked_prefill", 100_000)
    for policy in POLICIES:
        yield Row("overloaded", policy, QUICK if quick else 10_000, rate=64.0)
    conversation = "mooncake-fast25/conversation_trace.jsonl.gz"
    yield Row("mooncake", "prefix_reuse", QUICK if quick else None, trace=conversation, format="mooncake")
    for policy in POLICIES:
        azure = "azure-2023/AzureLLMInferenceTrace_conv.csv.gz"
        yield Row("azure_conv", policy, QUICK if quick else None, trace=azure, format="azure")


def counted(policy: Policy) -> Callable[[], int]:
    """Make `policy` count how often it is asked; returns what reads the count."""
    calls, schedule = [0], policy.schedule

    def ask(step: Step) -> None:
        calls[0] += 1
        schedule(step)

    policy.schedule = ask  # type: ignore[method-assign]
    return lambda: calls[0]


def measure(row: Row) -> dict[str, Any]:
    """In a process of its own: run, and say what it took."""
    from schedlab.experiments import engines
    from schedlab.experiments.run.api import Experiment

    engine, policy = engines.virtual("llama3.1-8b", "h100"), POLICIES[row.policy]()
    calls = counted(policy)
    with tempfile.TemporaryDirectory() as directory:
        wall, cpu = time.perf_counter(), time.process_time()
        run = Experiment(policy, row.workload(), engine).run(Path(directory))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    counts = {name: run.summary[name] for name in ("steps", "requests/offered", "requests/finished", "e2e/mean")}
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**counts, "wall_s": wall, "cpu_s": cpu, "peak_mb": peak_mb, "calls": calls(), "digest": run.digest}


def in_process(row: Row, checkout: Path | None = None) -> dict[str, Any]:
    """`measure` by this checkout or another one, whose bench takes the same row."""
    began = time.perf_counter()
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--measure", json.dumps(asdict(row))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment(checkout))
    return {**json.loads(done.stdout), "process_s": time.perf_counter() - began, "load": os.getloadavg()[0]}


def environment(checkout: Path | None) -> dict[str, str]:
    """Of a process that imports the package of `checkout`, or this one."""
    own = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": str((checkout or own) / "src"), "WANDB_SILENT": "true"}


def commands(folder: Path, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Whole commands by name: what a user waits for, with imports, table, plots and W&B where they are the default."""
    modelled = ["engine=virtual", "model=llama3.1-8b", "hardware=h100", "progress=false"]
    azure = TRACES / "azure-2023/AzureLLMInferenceTrace_conv.csv.gz"
    if azure.exists():
        some = [f"workload.max_requests={QUICK}"] if quick else []
        recorded = ["workload=trace", f"workload.path={azure}", "workload.format=azure", *some]
        yield "command azure_conv chunked_prefill, defaults", ["policy=chunked_prefill", *modelled, *recorded]
    path = folder / "ids.jsonl"
    with path.open("w") as file:
        file.writelines(mooncake_lines(QUICK if quick else 40_000))
    recorded = ["workload=trace", f"workload.path={path}", "workload.format=mooncake"]
    lean = ["plots=false", "wandb.mode=disabled"]
    yield "command mooncake ids 40k prefix_reuse, logs only", ["policy=prefix_reuse", *modelled, *recorded, *lean]


def mooncake_lines(num_requests: int) -> Iterator[str]:
    """Common work in Mooncake's form, every prompt with ids that no other has."""
    trace = CommonWork(num_requests=num_requests, rate=8.0).load(0)
    ids = itertools.count()
    columns = trace.arrival_ns.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist()
    for arrival_ns, prompt, output in zip(*columns, strict=True):
        row = {"timestamp": arrival_ns // 1_000_000, "input_length": prompt, "output_length": output}
        yield json.dumps({**row, "hash_ids": list(itertools.islice(ids, -(-prompt // 512)))}) + "\n"


def whole_command(words: list[str], checkout: Path | None = None) -> dict[str, Any]:
    """CPU of a command and all of its threads and children, and the digest of its run."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.times()
        line = [sys.executable, "-m", "schedlab", "run", *words, f"hydra.run.dir={folder}/run"]
        subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, check=True, env=environment(checkout))
        after = os.times()
        digest = json.loads(Path(folder, "run/result.json").read_text())["digest"]
    took = after.children_user + after.children_system - before.children_user - before.children_system
    return {"cpu_s": took, "wall_s": after.elapsed - before.elapsed, "digest": digest}


def against(checkout: Path, rounds: int, quick: bool, words: list[str]) -> Table:
    """Here, there, here, there, …: CPU seconds of each, their ratio, and whether all digests are equal."""
    table = Table("work", box=None, pad_edge=False)
    for heading in ("CPU s here", "CPU s there", "times less", "wall s here", "wall s there", "digests"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        calls: list[tuple[str, Callable[[Path | None], dict[str, Any]]]] = [
            (row.name, partial(in_process, replace(row, trace=row.trace and str(TRACES / row.trace))))
            for row in rows(quick)
            if not row.missing
        ]
        calls += [(name, partial(whole_command, line)) for name, line in commands(Path(folder), quick)]
        for name, call in calls:
            if all(word in name for word in words):
                found = [(call(None), call(checkout)) for _ in range(rounds)]
                here, there = (
                    [statistics.median(run[key] for run in side) for key in ("cpu_s", "wall_s")]
                    for side in zip(*found, strict=True)
                )
                same = "equal" if len({run["digest"] for pair in found for run in pair}) == 1 else "DIFFER"
                walls = f"{here[1]:.2f}", f"{there[1]:.2f}"
                table.add_row(name, f"{here[0]:.2f}", f"{there[0]:.2f}", f"{there[0] / here[0]:.2f}", *walls, same)
    return table


def cells(found: dict[str, Any]) -> list[str]:
    offered = found["requests/offered"]
    return [
        f"{offered:,}", f"{found['requests/finished']:,}", f"{found['wall_s']:.2f}", f"{found['cpu_s']:.2f}",
        f"{offered / found['wall_s']:,.0f}", f"{offered / found['cpu_s']:,.0f}", f"{found['process_s']:.2f}",
        f"{found['peak_mb']:,.0f}", f"{found['steps']:,}", f"{found['calls']:,}", f"{found['e2e/mean'] * 1e3:,.0f}",
        f"{found['load']:.1f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} requests of each work")
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to be compared with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each row here and there")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(Row(**options.measure))))
        return
    console = Console(width=160, highlight=False)
    if options.against:
        console.print(against(options.against.resolve(), options.rounds, options.quick, options.words))
        console.print(f"core: {core.mode()}")
        return
    table = Table("work", box=None, pad_edge=False)
    for heading in (
        "requests", "finished", "wall s", "CPU s", "req/wall s", "req/CPU s", "process s", "peak MB", "steps", "calls",
        "E2E ms", "load",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows(options.quick):
        if not all(word in row.name for word in options.words):
            continue
        if row.missing:
            console.print(f"{row.name}: skipped, {row.missing}")
        else:
            table.add_row(row.name, *cells(in_process(row)))
    console.print(table)
    console.print(f"core: {core.mode()}")


if __name__ == "__main__":
    main()
