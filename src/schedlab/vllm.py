"""For vLLM: `--scheduler-cls schedlab.vllm.Scheduler`. Needs vLLM, numpy and nothing else of schedlab's dependencies.

With SCHEDLAB_OUT in the environment, what the engine serves is recorded as a run in that folder. The parts are in
`schedlab.framework.vllm`; docs/vllm.md says how to use them.
"""

import os
from pathlib import Path
from typing import Any

from vllm import __version__

from schedlab.framework.vllm.scheduler import steered

__all__ = ["Scheduler"]


class Scheduler:
    """vLLM's scheduler under a policy: asynchronous or not as vLLM's configuration says."""

    def __new__(cls, vllm_config: Any, *args: Any, **keys: Any) -> Any:
        scheduler = steered(vllm_config, *args, **keys)
        if out := os.environ.get("SCHEDLAB_OUT"):
            from schedlab.experiments.run.served import ServedJournal, limits_of

            settings = scheduler.steering
            limits = limits_of(scheduler)
            scheduler.record(ServedJournal(Path(out), limits, settings.policy, settings.predictor, __version__))
        return scheduler
