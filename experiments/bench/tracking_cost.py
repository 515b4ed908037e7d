"""What a run that is tracked offline costs beside itself: start, curves, requests, files, end.

    python -m schedlab.experiments.bench.tracking_cost [--runs 100] [--requests 1000]

Prints JSON: seconds of wall and of CPU (this process and W&B's service) for each run after the first, which imports
wandb.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import schedlab
from schedlab import core
from schedlab.experiments.run.tracking import WandbConfig, start_tracker
from schedlab.framework.results.reader import read_run
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    import wandb

    with tempfile.TemporaryDirectory() as folder:
        finished = Path(folder, "run")
        schedlab.run(
            FCFS(), CommonWork(num_requests=options.requests), schedlab.engines.virtual("llama3.1-8b", "h100"),
            out=finished,
        )  # fmt: skip
        config = json.loads((finished / "manifest.json").read_text())
        walls, began = [], os.times()
        for number in range(options.runs + 1):
            directory = Path(folder, str(number))
            shutil.copytree(finished, directory)
            start = time.perf_counter()
            start_tracker(WandbConfig(mode="offline", group="bench"), config, directory).finish(read_run(directory))
            walls.append(time.perf_counter() - start)
            if number == 0:
                began = os.times()
        wandb.teardown()  # waits for W&B's service, whose CPU time counts only then
        ended = os.times()
    cpu = sum(ended[:4]) - sum(began[:4])
    walls = sorted(walls[1:])
    print(
        json.dumps(
            {
                "runs": options.runs,
                "core": core.mode(),
                "wall_s_median": round(walls[len(walls) // 2], 3),
                "wall_s_mean": round(sum(walls) / len(walls), 3),
                "cpu_s_mean": round(cpu / options.runs, 3),
                "load_after": os.getloadavg()[0],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
