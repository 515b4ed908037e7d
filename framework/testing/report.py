"""What the kit found, a verdict a property. Knows how it reads and where failures are written; judges nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["pass", "bound", "declared", "fail", "untested"]

PROPERTIES = {
    "rules": "keeps the rules of the step",
    "stalls": "grants or idles while there is work",
    "audit": "the books hold after every step",
    "streams": "every request gets its own tokens",
    "livelock": "work gets further",
    "churn": "nobody is preempted again and again",
    "hold": "a hold decides what asking would",
    "determinism": "same trace, same decisions",
    "inputs": "reads only what it may",
    "cache": "sees the prefix cache change",
    "waiting": "everybody ends under steady load",
    "gap": "who decodes goes on under steady load",
    "memory": "forgets who has ended",
    "cost": "microseconds a decision",
}
"""Every property by its name, in the order in which they are shown."""
NOT_LOOKED_AT = (
    "turns of sessions, whether decision time grows as it may, whether goodput is good, numpy's clock, what native "
    "code reads, more than 160 requests in an engine"
)
"""What no property speaks of; said in every report."""


@dataclass(frozen=True)
class Verdict:
    """`pass`, `bound` (what was measured), `declared` (unbounded by design), `fail`, or `untested` and why.

    `program` is Python text that shows a failure again.
    """

    name: str
    status: Status
    detail: str
    program: str | None = None

    def __str__(self) -> str:
        status = self.status.upper() if self.status == "fail" else self.status
        return f"{self.name:<12} {status:<9} {PROPERTIES[self.name]}: {self.detail}"


@dataclass(frozen=True)
class Report:
    """Verdicts on one policy in the order of PROPERTIES."""

    policy: str
    verdicts: tuple[Verdict, ...]

    def __getitem__(self, name: str) -> Verdict:
        return next(verdict for verdict in self.verdicts if verdict.name == name)

    @property
    def failures(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.status == "fail"]

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        counts = dict.fromkeys(("pass", "bound", "declared", "fail", "untested"), 0)
        for verdict in self.verdicts:
            counts[verdict.status] += 1
        summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return "\n".join([f"{self.policy}: {summary}", *map(str, self.verdicts), f"not looked at: {NOT_LOOKED_AT}"])

    def write(self, directory: Path) -> list[Path]:
        """A program for each failure that has one, `reproduce_<property>.py`; returns their paths."""
        written = []
        for verdict in self.failures:
            if verdict.program is not None:
                directory.mkdir(parents=True, exist_ok=True)
                path = directory / f"reproduce_{verdict.name}.py"
                path.write_text(verdict.program, encoding="utf-8")
                written.append(path)
        return written
