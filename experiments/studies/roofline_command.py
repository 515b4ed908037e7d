"""What `schedlab roofline` does: reads the configuration, and where this machine is the one modelled, measures as well.

Knows which steps of an engine stand for the four situations; the model of them is in roofline.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from schedlab.experiments.engines import DTYPES, EngineSetup, model_preset
from schedlab.experiments.studies.grid import Cell
from schedlab.experiments.studies.measuring import Bench
from schedlab.experiments.studies.roofline import Situation, render, roofline, situations
from schedlab.framework.cost.model import CostExecutor

if TYPE_CHECKING:
    from omegaconf import DictConfig

PASSES = 5
WIDTH = 110
"""Characters of a line where no terminal says how many it has."""
MEASURED_SIZES = {"prompt_tokens": 1024, "context_tokens": 512, "batch_size": 16}
"""Where steps are measured, sizes that a CPU gets through in seconds."""


@dataclass(frozen=True)
class Options:
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
    check_arguments("roofline", keys, Options)
    options = Options(**keys)
    shape, extras = model_preset(compose.resolve(config.model))
    hardware = compose.build(config.hardware, "hardware")
    engine = compose.choices(["engine"]).get("engine", "")
    measured = options.measure and (engine == "cuda" or engine == hardware.name == "cpu")
    terms: dict[str, Any] = {"weight_dtype": DTYPES[config.engine.dtype if measured else shape.dtype]}
    if engine == "virtual":
        terms = {name: config.engine[name] for name in ("weight_dtype", "kv_cache_dtype", "tensor_parallel")}
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
    bench = Bench(replace(setup, config=limits), cells, clock)
    times: dict[str, list[int]] = {}
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
