"""For vLLM: `--scheduler-cls schedlab.vllm.Scheduler`. Needs vLLM, numpy and nothing else of schedlab's dependencies.

The parts are in `schedlab.framework.vllm`; docs/vllm.md says how to use it.
"""

from schedlab.framework.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]
