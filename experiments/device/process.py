"""One section in a process of its own: each row is printed and in the file as soon as it is known.

The process ends by itself at its time limit, with a trace of where it was, and when the one that started it is gone.
"""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedlab.experiments.device.rows import COPY, PRODUCT, Device, Row
from schedlab.experiments.device.sections import Section, resolve

ROWS, LOG, PROFILE = "rows.jsonl", "log.txt", "profile.json"


@dataclass(frozen=True, slots=True)
class Task:
    """`section` on the device `name`, its files in `folder`; `seconds` may be infinite. `arguments` of its work, beside
    the device."""

    section: Section
    name: str
    folder: Path
    seconds: float
    arguments: tuple[Any, ...] = ()


def run(task: Task) -> None:
    """The body of the process."""
    log = os.open(task.folder / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 2)
    guard(task.seconds)
    device = Device(task.name, task.folder)
    device.copy_tb_s, device.matmul_tflops = ceilings(task.folder)
    try:
        work = resolve(task.section.work)
        if torch := sys.modules.get("torch"):  # where the section needs it
            torch.manual_seed(0)
        for row in work(device, *task.arguments):
            report(task.folder, row)
    except Exception as failure:
        traceback.print_exc()
        first_line = (str(failure).splitlines() or [""])[0]
        report(task.folder, Row.failed(task.section.name, f"{type(failure).__name__}: {first_line}"))
        sys.exit(1)
    finally:
        if device.profile is not None:
            device.profile.save(task.folder / PROFILE)


def guard(seconds: float) -> None:
    """End this process at its limit, whatever holds the interpreter, and with the process that started it."""
    if math.isfinite(seconds):
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process of its own"
    parent.join()
    os._exit(1)


def report(folder: Path, row: Row) -> None:
    """One write a row, so that whoever ends this process leaves whole ones."""
    print(row.line(), flush=True)
    file = os.open(folder / ROWS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(row.as_dict()) + "\n").encode())
    finally:
        os.close(file)


def reported(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows that are there by now."""
    if (path := folder / ROWS).exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def ceilings(folder: Path) -> tuple[float, float]:
    """TB/s and TFLOP/s that a section before this one measured; NaN where it did not."""
    found = {row["what"]: row["value"] for row in reported(folder) if row["section"] == "ceilings"}
    return found.get(COPY, float("nan")), found.get(PRODUCT, float("nan"))
