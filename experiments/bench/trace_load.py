"""How fast traces load, and in how much memory: a million generated rows of each format, a process for each.

    python -m schedlab.experiments.bench.trace_load [ROWS]

Targets for a million rows: 10 s and 500 MB. CPU seconds stand beside wall seconds, which neighbours on the machine
lengthen. The Mooncake rows have as many ids as the published conversation trace has
on average (24 of 512 tokens). Peak memory is that of the whole process, interpreter and numpy included.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from schedlab import core

ROWS = 1_000_000
IDS = 24


def azure(rows: int) -> Iterator[str]:
    draw = random.Random(0)
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for row in range(rows):
        second, rest = divmod(row * 1_234_567, 10**7)
        stamp = (
            f"2023-11-{16 + second // 86_400:02d} {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        )
        yield f"{stamp}.{rest:07d},{draw.randrange(1, 8000)},{draw.randrange(1, 1000)}\n"


def burstgpt(rows: int) -> Iterator[str]:
    draw = random.Random(0)
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for row in range(rows):
        prompt, output = draw.randrange(1, 2000), draw.randrange(1, 1000)
        yield f"{row // 3},ChatGPT,{prompt},{output},{prompt + output},Conversation log\n"


def vidur(rows: int) -> Iterator[str]:
    draw = random.Random(0)
    yield "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    for row in range(rows):
        yield f"{row * 0.181:.6f},{draw.randrange(1, 8000)},{draw.randrange(1, 1000)}\n"


def mooncake(rows: int) -> Iterator[str]:
    draw, fresh = random.Random(0), 1
    for row in range(rows):
        shared = draw.randrange(IDS)
        ids = [*range(shared), *range(fresh, fresh + IDS - shared)]
        fresh += IDS - shared
        prompt = (IDS - 1) * 512 + draw.randrange(1, 513)
        yield json.dumps({"timestamp": row // 10 * 3000, "input_length": prompt, "output_length": 343, "hash_ids": ids})
        yield "\n"


FORMATS: dict[str, Callable[[int], Iterator[str]]] = {
    "azure": azure,
    "burstgpt": burstgpt,
    "vidur": vidur,
    "mooncake": mooncake,
}


def measure(path: str) -> None:
    """In a process of its own: load, and print rows, wall and CPU seconds, and peak MB."""
    from schedlab.workloads.readers import read

    wall, cpu = time.perf_counter(), time.process_time()
    rows = len(read(path))
    print(
        rows,
        time.perf_counter() - wall,
        time.process_time() - cpu,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def main(rows: int) -> None:
    table = Table("format", "rows", "file MB", "wall s", "CPU s", "rows per CPU s", "peak MB")
    with tempfile.TemporaryDirectory() as folder:
        for name, generate in FORMATS.items():
            path = Path(folder) / f"{name}.txt"
            with path.open("w") as file:
                file.writelines(generate(rows))
            command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--measure", str(path)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found, wall, cpu, megabytes = map(float, printed.split())
            size = path.stat().st_size / 1e6
            cells = f"{found:,.0f} {size:,.0f} {wall:.2f} {cpu:.2f} {found / cpu:,.0f} {megabytes:,.0f}"
            table.add_row(name, *cells.split())
            path.unlink()
    Console().print(table)
    print(f"core: {core.mode()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
