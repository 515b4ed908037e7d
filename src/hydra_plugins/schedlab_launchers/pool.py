"""`hydra/launcher=pool`: many short jobs on the processors of this machine. The work is in schedlab.experiments."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class PoolLauncher(Launcher):
    def __init__(self, n_jobs: int = -1) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from schedlab.experiments.sweep.launching import Sweep

        self.sweep = Sweep.of(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.sweep.in_pool(job_overrides, initial_job_idx, self.n_jobs)
