"""The whole engine on this device: four policies on one trace, what a step takes, and a calibration profile.

The model is a seeded llama3.1-8b, on the interpreter a tiny one whose times mean nothing. Steps of decodes are padded
and chained as ever; on a GPU they are captured.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from schedlab.experiments import engines
from schedlab.experiments.device.rows import Device, Row
from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.studies.calibrate import facts, held_out_errors, make_profile, tolerated
from schedlab.experiments.studies.grid import Extent
from schedlab.experiments.studies.measuring import run_grid
from schedlab.framework.clock import WallClock
from schedlab.framework.content import TokenContent
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.model.backend import Backend, invariant_gpu, quantised_gpu
from schedlab.framework.model.config import ModelConfig, RopeScaling
from schedlab.framework.model.decoder import RaggedBatch
from schedlab.framework.model.executor import DTYPES, ModelExecutor
from schedlab.framework.model.graphs import CudaGraphRecorder, called
from schedlab.framework.model.graphs import Recorder as StepRecorder
from schedlab.framework.model.linear import plain
from schedlab.framework.model.weights import Weights, random_weights
from schedlab.framework.policy import Policy
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.tables import RunTables
from schedlab.framework.source import ListSource
from schedlab.kernels.quantised import KINDS
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.decode_priority import DecodePriority
from schedlab.policies.fcfs import FCFS
from schedlab.policies.prefix_reuse import PrefixReuse

LLAMA_8B = ModelConfig(
    architecture="llama", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, intermediate_size=14336, vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192), rms_norm_eps=1e-5, bos_token_id=128_000, eos_token_ids=(128_001,),
)  # fmt: skip
TINY = ModelConfig(
    architecture="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, intermediate_size=32, vocab_size=97, max_position_embeddings=256,
)  # fmt: skip
MACHINE = Hardware(
    name="h200", peak_tflops={"fp32": 67, "bf16": 989, "fp16": 989, "fp8": 1979}, memory_gb=141, memory_gb_s=4800,
    host_link_gb_s=64, interconnect_gb_s=450, linear_efficiency={"bf16": 0.77, "fp8": 0.61}, attention_efficiency=0.60,
    memory_efficiency=0.90, link_efficiency=0.85, interconnect_efficiency=0.50, attention_us=9.0, kernel_us=3.0,
    step_us=875.0, request_us=2.0, sequence_us=0.0, scheduler_us=20.0,
    scheduler_request_us=0.5, collective_us=5.0, copy_us=20.0,
)  # fmt: skip
"""As in conf/hardware; a profile of another GPU takes its name alone."""
NAMES = ("h200", "h100", "a100", "l40s")


@dataclass(frozen=True)
class Extents:
    """How large a check is. `trace`: requests, shared prompt, most of the own prompt, most output, ms between them."""

    shape: ModelConfig
    dtype: str
    limits: EngineConfig
    trace: tuple[int, int, int, int, int]
    batch: int
    chain: int
    output: int
    grid: Extent
    budget_s: float


FULL = Extents(
    LLAMA_8B, "bfloat16",
    EngineConfig(num_blocks=400, max_model_len=2048, max_num_seqs=32, max_num_batched_tokens=1024),
    trace=(32, 256, 700, 64, 10), batch=8, chain=8, output=65, grid=Extent(), budget_s=30.0,
)  # fmt: skip
SMALL = Extents(
    TINY, "float32",
    EngineConfig(num_blocks=6, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24, block_size=4),
    trace=(3, 5, 8, 5, 0), batch=2, chain=2, output=5, grid=Extent(3, 24, 24, 32), budget_s=0.0,
)  # fmt: skip


ONE_LAYER = replace(FULL, shape=replace(LLAMA_8B, num_hidden_layers=1))
"""For launches alone: layers are alike."""


def extents(device: Device) -> Extents:
    return SMALL if device.interpreted else ONE_LAYER if device.dataless else FULL


def four(device: Device) -> dict[str, Callable[[], Policy]]:
    chunk = 9 if device.interpreted else 512
    return {
        "fcfs": FCFS,
        "chunked_prefill": lambda: ChunkedPrefill(chunk_size=chunk),
        "decode_priority": lambda: DecodePriority(stall_tokens=chunk, watermark_blocks=1),
        "prefix_reuse": lambda: PrefixReuse(chunk_size=chunk),
    }


def policies(device: Device) -> Iterator[Row]:
    """Under every policy each request generates the same tokens, as the batch-invariant mode promises."""
    expected: list[list[int]] = []
    totals = dict.fromkeys(("preemptions/recompute", "prefix/tokens_reused"), 0.0)
    for name, make in four(device).items():
        tokens, run = served(device, make(), trace(device), invariant=True)
        expected = expected or tokens
        differing = sum(a != b for a, b in zip(tokens, expected, strict=True))
        met = {key: float(run.summary[key] or 0) for key in totals}
        note = ", ".join(f"{key} {value:g}" for key, value in met.items())
        yield Row("policies", f"{name}: other tokens than under fcfs", differing, "requests", most=0, note=note)
        totals = {key: total + met[key] for key, total in totals.items()}
    for key, total in totals.items():
        yield Row("policies", f"{key}, all policies", total, "", least=1)
    distinct = statistics.median(len(set(stream)) / len(stream) for stream in expected)
    yield Row("policies", "distinct tokens of a stream, median", distinct, "share", least=0.2)


def steps(device: Device) -> Iterator[Row]:
    """What steps take in ordinary mode, by policy; and a batch of decodes replayed, launched one by one, chained."""
    for name, make in four(device).items():
        _, run = served(device, make(), trace(device))
        prompts = run.steps["prefill_tokens"] > 0
        yield _medians(f"{name}: a decode step", run, ~prompts)
        yield _medians(f"{name}: a step with prompts", run, prompts)
    extent = extents(device)
    single = decode_ms(device)
    yield Row("steps", f"batch {extent.batch}: a decode step, replayed", single, "ms")
    eager = decode_ms(device, eager=True) / single
    yield Row("steps", f"batch {extent.batch}: launched one by one, against replayed", eager, "times")
    chained = single / decode_ms(device, chain=extent.chain)
    yield Row("steps", f"batch {extent.batch}: single steps, against chains of {extent.chain}", chained, "times")


def _medians(what: str, run: RunTables, chosen: np.ndarray) -> Row:
    if not chosen.any():
        return Row("steps", what, float("nan"), "ms", note="none was run")
    each = run.steps["repeat"][chosen]
    wall_ms, device_ms = (
        float(np.median(run.steps[column][chosen] / each)) / scale
        for column, scale in (("duration_ns", 1e6), ("device_us", 1e3))
    )
    return Row("steps", what, wall_ms, "ms", note=f"median of {chosen.sum()}; {device_ms:.3g} ms on the device")


def launches(device: Device) -> Iterator[Row]:
    """Every kernel that the sections of the engine launch, on a device without data. Yields nothing."""
    for invariant in (False, True):
        _launch(device, executor(device, invariant=invariant))
    yield from ()


def quantised_launches(device: Device) -> Iterator[Row]:
    for kind in KINDS:
        _launch(device, executor(device, kind=kind))
    yield from ()


def _launch(device: Device, model: ModelExecutor) -> None:
    limits = extents(device).limits
    model.allocate(limits.num_blocks, limits.block_size, 0, limits.max_num_seqs)
    model.warm_up()


def weight_types(device: Device) -> Iterator[Row]:
    """A batch of decodes with the layers' matrices in integers, against the same with them as they are."""
    extent = extents(device)
    whole = decode_ms(device)
    for kind in KINDS[-1:] if device.interpreted else KINDS:
        took = decode_ms(device, kind=kind)
        note = f"{took:.3g} ms against {whole:.3g}"
        yield Row("weights", f"batch {extent.batch}: a decode step, against {kind}", whole / took, "times", note=note)


def decode_ms(device: Device, *, eager: bool = False, chain: int = 1, kind: str | None = None) -> float:
    """Median wall milliseconds of a step in which the same batch decodes."""
    extent = extents(device)
    prompt = extent.trace[2]
    requests = [_request(i, 0, list(range(3, 3 + prompt)), extent.output) for i in range(extent.batch)]
    blocks = extent.batch * -(-(prompt + extent.output) // extent.limits.block_size)
    roomy = replace(extent.limits, num_blocks=blocks, max_chained_steps=chain)
    _, run = served(device, FCFS(), requests, limits=roomy, eager=eager, kind=kind)
    decodes = (run.steps["decode_requests"] == extent.batch) & (run.steps["repeat"] == chain)
    return float(np.median(run.steps["duration_ns"][decodes])) / 1e6 / chain


def calibration(device: Device) -> Iterator[Row]:
    """Measure the grid of `schedlab calibrate` and fit a profile; the device keeps it."""
    extent = extents(device)
    setup = _sized(device)
    measured = run_grid(setup, extent.grid, passes=3, budget_s=extent.budget_s, say=lambda line: None)
    errors = held_out_errors(measured)
    roofline = Roofline(extent.shape, "fp32" if extent.dtype == "float32" else "bf16")
    machine = replace(MACHINE, name=_machine_name(device))
    profile = make_profile(measured, errors, roofline, machine, facts(setup, "auto", {"extent": asdict(extent.grid)}))
    device.profile = profile
    most = None if device.interpreted else tolerated(profile.error)
    note = f"{profile.error.num_points} steps; repeats differ by {profile.error.repeat_difference or 0.0:.1%}"
    held_out = profile.error.held_out_mean
    yield Row("calibration", "mean held-out error of the profile", held_out, "share", most=most, note=note)
    yield Row("calibration", "KV blocks that free memory leaves room for", setup.config.num_blocks, "blocks")


def _sized(device: Device) -> EngineSetup:
    """As `engine=cuda` is set up, blocks by free memory; on torch where the grid would be too long to interpret."""
    extent = extents(device)
    if device.interpreted:
        limits = EngineConfig(num_blocks=256, max_model_len=200, max_num_seqs=16, max_num_batched_tokens=96)
        model = ModelExecutor(extent.shape, dtype=extent.dtype, weights=weights("cpu"), recorder=called)
        return EngineSetup("cpu", model, limits, ("wall",))
    return engines.cuda(asdict(extent.shape), weights=weights(device.name), max_model_len=4096, max_num_seqs=64)


def _machine_name(device: Device) -> str:
    found = "" if device.interpreted else torch.cuda.get_device_name().lower()
    return next((name for name in NAMES if name in found), "unknown")


# ---- running ----


def served(
    device: Device, policy: Policy, requests: list[EngineRequest], *, limits: EngineConfig | None = None,
    invariant: bool = False, eager: bool = False, kind: str | None = None,
) -> tuple[list[list[int]], RunTables]:  # fmt: skip
    """Run the requests to their ends; their tokens, and the tables."""
    config = limits or extents(device).limits
    recorder = Recorder(Measurement(config.max_num_seqs, config.num_blocks))
    model = executor(device, invariant=invariant, eager=eager, kind=kind)
    with closing(Engine(policy, model, ListSource(requests), config, WallClock(), recorder)) as engine:
        engine.run()
    return [request.output_token_ids for request in requests], recorder.close(backlog_end=0, counters={})


def executor(device: Device, *, invariant: bool = False, eager: bool = False, kind: str | None = None) -> ModelExecutor:
    extent = extents(device)
    return ModelExecutor(
        extent.shape, dtype=extent.dtype, device=device.name, weights=weights(device.name),
        recorder=None if eager else recorder(device), max_model_len=extent.limits.max_model_len,
        backend=backend(device, invariant, kind),
    )  # fmt: skip


def recorder(device: Device) -> StepRecorder:
    if device.name == "cuda":
        return CudaGraphRecorder(torch.device(device.name))
    return called_once if device.dataless else called


def called_once(steps: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """As they are captured, so they are called: no batch will ever come."""
    for step in steps:
        step()
    return steps


def backend(device: Device, invariant: bool, kind: str | None) -> Backend:
    if kind is not None:
        return quantised_gpu(device.ops, torch.device(device.name), DTYPES[extents(device).dtype], kind)
    return invariant_gpu(device.ops) if invariant else Backend(device.ops, plain, RaggedBatch.of)


@lru_cache(maxsize=1)
def weights(name: str) -> Weights:
    """Seeded, drawn where they are used: eight billion numbers take a CPU minutes."""
    extent = extents(Device(name))
    return random_weights(extent.shape, 0, DTYPES[extent.dtype], torch.device(name))


def trace(device: Device) -> list[EngineRequest]:
    """Requests whose prompts begin alike and that together need several times the blocks."""
    count, shared, own, output, apart_ms = extents(device).trace
    vocab, draw = extents(device).shape.vocab_size, random.Random(0)
    system = [draw.randrange(3, vocab) for _ in range(shared)]
    requests = []
    for i in range(count):
        prompt = system + [draw.randrange(3, vocab) for _ in range(draw.randint(own // 8 + 1, own))]
        requests.append(_request(i, i * apart_ms * 1_000_000, prompt, draw.randint((output + 3) // 4 + 2, output)))
    return requests


def _request(number: int, arrival_ns: int, prompt: list[int], output: int) -> EngineRequest:
    return EngineRequest(f"r{number}", arrival_ns, len(prompt), TokenContent(prompt), recorded_output_tokens=output)
