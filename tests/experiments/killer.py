"""A sweep that is killed again and again, as a process of its own: `killer.py FOLDER SEED KILLS WORD…`.

Attempts are forks of this process, which has imported everything, so that most kills fall into jobs and not into
imports. After each kill whatever claims to be finished must be whole and equal to the run that nobody killed.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from schedlab.experiments import cli
from schedlab.experiments.analysis.table import Comparison
from schedlab.experiments.sweep import pool, resume
from schedlab.framework.results.reader import read_run

TABLES = ("requests", "steps", "decisions")


def begin(words: list[str], sweep: Path) -> int:
    """Process id of a sweep that has just been started."""
    if pid := os.fork():
        return pid
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    sys.argv = ["schedlab", "run", "-m", *words, f"hydra.sweep.dir={sweep}", "resume=true"]
    try:
        cli.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))


def finished(sweep: Path) -> dict[str, tuple[str, list[int]]]:
    """Digest and lengths of the tables of every run that claims to be done, by configuration."""
    found = {}
    for done in sorted(sweep.glob(f"*/{resume.DONE}")):
        run = read_run(done.parent)
        assert run.status == "finished", f"{done.parent}: done, but {run.status}"
        lengths = [len(next(iter(getattr(run, table).values()))) for table in TABLES]
        found[run.result["config_hash"]] = run.digest, lengths
    return found


def ended(pid: int, within_s: float) -> bool:
    """Whether the process came to its end by itself."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main(folder: Path, seed: int, kills: int, words: list[str]) -> None:
    for module in ("hydra.core.plugins", *pool.PRELOADED):
        importlib.import_module(module)
    began = time.monotonic()
    assert ended(begin(words, folder / "whole"), 600)
    span = time.monotonic() - began
    whole, moments, sweep = finished(folder / "whole"), random.Random(seed), folder / "killed"
    killed = partial = 0
    while killed < kills:
        if ended(begin(words, sweep), moments.uniform(0, span)):
            assert finished(sweep) == whole
            shutil.rmtree(sweep)
            continue
        killed += 1
        done = finished(sweep)
        assert done.items() <= whole.items()
        comparison = Comparison.read([sweep])
        assert len(comparison.complete) >= len(done)
        partial += 0 < len(done) < len(whole)
    assert ended(begin(words, sweep), 600)
    assert finished(sweep) == whole and len(whole) > 1
    print(f"killed {killed} times, {partial} of them between the first job's end and the last's")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
