"""What other projects' schedulers decided on the works of works.py, kept as text: `decisions/REFEREE.txt.xz`.

A file begins with a line that names the referee and its version; each run is a line `# {setting}` in JSON and the
decisions below it.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import works

FOLDER = Path(__file__).parent / "decisions"


@dataclass(frozen=True)
class Setting:
    """What a run was made of."""

    kind: str
    seed: int
    blocks: int
    order: str = "fcfs"
    caching: bool = False


def save(name: str, version: str, runs: Iterable[tuple[Setting, list]]) -> None:
    parts = [version]
    for setting, steps in runs:
        parts += [f"# {json.dumps(asdict(setting))}", works.written(steps)]
    packed = lzma.compress("\n".join([*parts, ""]).encode(), preset=9)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt.xz").write_bytes(packed)


def load(name: str) -> tuple[str, dict[Setting, str]]:
    """The referee's version, and the text of its decisions by setting."""
    text = lzma.decompress((FOLDER / f"{name}.txt.xz").read_bytes()).decode()
    version, *parts = text.split("\n# ")
    runs = {}
    for part in parts:
        head, _, steps = part.partition("\n")
        runs[Setting(**json.loads(head))] = steps.rstrip("\n")
    return version, runs


def has_empty_step(theirs) -> bool:
    return any(not grants for grants, _ in theirs)
