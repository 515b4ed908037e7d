"""`engine=vllm`: vLLM's engine under a policy, in the Python environment that has vLLM.

Made here, where Hydra is; the run itself is executed by that environment's Python (run/elsewhere.py), which starts the
engine in its own process. Imports vLLM there alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.engines import EngineSetup, model_preset, scheduler
from schedlab.framework.admission import Admission
from schedlab.framework.batch import Batch
from schedlab.framework.clock import Clock
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import StepResult
from schedlab.framework.model.files import model_directory
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import Source

if TYPE_CHECKING:
    from schedlab.framework.vllm.replay import Replay

UNKNOWN_BLOCKS = 1
"""Stands for what vLLM will find room for, until it runs."""


@dataclass
class VllmExecutor:
    """What is known of a model that vLLM runs. vLLM executes its batches itself."""

    vocab_size: int
    kernels: str = "vllm"
    needs_inputs = True
    eos_token_ids: tuple[int, ...] = ()

    def allocate(self, num_blocks: int, block_size: int, num_host_blocks: int, max_num_seqs: int) -> None:
        pass

    def block_bytes(self, block_size: int) -> int:
        return block_size

    def prompt_token_ids(self, request: EngineRequest) -> np.ndarray:
        return request.content.tokens(request.num_prompt_tokens, self.vocab_size)

    def execute(self, batch: Batch) -> StepResult:
        raise AssertionError("vLLM executes its own batches")


@dataclass(frozen=True, kw_only=True)
class VllmSetup(EngineSetup):
    """`arguments` are vLLM's own, beyond what follows from the limits; `limits` as they were given.

    `replay` is the started engine, in the process that runs it.
    """

    limits: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    publish: str = "commit"
    on_fault: str = "raise"
    replay: Replay | None = None

    def started(self, policy: Policy, predictor: Predictor | None) -> VllmSetup:
        """With the model loaded in this process, and as many blocks as vLLM has found room for."""
        try:
            from schedlab.framework.vllm.replay import VERSION, Replay, engine_arguments
        except ModuleNotFoundError as error:
            raise ConfigError(f"engine.python={sys.executable}: this environment has no {error.name}") from None
        assert self.path is not None
        limits = {**asdict(self.config), "num_blocks": self.limits.get("num_blocks")}
        replay = Replay(engine_arguments(self.path, limits, self.arguments))
        blocks = replay.start(policy, predictor, self.on_fault, self.publish)
        executor = replace(self.executor, kernels=VERSION)  # type: ignore[type-var]
        config = replace(self.config, num_blocks=blocks)
        return replace(self, python=None, replay=replay, config=config, executor=executor)

    def counters(self) -> dict[str, int]:
        assert self.replay is not None, "it runs in a process of its own"
        return self.replay.counters()

    def engine(  # type: ignore[override]
        self, policy: Policy, source: Source, clock: Clock, recorder: Recorder, predictor: Predictor | None = None,
        admission: Admission | None = None,
    ) -> Replay | Engine:  # fmt: skip
        if admission is not None:
            raise ConfigError("admission: expected none, as vLLM takes everybody; found " + type(admission).__name__)
        assert self.replay is not None, "it runs in a process of its own"
        return self.replay.attach(source, self.config, clock, recorder)


def vllm(
    model: str | Mapping[str, Any],
    *,
    python: str | None = None,
    dtype: str = "auto",
    publish: str = "commit",
    on_fault: str = "raise",
    gpu_memory_utilization: float = 0.9,
    args: Mapping[str, Any] | None = None,
    **limits: Any,
) -> VllmSetup:
    """vLLM's engine on a local checkpoint, its scheduler replaced by the policy (`policy=vllm` leaves it in place).

    `python`: the interpreter of the environment that has vLLM, None: this one. `publish` and `on_fault` are those of
    `schedlab.vllm`. `args`: further engine arguments of vLLM, by their Python names.
    """
    bounds = ("max_num_waiting_reqs", "max_num_queued_reqs", "max_num_queued_tokens")
    fixed = {"swap_space_gib": 0.0, "eviction": "lru", "max_chained_steps": 1, **dict.fromkeys(bounds)}
    for key, only in fixed.items():
        if limits.get(key, only) != only:
            raise ConfigError(f"engine.{key}: expected {only}, as vLLM has no other; found {limits[key]}")
    shape, extras = model_preset(model)
    if not extras.get("path"):
        raise ConfigError("engine=vllm: expected a checkpoint (model=smollm2 or model.path=…), found a shape alone")
    executor = VllmExecutor(shape.vocab_size)
    config = scheduler(executor, shape, {**limits, "num_blocks": limits.get("num_blocks") or UNKNOWN_BLOCKS})
    arguments = {"dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization, **(args or {})}
    path = str(model_directory(extras["path"]))
    return VllmSetup(
        "vllm", executor, config, ("wall",), path, python or sys.executable, limits=limits, arguments=arguments,
        publish=publish, on_fault=on_fault,
    )  # fmt: skip
