"""`schedlab calibrate`: measures an engine's own steps over a designed grid and fits the cost profile of this machine.

The real engine runs the grid, driven by a script in place of a policy, so that a duration reaches from one boundary to
the next with all that happens between. Knows how to run the grid and to judge the fit; the cells are in grid.py, the
fit is in framework/cost/fit.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from schedlab.experiments.engines import EngineSetup
from schedlab.experiments.grid import GIB, Cell, Extent, Script, make_cells, swapped_bytes
from schedlab.framework.clock import Clock
from schedlab.framework.cost.fit import Point, Profile, fit_profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.metrics import Measurement
from schedlab.framework.record import Recorder
from schedlab.framework.request import EngineRequest
from schedlab.framework.source import ListSource

if TYPE_CHECKING:
    from omegaconf import DictConfig

MIN_PASSES = 2
TOLERATED, TOLERATED_OF_REPEATS = 0.05, 1.5
"""Held-out steps should be modelled within 5 %, or within so many times what repeats of one step differ by."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The executor's names of dtypes, and the cost model's."""


class Measured(NamedTuple):
    """A step that was measured, and the place of its cell in the grid."""

    cell: int
    name: str
    point: Point


class LastStep(Recorder):
    """Remembers what the last step was, and no more. `last`: tokens, decodes, prefills, context, copied blocks."""

    last: tuple[int, ...] = ()

    def step(self, index: int, repeat: int, now_ns: int, duration_ns: int, *figures: Any) -> None:  # type: ignore[override]
        prefill_tokens, decode_tokens, prefills, decodes, context = figures[:5]
        self.last = (prefill_tokens + decode_tokens, decodes, prefills, context, figures[9])

    def request(self, request: EngineRequest) -> None:
        pass


class Bench:
    """An engine that runs a grid, pass after pass. The first pass, in which everything is warmed up, is not measured.

    `pass_s`: wall seconds of the last pass.
    """

    def __init__(self, setup: EngineSetup, extent: Extent, clock: str = "auto") -> None:
        extent.check(setup.config)
        self.cells = make_cells(extent, setup.config.block_size)
        self._block_bytes = setup.executor.block_bytes(setup.config.block_size)
        host = swapped_bytes(self.cells, self._block_bytes) / GIB
        config = replace(setup.config, enable_prefix_caching=False, swap_space_gib=1.01 * host)
        self._script = Script()
        self._recorder = LastStep(Measurement(config.max_num_seqs, config.num_blocks))
        self._engine = Engine(
            self._script, setup.executor, ListSource([]), config, setup.clock(clock), self._recorder
        )
        self._names = count()
        self._passes = 0
        self._works: list[Work] = []
        self.pass_s = 0.0
        self.run()

    def run(self) -> list[Measured]:
        """One pass over all cells, in an order of its own, so that a machine that drifts does not bend the fit."""
        began = time.perf_counter()
        order = random.Random(self._passes).sample(range(len(self.cells)), len(self.cells))
        self._passes += 1
        measured = [Measured(at, self.cells[at].name, point) for at in order for point in self._measure(self.cells[at])]
        self.pass_s = time.perf_counter() - began
        return measured

    def _measure(self, cell: Cell) -> Iterator[Point]:
        engine = self._engine
        requests = cell.requests(self._names)
        self._script.follow(cell, requests)
        for request in requests:
            engine.submit(request)
        before = engine.now_ns
        for work, copies in zip(cell.works, cell.copies, strict=True):
            engine.step()
            now = engine.now_ns
            planned = (work.tokens, work.decodes, work.prefills, work.decode_keys + work.prefill_keys, copies)
            assert planned == self._recorder.last, f"planned {planned}, ran {self._recorder.last}"
            yield Point(replace(work, copied_bytes=copies * self._block_bytes), now - before)
            before = now
        assert not engine.num_unfinished, "a cell ends with its requests"
