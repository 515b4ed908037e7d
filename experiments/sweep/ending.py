"""What a sweep begins and ends with: which of its runs are done, and the table of all of them, from their files."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from schedlab.experiments.analysis.table import SIDE_BY_SIDE, Comparison
from schedlab.experiments.run.messages import drawing, short
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
    """Print and write the table of a sweep, from what its jobs left in files; False if any of them failed."""
    comparison = Comparison.read([directory])
    if not comparison.runs:  # a sweep of another command
        return True
    comparison.write(directory)
    comparison.show()
    drawn = {name: run.tables for name, run in comparison.complete.items() if run.tables.result["record"] == "full"}
    if plots and 1 < len(drawn) <= SIDE_BY_SIDE:
        from schedlab.experiments.analysis.plots import save_comparison

        with drawing(directory):
            save_comparison(drawn, directory / "plots")
    print(f"in {short(directory)}")
    return not comparison.failed
