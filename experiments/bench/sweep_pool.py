"""What `hydra/launcher=pool` costs: a job that does nothing, and many short virtual runs.

    python -m schedlab.experiments.bench.sweep_pool [--noop 200] [--runs 1000] [--requests 1000] [--launcher pool]

Prints JSON: wall seconds, and CPU seconds of all processes per job, which other work on the machine does not change.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
import time
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig

from schedlab import core
from schedlab.experiments.run import compose
from schedlab.experiments.run.job import run_job
from schedlab.experiments.sweep.pool import cpus

VIRTUAL = ("engine=virtual", "model=llama3.1-8b", "hardware=h100", "workload=poisson")
LEAN = ("record=summary", "wandb.mode=disabled", "progress=false", "plots=false")


def note_cpu() -> None:
    """CPU seconds of this process so far, by its id."""
    with Path("cpu").open("a") as file:
        file.write(f"{os.getpid()} {time.process_time()}\n")


def noop(config: DictConfig) -> None:
    note_cpu()


def run_and_note(config: DictConfig) -> None:
    run_job(config)
    note_cpu()


def measure(task: object, words: list[str], jobs: int, launcher: str) -> dict[str, float]:
    """A sweep of so many seeds, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        began, cpu = time.perf_counter(), time.process_time()
        words = ["-m", f"hydra/launcher={launcher}", *VIRTUAL, *words, f"seed=range({jobs})", "hydra.sweep.dir=sweep"]
        compose.run_with_overrides(task, words, "sweep_pool")  # type: ignore[arg-type]
        if launcher == "joblib":  # its workers are kept for the next sweep, in a folder that will be gone by then
            import_module("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)
        wall, own = time.perf_counter() - began, time.process_time() - cpu
        noted = [line.split() for line in Path("cpu").read_text().splitlines()]
    last = {process: float(seconds) for process, seconds in noted}
    first = {process: float(seconds) for process, seconds in reversed(noted)}
    workers = [last[process] for process in last if int(process) != os.getpid()]
    steady = sum(last[process] - first[process] for process in last)
    return {
        "jobs": jobs,
        "processes": len(last),
        "wall_s": round(wall, 2),
        "cpu_s": round(own + sum(workers), 2),
        "cpu_s_per_further_job": round(steady / max(jobs - len(last), 1), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--noop", type=int, default=200)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--launcher", default="pool")
    options = parser.parse_args()
    result = {
        "launcher": options.launcher,
        "cpus": cpus(),
        "core": core.mode(),
        "load_before": os.getloadavg()[0],
        "noop": measure(noop, [], options.noop, options.launcher) if options.noop else None,
        "virtual": measure(
            run_and_note, [f"workload.num_requests={options.requests}", *LEAN], options.runs, options.launcher
        )
        if options.runs
        else None,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    from schedlab.experiments.bench import sweep_pool  # by its name, so that other processes find its tasks

    sweep_pool.main()
