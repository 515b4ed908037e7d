"""What a sweep begins and ends with: which of its runs are done, and the table of all of them, from their files."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from schedlab.experiments.analysis.compare import show_runs
from schedlab.experiments.analysis.rejections import why_nothing_was_served
from schedlab.experiments.analysis.table import SIDE_BY_SIDE, Comparison
from schedlab.experiments.run.messages import drawing, short
from schedlab.experiments.sweep.limits import what_kept_the_limits
from schedlab.experiments.sweep.resume import list_owners


class ComparisonAtEnd(Callback):
    """Ends every sweep with a table built from its files: results kept in memory do not reach the parent process.

    It begins with a note of what is there, which with `resume` is also told.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        done = list_owners(Path(config.hydra.sweep.dir))
        if config.get("resume"):
            print(f"resume: {done} finished {'run' if done == 1 else 'runs'} in {config.hydra.sweep.dir}")

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        try:
            succeeded = compare_sweep(Path(config.hydra.sweep.dir), plots=config.plots)
        except Exception:
            traceback.print_exc()
            succeeded = False
        if not succeeded:
            raise SystemExit(1)  # not an Exception, which Hydra would turn into a warning


def compare_sweep(directory: Path, plots: bool) -> bool:
    """Print and write the table of a sweep, from what its jobs left in files; False if one failed or none served."""
    comparison = Comparison.read([directory])
    if not comparison.runs:  # a sweep of another command
        return True
    comparison.write(directory)
    show_runs(comparison)
    if plots:
        draw(comparison, directory)
    if told := what_kept_the_limits(comparison.runs):
        print(told)
    print(f"in {short(directory)}")
    if comparison.failed:
        return False
    return not all(why_nothing_was_served(run.tables) for run in comparison.runs)


def draw(comparison: Comparison, directory: Path) -> None:
    """Curves against the numbers that vary, and latencies over each other where they can be told apart; or why not."""
    from schedlab.experiments.analysis import curves
    from schedlab.experiments.analysis.plots import save_comparison

    logged = {name: run.tables for name, run in comparison.complete.items() if run.tables.result["record"] == "full"}
    with drawing(directory):
        for found in curves.of_sweep(comparison):
            curves.save(found, directory / "plots")
    if 1 < len(logged) <= SIDE_BY_SIDE:
        with drawing(directory):
            save_comparison(logged, directory / "plots")
    elif len(comparison.complete) > 1:
        told = f"{len(logged)} runs with logs, and 2 to {SIDE_BY_SIDE} can be told apart"
        print(f"no latencies over each other: {told}; `schedlab report` draws variants")
