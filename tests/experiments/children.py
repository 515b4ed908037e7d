"""What tests hand to processes of their own; a module by itself, so that these can import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def takes_ctrl_c() -> None:
    """Called in a child before its program: SIGINT ends it even where whoever runs the tests ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
