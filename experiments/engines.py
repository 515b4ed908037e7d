"""What `engine=` names: an executor, the scheduler's limits for it, and the clocks that can measure it.

In Python, models and hardware may be given by the name of their preset: `engines.virtual("llama3.1-8b", "h100")`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab.experiments.run.checks import check_arguments
from schedlab.framework.admission import Admission
from schedlab.framework.clock import BusyClock, Clock, VirtualClock, WallClock
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError
from schedlab.framework.executor import Executor
from schedlab.framework.model.config import ModelConfig
from schedlab.framework.model.files import model_directory
from schedlab.framework.model.hf import read_config
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import Source

if TYPE_CHECKING:
    from schedlab.framework.cost.fit import Profile

GIB = 1 << 30
CLOCKS: Mapping[str, type[Clock]] = {"wall": WallClock, "busy": BusyClock, "virtual": VirtualClock}
STUB_BLOCKS = 4096
MEASURES = {
    "wall": "it takes real time",
    "busy": "it counts the CPU time of one thread",
    "virtual": "it advances by modelled durations",
}
DEFAULT = {field.name: field.default for field in fields(EngineConfig)}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The executor's names of dtypes, and the cost model's."""
MODEL_EXTRAS = ("path", "seed", "weight_dtype")
"""Keys of a model preset that are not part of its shape: where its weights are, or the seed that draws them, and the
type that they are held in if the engine's is not meant."""


@dataclass(frozen=True)
class EngineSetup:
    """One engine's parts. `clocks` are those that can measure it, the first one by default.

    `path` is where the model's files are, its tokenizer among them; None for a model that has none. `python` runs it,
    in an environment of its own; None for this process.
    """

    name: str
    executor: Executor
    config: EngineConfig
    clocks: tuple[str, ...]
    path: str | None = None
    python: str | None = None

    def engine(
        self, policy: Policy, source: Source, clock: Clock, recorder: Recorder, predictor: Predictor | None = None,
        admission: Admission | None = None,
    ) -> Engine:  # fmt: skip
        """An engine that will run `policy` over `source`."""
        return Engine(policy, self.executor, source, self.config, clock, recorder, predictor, admission)

    def counters(self) -> dict[str, int]:
        """What the engine counted beside its rows, when it has run."""
        return {}

    def clock_name(self, name: str = "auto") -> str:
        """What `clock=name` means here. ConfigError for a clock that cannot measure this engine."""
        if name == "auto":
            return self.clocks[0]
        if name not in CLOCKS:
            raise ConfigError(f"clock={name}: expected auto, {', '.join(CLOCKS)}")
        if name not in self.clocks:
            usable = " or ".join(f"clock={other}" for other in self.clocks)
            raise ConfigError(f"clock={name}: {MEASURES[name]}, engine={self.name} as it is set up needs {usable}")
        return name

    def clock(self, name: str = "auto") -> Clock:
        return CLOCKS[self.clock_name(name)]()


def cpu(
    model: str | Mapping[str, Any],
    *,
    dtype: str = "float32",
    num_threads: int = 1,
    sampling_seed: int = 0,
    kv_space_gib: float = 4.0,
    batch_invariant: bool = False,
    kernels: str = "auto",
    tensor_parallel: int = 1,
    **limits: Any,
) -> EngineSetup:
    """The real engine on this CPU. With more than one thread or rank the busy clock, which counts one, cannot measure
    it.

    `tensor_parallel`: processes that share each layer's matrices and heads; threads and KV memory are each one's.

    `kernels`: "native" are those that `schedlab kernels build` compiled, "torch" needs none, "auto" takes the former
    where they are.

    `batch_invariant`: a request's logits are the same to the bit alone and in any batch, at a price in speed.
    """
    shape, extras = model_preset(model)
    executor = model_executor(
        shape,
        extras,
        dtype=dtype,
        num_threads=num_threads,
        sampling_seed=sampling_seed,
        batch_invariant=batch_invariant,
        kernels=kernels,
        tensor_parallel=tensor_parallel,
    )
    clocks = ("busy", "wall") if num_threads == tensor_parallel == 1 else ("wall",)
    return EngineSetup("cpu", executor, scheduler(executor, shape, limits, kv_space_gib), clocks, extras.get("path"))


def cuda(
    model: str | Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    device: str = "cuda",
    sampling_seed: int = 0,
    batch_invariant: bool = False,
    enforce_eager: bool = False,
    gpu_memory_utilization: float = 0.9,
    weights: Any = None,
    **limits: Any,
) -> EngineSetup:
    """The real engine on a CUDA device: decode steps replayed from CUDA graphs, unless `enforce_eager`.

    `batch_invariant`: a request's logits are the same to the bit alone, in any batch and under any policy. `weights`
    stand for the model's own.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("engine=cuda: torch finds no CUDA device; engine=cpu and engine=virtual need none")
    from schedlab.framework.model.graphs import CudaGraphRecorder

    shape, extras = model_preset(model)
    executor = model_executor(
        shape, extras, dtype=dtype, device=device, sampling_seed=sampling_seed, batch_invariant=batch_invariant,
        recorder=None if enforce_eager else CudaGraphRecorder(torch.device(device)),
        max_model_len=limits.get("max_model_len"), weights=weights,
    )  # fmt: skip
    blocks = limits.get("num_blocks") or free_blocks(executor, device, gpu_memory_utilization, limits)
    config = scheduler(executor, shape, {**limits, "num_blocks": blocks})
    return EngineSetup("cuda", executor, config, ("wall",), extras.get("path"))


def free_blocks(executor: Executor, device: str, utilization: float, limits: Mapping[str, Any]) -> int:
    """KV blocks in what `utilization` of the device's memory leaves beside weights and a step's own tensors."""
    import torch

    from schedlab.framework.model.memory import kv_cache_bytes, readable

    if not 0 < utilization <= 1:
        raise ConfigError(f"engine.gpu_memory_utilization: expected a share in (0, 1], found {utilization}")
    keys: dict[str, Any] = DEFAULT | {key: value for key, value in limits.items() if value is not None}
    reserved = executor.step_bytes(keys["max_num_batched_tokens"], keys["max_num_seqs"])  # type: ignore[attr-defined]
    left = kv_cache_bytes(torch.device(device), utilization, reserved)
    blocks = left // executor.block_bytes(keys["block_size"])
    if blocks < 1:
        raise ConfigError(
            f"engine.gpu_memory_utilization: {utilization:g} of the device leaves {readable(left)} for the KV cache "
            f"beside weights and {readable(reserved)} of a step, expected room for a block"
        )
    return int(blocks)


def virtual(
    model: str | Mapping[str, Any],
    hardware: str | Hardware,
    *,
    weight_dtype: str = "bf16",
    kv_cache_dtype: str = "auto",
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    profile: Profile | str | Path | None = None,
    gpu_memory_utilization: float = 0.9,
    **limits: Any,
) -> EngineSetup:
    """Modelled durations of `model` on `hardware`; imports no torch. The model's own weight_dtype wins."""
    from schedlab.framework.cost.model import CostExecutor

    shape, extras = model_preset(model)
    executor = CostExecutor(
        shape,
        hardware_preset(hardware),
        weight_dtype=extras.get("weight_dtype") or weight_dtype,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel,
        gpu_memory_utilization=gpu_memory_utilization,
        profile=profile,
        **{key: limits[key] for key in ("max_num_batched_tokens", "max_num_seqs") if key in limits},
    )
    return EngineSetup("virtual", executor, scheduler(executor, shape, limits), ("virtual",), extras.get("path"))


def stub(model: str | Mapping[str, Any] = "tiny", **limits: Any) -> EngineSetup:
    """A fake KV memory with the vocabulary and the length limit of `model`."""
    from schedlab.framework.stub import StubExecutor

    shape, extras = model_preset(model)
    executor = StubExecutor(vocab_size=shape.vocab_size)
    room = {"num_blocks": limits.pop("num_blocks", None) or STUB_BLOCKS}
    return EngineSetup("stub", executor, scheduler(executor, shape, limits | room), ("virtual",), extras.get("path"))


@contextmanager
def settled_heap() -> Iterator[None]:
    """What exists by now, modules and weights among it, is left out of garbage collections.

    One that passes over all of it takes 0.1 s, and that in the middle of some step.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


# ---- parts ----


def model_executor(
    shape: ModelConfig, extras: Mapping[str, Any], *, tensor_parallel: int = 1, **options: Any
) -> Executor:
    from schedlab.framework.model.executor import ModelExecutor
    from schedlab.framework.model.ranks import TensorParallelExecutor

    path = None if extras.get("path") is None else model_directory(extras["path"])
    weight_dtype = extras.get("weight_dtype")
    options |= {"path": path, "seed": extras.get("seed", 0), "weight_dtype": weight_dtype}
    if tensor_parallel == 1:
        return ModelExecutor(shape, **options)
    return TensorParallelExecutor(shape, tensor_parallel=tensor_parallel, **options)


def model_preset(model: str | Mapping[str, Any]) -> tuple[ModelConfig, Mapping[str, Any]]:
    """A preset's shape and what else it says; a name with a slash is a model's directory, or a hub's name for one.

    With `path`, the shape is that of the checkpoint's config.json.
    """
    if isinstance(model, str):
        from schedlab.experiments.run.compose import preset

        model = {"path": model} if "/" in model else preset("model", model)
    extras = {key: model[key] for key in MODEL_EXTRAS if key in model}
    if extras.get("path"):
        return read_config(model_directory(extras["path"])), extras
    return ModelConfig.from_mapping({key: value for key, value in model.items() if key not in MODEL_EXTRAS}), extras


def cost_dtype(dtype: str, key: str = "engine.dtype") -> str:
    """The cost model's name of the dtype that `key` has. ConfigError for one that it does not know."""
    if dtype not in DTYPES:
        raise ConfigError(f"{key}={dtype}: expected one of {', '.join(DTYPES)}, which the cost model knows")
    return DTYPES[dtype]


def roofline_of(model: str | Mapping[str, Any], dtype: str) -> Roofline:
    """What the cost model knows of `model` on a real engine in `dtype`; the model's own weight_dtype wins.

    ConfigError for a `dtype` that it does not know.
    """
    shape, extras = model_preset(model)
    return Roofline(shape, extras.get("weight_dtype") or cost_dtype(dtype), cost_dtype(dtype))


def hardware_preset(hardware: str | Hardware, serving: str = "none") -> Hardware:
    """A preset's machine, with the host constants of a preset of `serving`."""
    if isinstance(hardware, Hardware):
        return hardware
    from schedlab.experiments.run.compose import preset

    keys = dict(preset("hardware", hardware, serving))
    keys.pop("_target_")
    return Hardware(**keys)


def scheduler(
    executor: Executor, shape: ModelConfig, limits: Mapping[str, Any], kv_space_gib: float = 4.0
) -> EngineConfig:
    """`limits` with what was left open filled in: the model's own length limit, as many blocks as there is room for."""
    given = {key: value for key, value in limits.items() if key != "gpu_memory_utilization" and value is not None}
    check_arguments("engine", given, EngineConfig)
    max_model_len = given.setdefault("max_model_len", shape.max_position_embeddings)
    if max_model_len > shape.max_position_embeddings:
        raise ConfigError(
            f"engine.max_model_len: the model ends at {shape.max_position_embeddings} tokens, found {max_model_len}"
        )
    if "num_blocks" not in given:
        given["num_blocks"] = room(
            executor, given.get("block_size", DEFAULT["block_size"]), max_model_len, kv_space_gib
        )
    return EngineConfig(**given)


def room(executor: Executor, block_size: int, max_model_len: int, kv_space_gib: float) -> int:
    """Blocks beside the weights where the executor knows its memory, else as many as `kv_space_gib` holds."""
    if kv_blocks := getattr(executor, "kv_blocks", None):
        return int(kv_blocks(block_size, max_model_len))
    return int(kv_space_gib * GIB // executor.block_bytes(block_size))
