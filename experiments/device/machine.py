"""What a check ran on: card, driver and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from schedlab.experiments.device.rows import Device, Row

FILE = "machine.json"


def describe(device: Device) -> Iterator[Row]:
    """A section that writes `machine.json` into its folder; "device" is null where a GPU is expected and none found."""
    import numpy
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "numpy": numpy.__version__}
    facts: dict[str, Any] = {"device": None, "python": platform.python_version(), **versions}
    if device.interpreted:
        facts["device"] = "the interpreter"
    elif torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        facts |= {
            "device": card.name, "driver": _driver(), "cuda": torch.version.cuda,
            "capability": 10 * card.major + card.minor, "memory_bytes": card.total_memory,
            "processors": card.multi_processor_count,
        }  # fmt: skip
    facts["host_processors"] = os.cpu_count()
    device.keep(FILE, json.dumps(facts, indent=1) + "\n")
    yield from ()


def read(folder: Path) -> dict[str, Any]:
    """Empty if it was never written."""
    path = folder / FILE
    facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return facts


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None
