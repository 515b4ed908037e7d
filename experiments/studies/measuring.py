"""Runs the cells of a grid on an engine and measures their steps, pass after pass or between the steps of another run.

The real engine runs the cells as it is set up, driven by a script in place of a policy, so that a duration reaches from
one boundary to the next with all that happens between. The cells are in grid.py; what becomes of the measurements, in
calibrate.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from schedlab.experiments.engines import GIB, EngineSetup, settled_heap
from schedlab.experiments.studies.grid import Cell, Extent, Script, make_cells, swapped_blocks
from schedlab.framework.cost.fit import Point
from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow
from schedlab.framework.source import ListSource

MIN_PASSES = 2
Say = Callable[[str], Any]
"""What takes lines about how it goes."""


class MeasuredStep(NamedTuple):
    """A step that was run, and the cell that it belongs to."""

    cell: int
    name: str
    point: Point


class LastStep(Recorder):
    """Records as a run does, and remembers what its last step was. `last`: tokens, requests, context, copied blocks."""

    last: tuple[int, ...] = ()

    def step(self, row: StepRow, free_block_ns: int | None = None, free_blocks_min: int | None = None) -> None:
        tokens, requests = row.prefill_tokens + row.decode_tokens, row.prefill_requests + row.decode_requests
        self.last = (tokens, requests, row.context_tokens, row.copied_blocks)
        super().step(row, free_block_ns, free_blocks_min)


class Bench:
    """An engine that runs cells, pass after pass; the first, in which everything warms up, is run at once and dropped.

    Each pass has an order of its own, so that no drift of the machine falls on the same cells. `passes`: how many are
    complete, the first one left out. `pass_s`: wall seconds of the last that `run` made.
    """

    def __init__(self, setup: EngineSetup, cells: Sequence[Cell], clock: str = "auto") -> None:
        self.cells = cells
        self.passes = -1
        self._block_bytes = setup.executor.block_bytes(setup.config.block_size)
        config = replace(setup.config, swap_space_gib=(swapped_blocks(cells) + 1) * self._block_bytes / GIB)
        self._script = Script()
        self._seen = LastStep(Measurement(config.max_num_seqs, config.num_blocks))
        source = ListSource([])
        self._engine = Engine(self._script, setup.executor, source, config, setup.clock(clock), self._seen)
        self._names, self._left = count(), self._shuffled()
        self.run()

    def close(self) -> None:
        self._engine.close()

    def run(self) -> list[MeasuredStep]:
        """One pass over all cells, or what is left of one."""
        began, done, measured = time.perf_counter(), self.passes, []
        while self.passes == done:
            measured += self.run_cell()
        self.pass_s = time.perf_counter() - began
        return measured

    def run_cell(self) -> list[MeasuredStep]:
        """The next cell."""
        at = self._left.pop()
        measured = [MeasuredStep(at, self.cells[at].name, point) for point in self._points(self.cells[at])]
        if not self._left:
            self.passes += 1
            self._left = self._shuffled()
        return measured

    def _shuffled(self) -> list[int]:
        return random.Random(self.passes).sample(range(len(self.cells)), len(self.cells))

    def _points(self, cell: Cell) -> Iterator[Point]:
        engine, requests = self._engine, cell.requests(self._names)
        self._script.follow(cell, requests)
        for request in requests:
            engine.submit(request)
        before = engine.now_ns
        for work, copies in zip(cell.works, cell.copies, strict=True):
            engine.step()
            now = engine.now_ns
            planned = (work.tokens, work.decodes + work.prefills, work.decode_keys + work.prefill_keys, copies)
            assert planned == self._seen.last, f"planned {planned}, ran {self._seen.last}"
            yield Point(replace(work, copied_bytes=copies * self._block_bytes), now - before)
            before = now
        assert not engine.num_unfinished, "a cell ends with its requests"


def run_grid(
    setup: EngineSetup, extent: Extent, *, passes: int, budget_s: float, clock: str = "auto", say: Say = print
) -> list[MeasuredStep]:
    """`passes` passes over the grid, fewer where more would take longer than `budget_s` seconds, but at least two."""
    extent.check(setup.config)
    if passes < MIN_PASSES:
        raise ConfigError(f"calibrate.passes: expected at least {MIN_PASSES}, found {passes}")
    measured: list[MeasuredStep] = []
    with closing(make_bench(setup, extent, clock, say)) as bench, settled_heap():
        left = budget_s - bench.pass_s
        for done in range(passes):
            if done >= MIN_PASSES and left < bench.pass_s:
                say(f"{done} of {passes} passes: another would exceed calibrate.budget_s={budget_s:g}")
                break
            measured += bench.run()
            left -= bench.pass_s
    return measured


def make_bench(setup: EngineSetup, extent: Extent, clock: str = "auto", say: Say = print) -> Bench:
    """A bench for the whole grid. ConfigError if it is too large for the engine."""
    extent.check(setup.config)
    config = setup.config
    bench = Bench(setup, make_cells(extent, config.block_size, config.enable_prefix_caching), clock)
    steps = sum(len(cell.moves) for cell in bench.cells)
    say(f"{steps} steps in {len(bench.cells)} cells, {bench.pass_s:.1f} s a pass; the first one was for warming up")
    return bench


class Between:
    """Called after each step of a run: runs cells as long as they have taken less than `share` of the run's CPU time.

    Whatever else the machine does then slows the cells as it slows the run. Only for a run whose clock counts its own
    steps and nothing between them. What is measured is appended to `measured`.
    """

    def __init__(self, bench: Bench, share: float, measured: list[MeasuredStep]) -> None:
        self.measured = measured
        self._bench = bench
        self._share = share
        self._owed_ns = 0.0
        self._since_ns = time.thread_time_ns()

    def __call__(self, engine: Engine) -> None:
        now = time.thread_time_ns()
        self._owed_ns += self._share * (now - self._since_ns)
        self._since_ns = now
        while self._owed_ns > 0:
            self.measured += self._bench.run_cell()
            self._since_ns, began = time.thread_time_ns(), self._since_ns
            self._owed_ns -= self._since_ns - began
