"""`schedlab roofline`: four typical steps on a machine, what bounds each of their parts, and what would change that.

Where this machine is the one modelled, the same situations are measured on its engine as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from schedlab.experiments.engines import EngineSetup, cost_dtype, model_preset
from schedlab.experiments.studies.grid import Cell
from schedlab.experiments.studies.measuring import Bench
from schedlab.framework.cost.estimate import Estimate, Timed, estimate
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import GIB, CostExecutor
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.windows import Window
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console
    from rich.table import Table

PASSES = 5
WIDTH = 110
"""Characters of a line where no terminal says how many it has."""
MEASURED_SIZES = {"prompt_tokens": 1024, "context_tokens": 512, "batch_size": 16}
"""Where steps are measured, sizes that a CPU gets through in seconds."""
TOLERATED_RATIO = 1.5
"""Measured over modelled time beyond which (or below its inverse) the roofline does not explain a step."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Situation:
    """A step of one prompt (`start` tokens cached, `count` computed), or of `num_decodes` sequences of `context`."""

    name: str
    start: int = 0
    count: int = 0
    num_decodes: int = 0
    context: int = 0

    def work(self, window: Window = None) -> Work:
        if self.count:
            return Work.prefill(self.start, self.count, window=window)
        return Work.total([Work.decode(self.context, window)] * self.num_decodes)

    @property
    def description(self) -> str:
        if not self.count:
            return f"{self.num_decodes} × decode at {self.context:,} tokens of context"
        return f"prefill of {self.count:,} tokens" + (f" after {self.start:,} cached ones" if self.start else "")


def situations(
    executor: CostExecutor, prompt_tokens: int, cached_tokens: int, context_tokens: int, batch_size: int
) -> tuple[Situation, ...]:
    """The four situations; the large batch is of as many sequences as fit into memory, at most `batch_size`."""
    if not 0 < cached_tokens < prompt_tokens:
        raise ConfigError(f"cached_tokens: expected 1 to {prompt_tokens - 1}, found {cached_tokens}")
    fitting = executor.cache_bytes() // (context_tokens * executor.roofline.kv_bytes_per_token)
    return (
        Situation("long uncached prompt", count=prompt_tokens),
        Situation("one decoding sequence", num_decodes=1, context=context_tokens),
        Situation("large decode batch", num_decodes=max(min(batch_size, fitting), 1), context=context_tokens),
        Situation("mostly cached prompt", start=cached_tokens, count=prompt_tokens - cached_tokens),
    )


def roofline(
    model: ModelConfig,
    hardware: Hardware,
    *,
    weight_dtype: str = "bf16",
    kv_cache_dtype: str = "auto",
    tensor_parallel: int = 1,
    expert_parallel: int = 1,
    gpu_memory_utilization: float = 0.9,
    prompt_tokens: int | None = None,
    cached_tokens: int | None = None,
    context_tokens: int | None = None,
    batch_size: int = 128,
    measured_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Parts, bounds and what-ifs of the four situations as plain data (seconds, bytes, FLOPs).

    Defaults: prompts of 8,192 tokens, 15/16 of them cached, contexts of 2,048, all within the model's limit.
    `measured_s` puts measured step times beside the modelled ones, by situation name.
    """
    executor = CostExecutor(
        model, hardware, weight_dtype=weight_dtype, kv_cache_dtype=kv_cache_dtype, tensor_parallel=tensor_parallel,
        expert_parallel=expert_parallel, gpu_memory_utilization=gpu_memory_utilization,
    )  # fmt: skip
    prompt = prompt_tokens or min(8192, model.max_position_embeddings)
    cached = cached_tokens or prompt * 15 // 16
    context = context_tokens or min(2048, model.max_position_embeddings)
    line = executor.roofline
    measured = measured_s or {}
    return {
        "hardware": hardware.name,
        "weight_dtype": line.weight_dtype,
        "kv_cache_dtype": line.kv_cache_dtype,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "weight_bytes": line.weight_bytes,
        "kv_bytes_per_token": line.kv_bytes_per_token,
        "context_tokens": context,
        "kv_bytes_of_context": context * line.kv_bytes_per_token,
        "windowed_kv_bytes_of_context": line.windowed_kv_bytes(context),
        "cache_bytes": executor.cache_bytes(),
        "ridge": hardware.ridge(line.activation_dtype),
        "situations": [
            _situation(situation, line, hardware, measured.get(situation.name))
            for situation in situations(executor, prompt, cached, context, batch_size)
        ],
    }


def _situation(situation: Situation, line: Roofline, hardware: Hardware, measured_s: float | None) -> dict[str, Any]:
    work = situation.work(line.window)
    step = estimate(line, hardware, work)
    peaks = {dtype: 2 * peak for dtype, peak in hardware.peak_tflops.items()}
    compute = estimate(line, replace(hardware, peak_tflops=peaks), work)
    bandwidth = estimate(line, replace(hardware, memory_gb_s=2 * hardware.memory_gb_s), work)
    return {
        "name": situation.name,
        "description": situation.description,
        "work": asdict(work),
        "parts": [_part(timed, step) for timed in step.parts if timed.seconds],
        "overhead_s": step.overhead_s,
        "step": _step(step),
        "double_compute_s": compute.seconds,
        "double_bandwidth_s": bandwidth.seconds,
        "measured_s": measured_s,
        "explained": None if measured_s is None else _explains(step.seconds, measured_s),
    }


def _part(timed: Timed, step: Estimate) -> dict[str, Any]:
    part = timed.part
    return {
        "name": part.name,
        "flops": part.flops,
        "bytes": part.bytes,
        "intensity": part.intensity,
        "seconds": timed.seconds,
        "share": timed.seconds / step.seconds,
        "bound": timed.bound,
    }


def _step(step: Estimate) -> dict[str, Any]:
    flops, moved = (sum(getattr(timed.part, name) for timed in step.parts) for name in ("flops", "bytes"))
    return {
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "seconds": step.seconds,
        "bound": step.bound,
        "shares": {bound: seconds / step.seconds for bound, seconds in step.shares_s.items()},
    }


def _explains(modelled_s: float, measured_s: float) -> bool:
    return 1 / TOLERATED_RATIO <= measured_s / modelled_s <= TOLERATED_RATIO


# ---- showing ----


def render(result: dict[str, Any], console: Console | None = None) -> None:
    """Print what `roofline` returned: a table of parts for each step, then one of the steps."""
    from rich.console import Console

    console = console or Console()
    gib = {name: result[f"{name}_bytes"] / GIB for name in ("weight", "cache")}
    console.print(
        f"{result['tensor_parallel']} × {result['hardware']}, ridge {result['ridge']:.0f} FLOP/byte; "
        f"weights {gib['weight']:.2f} GiB in {result['weight_dtype']}; {gib['cache']:.2f} GiB left for a KV cache of "
        f"{result['kv_bytes_per_token']:,} bytes a token in {result['kv_cache_dtype']}",
        highlight=False,
    )
    uniform, windowed = (result[f"{name}_of_context"] for name in ("kv_bytes", "windowed_kv_bytes"))
    if windowed < uniform:
        console.print(
            f"a sequence of {result['context_tokens']:,} tokens holds {uniform / MIB:,.0f} MiB, for every layer keeps "
            f"every token; layers that kept no more than their window would hold {windowed / MIB:,.0f} MiB",
            highlight=False,
        )
    for situation in result["situations"]:
        console.print(_parts_table(situation))
    console.print(_steps_table(result["situations"]))


def _parts_table(situation: dict[str, Any]) -> Table:
    from rich.table import Table

    step = situation["step"]
    table = Table("part", title=f"{situation['name']}: {situation['description']}", title_justify="left")
    for heading in ("GFLOP", "MB", "FLOP/byte", "ms", "share"):
        table.add_column(heading, justify="right")
    table.add_column("bound")
    for part in situation["parts"]:
        table.add_row(part["name"], *_figures(part), f"{part['share']:.1%}", part["bound"])
    overhead_ms, share = situation["overhead_s"] * 1e3, step["shares"]["overhead"]
    table.add_row("overhead", "", "", "", f"{overhead_ms:,.3f}", f"{share:.1%}", "overhead", end_section=True)
    table.add_row("step", *_figures(step), "100.0%", step["bound"], style="bold")
    return table


def _figures(row: dict[str, Any]) -> tuple[str, str, str, str]:
    flops, moved, milliseconds = row["flops"] / 1e9, row["bytes"] / 1e6, row["seconds"] * 1e3
    return f"{flops:,.2f}", f"{moved:,.1f}", f"{row['intensity']:,.1f}", f"{milliseconds:,.3f}"


def _steps_table(situations: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    measured = any(situation["measured_s"] is not None for situation in situations)
    table = Table("step", "bound", title="what bounds each step, and what would make it faster", title_justify="left")
    for heading in ["ms", "2× FLOP/s", "2× byte/s", *(["measured", "÷ model"] if measured else [])]:
        table.add_column(heading, justify="right")
    for situation in situations:
        step = situation["step"]
        faster = [f"{step['seconds'] / situation[key]:.2f}×" for key in ("double_compute_s", "double_bandwidth_s")]
        bound = f"{step['bound']} {step['shares'][step['bound']]:.0%}"
        cells = [situation["name"], bound, f"{step['seconds'] * 1e3:,.3f}", *faster]
        table.add_row(*cells, *(_measured(situation) if measured else []))
    return table


def _measured(situation: dict[str, Any]) -> list[str]:
    if (seconds := situation["measured_s"]) is None:
        return ["-", "-"]
    ratio = f"{seconds / situation['step']['seconds']:.2f}"
    return [f"{seconds * 1e3:,.3f}", ratio if situation["explained"] else f"{ratio} unexplained"]


# ---- the command ----


@dataclass(frozen=True)
class RooflineOptions:
    """The keys of `roofline`; sizes that are None are left to the command."""

    prompt_tokens: int | None
    cached_tokens: int | None
    context_tokens: int | None
    batch_size: int | None
    measure: bool

    def sizes(self, measured: bool) -> dict[str, Any]:
        names = ("prompt_tokens", "cached_tokens", "context_tokens", "batch_size")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {**MEASURED_SIZES, **given} if measured else given


def roofline_job(config: DictConfig) -> None:
    """Show the four situations, and write them to roofline.json in Hydra's output directory."""
    from rich.console import Console

    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_arguments

    keys = compose.resolve(config.roofline)
    check_arguments("roofline", keys, RooflineOptions)
    options = RooflineOptions(**keys)
    shape, extras = model_preset(compose.resolve(config.model))
    hardware = compose.build(config.hardware, "hardware")
    engine = compose.choices(["engine"]).get("engine", "")
    measured = options.measure and (engine == "cuda" or engine == hardware.name == "cpu")
    if engine == "virtual":
        names = ("weight_dtype", "kv_cache_dtype", "tensor_parallel", "expert_parallel")
        terms = {name: config.engine[name] for name in names}
    elif measured:
        terms = {"weight_dtype": cost_dtype(config.engine.dtype)}
    else:
        terms = {"weight_dtype": cost_dtype(shape.dtype, "model.dtype")}
    terms["weight_dtype"] = extras.get("weight_dtype") or terms["weight_dtype"]
    terms["gpu_memory_utilization"] = config.engine.gpu_memory_utilization
    sizes, times = options.sizes(measured), None
    if measured:
        executor = CostExecutor(shape, hardware, **terms)
        times = measure(compose.build(config.engine, "engine"), shown_situations(executor, sizes), config.clock)
    result = roofline(shape, hardware, measured_s=times, **terms, **sizes)
    render(result, Console(width=None if sys.stdout.isatty() else WIDTH))
    path = compose.output_directory() / "roofline.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def shown_situations(executor: CostExecutor, sizes: dict[str, Any]) -> tuple[Situation, ...]:
    """What `roofline` will show under the same sizes."""
    prompt = sizes["prompt_tokens"]
    return situations(
        executor, prompt, sizes.get("cached_tokens", prompt * 15 // 16), sizes["context_tokens"], sizes["batch_size"]
    )


def measure(setup: EngineSetup, wanted: Sequence[Situation], clock: str = "auto") -> dict[str, float]:
    """Seconds of each situation's step on the real engine, by name: the median of some passes over them."""
    block_size = setup.config.block_size
    cells = [cell_of(situation, block_size) for situation in wanted]
    budget = max(work.tokens for cell in cells for work in cell.works)
    sequences = max(len(cell.prompts) for cell in cells)
    limits = replace(
        setup.config,
        max_num_batched_tokens=max(budget, setup.config.max_num_batched_tokens),
        max_num_seqs=max(sequences, setup.config.max_num_seqs),
    )
    times: dict[str, list[int]] = {}
    with closing(Bench(replace(setup, config=limits), cells, clock)) as bench:
        for _ in range(PASSES):
            last = {step.name: step.point.duration_ns for step in bench.run()}
            for name, duration_ns in last.items():
                times.setdefault(name, []).append(duration_ns)
    return {name: median(durations) / 1e9 for name, durations in times.items()}


def cell_of(situation: Situation, block_size: int) -> Cell:
    """The requests that come to a situation; their last step is it."""
    cell = Cell(situation.name, block_size)
    if situation.count:
        (prompt,) = cell.add(situation.start + situation.count)
        if situation.start:
            cell.step((prompt, situation.start))
        cell.step((prompt, situation.count))
    else:
        cell.build_up(cell.add(*[situation.context - 1] * situation.num_decodes), max(situation.context - 1, 1024))
        cell.step(decode=True)
    return cell
