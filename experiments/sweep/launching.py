"""What schedlab's launchers share: from what Hydra hands a launcher to jobs, and from their ends to its reports."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from schedlab.experiments.run.job import record_failure
from schedlab.experiments.sweep import pool, remote
from schedlab.experiments.sweep.jobs import CachedConfigLoader, Composer, Job, SweepTask, job_return, prepare
from schedlab.experiments.sweep.remote import Cluster
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.writer import write_json


@dataclass(frozen=True)
class Sweep:
    task: SweepTask

    @classmethod
    def of(cls, context: HydraContext, task: TaskFunction, config: DictConfig) -> Sweep:
        """Also spares Hydra's sweeper the composition of every job, with which it checks them."""
        loader = context.config_loader
        context.config_loader = CachedConfigLoader(loader)  # type: ignore[assignment]
        command = inspect.unwrap(task)  # without what catches its errors in this process
        if "<locals>" in command.__qualname__:
            raise ConfigError(f"hydra/launcher: expected a function of a module as task, found {command.__qualname__}")
        return cls(SweepTask(loader, context.callbacks, config, "", command))

    def jobs(self, overrides: Sequence[Sequence[str]], first: int) -> tuple[SweepTask, list[Job]]:
        folder = str(self.task.master.hydra.sweep.dir)
        Path(folder).mkdir(parents=True, exist_ok=True)
        return replace(self.task, sweep=folder), [Job(first + i, tuple(words)) for i, words in enumerate(overrides)]

    def in_pool(self, overrides: Sequence[Sequence[str]], first: int, n_jobs: int) -> list[JobReturn]:
        processes = pool.processes_for(n_jobs, "hydra.launcher.n_jobs")
        task, jobs = self.jobs(overrides, first)
        return reports(task, jobs, pool.run_all(task, jobs, processes))

    def on_ray(self, overrides: Sequence[Sequence[str]], first: int, cluster: Cluster) -> list[JobReturn]:
        task, jobs = self.jobs(overrides, first)
        return reports(task, jobs, remote.run_all(task, jobs, cluster))


def reports(task: SweepTask, jobs: Sequence[Job], outcomes: Iterable[tuple[int, pool.Outcome]]) -> list[JobReturn]:
    """What Hydra learns of all jobs, in their order. Errors have been told by the task, unless its process was lost."""
    ends: dict[int, JobReturn] = {}
    try:
        for number, outcome in outcomes:
            job, error = jobs[number], outcome.error
            if isinstance(error, pool.WorkerLost):
                note_lost(task, job, error)
                error = None
            ends[number] = job_return(job, outcome.value, error)
    except KeyboardInterrupt:
        print(f"\ninterrupted: what was written can be read in {os.path.relpath(task.sweep)}", file=sys.stderr)
        raise
    return [ends[number] for number in range(len(jobs))]


def note_lost(task: SweepTask, job: Job, error: pool.WorkerLost) -> None:
    """Nothing in a lost process could say so: leave it in the job's result, beside what the run had written."""
    folder = prepare(job, Composer(task.loader, task.master).compose(job.overrides)[1], task.sweep)
    print(f"{folder.name}: failed: {error}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "result.json").exists():
        record_failure(folder, error)
    elif (result := read_run(folder).result)["status"] != "finished":
        write_json(folder / "result.json", {**result, "error": str(error)})
