"""`policy=vllm`: vLLM's own scheduler, recorded as a policy is, to compare policies with. Imports no vLLM."""

from __future__ import annotations

from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy
from schedlab.framework.step import Step


class OwnScheduler(Policy):
    """Stands for vLLM's scheduler as it comes. It decides nothing here, and so runs under `engine=vllm` alone."""

    def schedule(self, step: Step) -> None:
        raise ConfigError("policy=vllm is vLLM's own scheduler: expected engine=vllm")
