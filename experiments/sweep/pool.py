"""Processes that are used again for one job after another.

They are forked from a server that has imported what jobs need and has done nothing else: forks of the caller would
inherit the locks and threads of torch or W&B, and processes of their own would import everything each. What jobs print
reaches the caller line by line. A process that dies costs its job, and is replaced.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from schedlab.framework.errors import ConfigError

PRELOADED = ("schedlab.experiments.sweep.jobs", "schedlab.experiments.run.job")
Make = Callable[[], Callable[[Any], Any]]
"""Called once in each process; gives the function that jobs are passed to."""


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: Exception | None = None


class WorkerLost(RuntimeError):
    """A process ended without finishing its job: killed, or out of memory."""


@dataclass
class Worker:
    process: BaseProcess
    connection: Connection
    job: int | None = None

    def give(self, number: int, job: Any) -> None:
        self.job = number
        self.connection.send(job)


def cpus() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_for(n_jobs: int, key: str) -> int:
    """How many processes `n_jobs` asks for; ConfigError, which names `key`, where it asks for none."""
    if n_jobs < 1 and n_jobs != -1:
        raise ConfigError(f"{key}={n_jobs}: expected 1 or more processes, or -1 for as many as there are processors")
    return cpus() if n_jobs == -1 else n_jobs


def run_all(make: Make, jobs: Sequence[Any], processes: int) -> Iterator[tuple[int, Outcome]]:
    """Outcomes by the number of their job, as they come. Prints what jobs print."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    waiting = deque(range(len(jobs)))
    workers = [start(context, make) for _ in range(min(processes, len(jobs)))]
    try:
        for worker in workers:
            worker.give(number := waiting.popleft(), jobs[number])
        while workers:
            for connection in wait([worker.connection for worker in workers]):
                worker = next(worker for worker in workers if worker.connection is connection)
                outcome = heard(worker)
                if outcome is None:
                    continue
                assert worker.job is not None
                yield worker.job, outcome
                workers.remove(worker)
                if waiting:
                    worker = start(context, make) if isinstance(outcome.error, WorkerLost) else worker
                    worker.give(number := waiting.popleft(), jobs[number])
                    workers.append(worker)
                else:
                    end(worker)
    finally:
        for worker in workers:
            stop(worker)


def start(context: Any, make: Make) -> Worker:
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, make, os.getcwd(), dict(os.environ)), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)


def heard(worker: Worker) -> Outcome | None:
    """The end of the worker's job; None if it only printed."""
    try:
        said = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join()
        return Outcome(error=WorkerLost(f"the process that ran it ended with code {worker.process.exitcode}"))
    if isinstance(said, Outcome):
        return said
    stream, text = said
    print(text, end="", file=getattr(sys, stream), flush=True)
    return None


def end(worker: Worker) -> None:
    """Nothing is left to do."""
    worker.connection.close()
    worker.process.join()


def stop(worker: Worker) -> None:
    """The caller goes away, as after Ctrl-C: let the job leave what it has."""
    assert worker.process.pid is not None
    if worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGINT)
    worker.process.join(timeout=5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


# ---- in the process ----


class Forwarded(io.TextIOBase):
    """A stream whose whole lines go to the caller."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._name = name
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        whole, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            self._connection.send((self._name, whole + newline))
        return len(text)


def serve(connection: Connection, make: Make, folder: str, environment: dict[str, str]) -> None:
    """Run jobs until there are no more, or until the caller is gone."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    threading.Thread(target=end_with_caller, daemon=True).start()
    sys.stdout, sys.stderr = Forwarded(connection, "stdout"), Forwarded(connection, "stderr")
    try:
        work = make()
        while True:
            connection.send(outcome_of(work, connection.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def outcome_of(work: Callable[[Any], Any], job: Any) -> Outcome:
    try:
        return Outcome(work(job))
    except Exception as error:
        return Outcome(error=error if can_travel(error) else RuntimeError(f"{type(error).__name__}: {error}"))


def can_travel(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def end_with_caller() -> None:
    """A caller that was killed sends nothing: without this its jobs would go on beside those of the next attempt."""
    caller = multiprocessing.parent_process()
    if caller is not None:
        wait([caller.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)
