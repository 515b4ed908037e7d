"""What schedlab's launchers share: from what Hydra hands a launcher to jobs, and from their ends to its reports."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from schedlab.experiments import pool
from schedlab.experiments.jobs import Job, Quick, SweepTask, job_return
from schedlab.framework.errors import ConfigError


@dataclass(frozen=True)
class Sweep:
    task: SweepTask

    @classmethod
    def of(cls, context: HydraContext, task: TaskFunction, config: DictConfig) -> Sweep:
        """Also spares Hydra's sweeper the composition of every job, with which it checks them."""
        loader = context.config_loader
        context.config_loader = Quick(loader)  # type: ignore[assignment]
        command = inspect.unwrap(task)  # without what catches its errors in this process
        if "<locals>" in command.__qualname__:
            raise ConfigError(f"hydra/launcher: expected a function of a module as task, found {command.__qualname__}")
        return cls(SweepTask(loader, context.callbacks, config, "", command))

    def jobs(self, overrides: Sequence[Sequence[str]], first: int) -> tuple[SweepTask, list[Job]]:
        folder = str(self.task.master.hydra.sweep.dir)
        Path(folder).mkdir(parents=True, exist_ok=True)
        return replace(self.task, sweep=folder), [Job(first + i, tuple(words)) for i, words in enumerate(overrides)]

    def in_pool(self, overrides: Sequence[Sequence[str]], first: int, n_jobs: int) -> list[JobReturn]:
        task, jobs = self.jobs(overrides, first)
        ends: dict[int, JobReturn] = {}
        try:
            for number, outcome in pool.run_all(task, jobs, pool.cpus() if n_jobs < 1 else n_jobs):
                ends[number] = report(jobs[number], outcome)
        except KeyboardInterrupt:
            print(f"\ninterrupted: what was written can be read in {os.path.relpath(task.sweep)}", file=sys.stderr)
            raise
        return [ends[number] for number in range(len(jobs))]


def report(job: Job, outcome: pool.Outcome) -> JobReturn:
    """What Hydra learns. A lost process is told here, for nothing in it could; other errors the task has told."""
    if isinstance(outcome.error, pool.WorkerLost):
        print(f"{job.number}: failed: {outcome.error}", file=sys.stderr)
        return job_return(job, None)
    return job_return(job, outcome.value, outcome.error)
