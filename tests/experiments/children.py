"""What tests hand to processes of their own, and which processes there are; a module that these can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def takes_ctrl_c() -> None:
    """Called in a child before its program: SIGINT ends it even where whoever runs the tests ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def processes_below(process: int) -> set[int]:
    """Processes whose ancestor is `process`."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    found = {process}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


class Echo:
    """Makes a job that tells its process, prints, or raises."""

    def __call__(self) -> Callable[[Any], Any]:
        return self.work

    def work(self, job: Any) -> Any:
        if job == "raise":
            raise ValueError("no")
        if job == "die":
            os._exit(3)
        print(f"job {job}")
        return os.getpid()
