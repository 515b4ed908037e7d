"""`hydra/launcher=ray`: jobs on a cluster, or on one made for them here. The work is in schedlab.experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class SchedlabRayLauncher(Launcher):
    def __init__(self, **cluster: Any) -> None:
        self.cluster = cluster

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from schedlab.experiments.sweep.launching import Sweep

        self.sweep = Sweep.of(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from schedlab.experiments.sweep.remote import Cluster

        return self.sweep.on_ray(job_overrides, initial_job_idx, Cluster(**self.cluster))
