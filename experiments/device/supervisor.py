"""Runs the sections of a check, each in a process of its own, so that one that hangs or dies costs itself alone.

Processes are forked from a server that has imported what all of them need and holds no device; this process imports
none of it. The summary is written anew after each section.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from schedlab.experiments.device import machine, process
from schedlab.experiments.device.process import Task
from schedlab.experiments.device.rows import Row
from schedlab.experiments.device.sections import Section

SUMMARY = "device_check.json"
COMPILE = Section("compile", f"{__package__}.compiling:compile_share", 120)
PRELOADED = (f"{__package__}.preloaded",)
GRACE_S = 10.0
"""Between a process's own limit, at which it says where it was, and its end from outside."""
LOG_BYTES = 8 << 20


@dataclass
class Supervisor:
    """`seconds`: no section begins after so many, and one that runs then ends. `preloaded` are modules."""

    folder: Path
    device: str
    seconds: float = math.inf
    preloaded: tuple[str, ...] = PRELOADED
    skipped: list[str] = field(default_factory=list)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(self.preloaded))

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, sections: Iterable[Section]) -> None:
        for section in sections:
            if self.elapsed_s > self.seconds:
                self.skipped.append(section.name)
            else:
                self.together([(section, ())])
            self.summarise()

    def compile(self, sections: tuple[Section, ...], processes: int) -> None:
        """What `sections` will launch, each process another share of it."""
        shares = [replace(COMPILE, name=f"compile {number + 1}/{processes}") for number in range(processes)]
        self.together([(share, (sections, number, processes)) for number, share in enumerate(shares)])

    def together(self, sections: list[tuple[Section, tuple[Any, ...]]]) -> None:
        """Run these at the same time, each with its arguments, and wait for all."""
        began = self.elapsed_s
        running = [(section, *self._start(section, arguments)) for section, arguments in sections]
        for section, started, seconds in running:
            started.join(None if math.isinf(seconds) else max(0.0, seconds + GRACE_S - (self.elapsed_s - began)))
            if started.exitcode is None:
                started.kill()
                started.join()
            self._close(section, started.exitcode, seconds, self.elapsed_s - began)

    def _start(self, section: Section, arguments: tuple[Any, ...]) -> tuple[ForkServerProcess, float]:
        seconds = min(section.seconds, max(1.0, self.seconds - self.elapsed_s))
        task = Task(section, self.device, self.folder, seconds, arguments)
        started = self._context.Process(target=process.run, args=(task,), name=section.name)
        started.start()
        return started, seconds

    def _close(self, section: Section, status: int | None, limit: float, took: float) -> None:
        ended = _how(status, limit, took)
        self.sections[section.name] = {"seconds": round(took, 1), "ended": ended}
        rows = process.reported(self.folder)
        if status and not any(row["section"] == section.name and row["what"] == "failed" for row in rows):
            process.report(self.folder, Row.failed(section.name, f"{ended}; see {process.LOG}"))
        _shorten(self.folder / process.LOG)

    def summarise(self) -> None:
        """Replaced whole, so that it can be read at any time."""
        report = {
            "machine": machine.read(self.folder), "seconds": round(self.elapsed_s, 1), "skipped": self.skipped,
            "sections": self.sections, "rows": list(process.reported(self.folder)),
        }  # fmt: skip
        written = self.folder / f"{SUMMARY}.tmp"
        written.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        written.replace(self.folder / SUMMARY)

    @property
    def missed(self) -> bool:
        """Whether a demand was missed or a section failed."""
        return any(row["ok"] is False for row in process.reported(self.folder))


def _how(status: int | None, limit: float, took: float) -> str:
    if status == 0:
        return "by itself"
    if took >= limit:
        return f"at its limit of {limit:.0f} s"
    if status is not None and status < 0:
        return f"by {signal.Signals(-status).name} after {took:.1f} s"
    return f"with status {status} after {took:.1f} s"


def _shorten(log: Path) -> None:
    """The end of a log says most; a folder of results stays small."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        with log.open("rb") as file:
            file.seek(-LOG_BYTES, os.SEEK_END)
            end = file.read()
        log.write_bytes(b"... (cut)\n" + end)
