"""Check and measure kernels and engine on this machine's GPU: correctness, ceilings, sweeps; a table, JSON to a folder.

    python -m schedlab.experiments.device_check --out DIR        (with src on PYTHONPATH where nothing is installed)

Needs torch, triton and numpy alone, and no network. `--interpret` runs the same on small shapes by Triton's
interpreter, where times mean nothing. Every section is a process of its own with a time limit; one that fails, hangs or
dies is a row that says so, and the others still run. Rows are in DIR/rows.jsonl as soon as they are known, the summary
in DIR/device_check.json after each section. Exit status 1 if a demand was missed or a section failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from schedlab.experiments.device import machine
from schedlab.experiments.device.rows import HEADER
from schedlab.experiments.device.sections import SECTIONS, Section
from schedlab.experiments.device.supervisor import Supervisor

PROCESSES = 16
"""That compile at a time; one takes about a second and 400 MB for a kernel."""
MACHINE = Section("machine", "schedlab.experiments.device.machine:describe", 90)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sections = chosen(options)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, by the processes that are started
    if options.out is None:
        with tempfile.TemporaryDirectory(prefix="device-check-") as folder:
            return check(Path(folder), sections, options)
    options.out.mkdir(parents=True, exist_ok=True)
    if found := next(options.out.iterdir(), None):
        print(f"device_check: --out: expected an empty folder, found {found}", file=sys.stderr)
        return 2
    return check(options.out, sections, options)


def check(folder: Path, sections: list[Section], options: argparse.Namespace) -> int:
    supervisor = Supervisor(folder, "cpu" if options.interpret else "cuda", options.seconds)
    supervisor.together([(MACHINE, ())])
    found = machine.read(folder)
    if found and found["device"] is None:
        print("device_check: expected a GPU, found none; --interpret runs small shapes on the CPU", file=sys.stderr)
        return 2
    print(HEADER, flush=True)
    if not options.interpret:
        supervisor.compile(tuple(sections), min(os.cpu_count() or 1, PROCESSES))
    supervisor.run(sections)
    left_out = f"; skipped: {', '.join(supervisor.skipped)}" if supervisor.skipped else ""
    print(f"{supervisor.elapsed_s:.1f} s on {found.get('device', 'an unknown machine')}{left_out}")
    return int(supervisor.missed)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="an empty folder for rows.jsonl, device_check.json and profile.json")
    parser.add_argument("--interpret", action="store_true", help="small shapes, by Triton's interpreter, on the CPU")
    parser.add_argument("--sections", nargs="+", help="only these")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no section later, end the last one")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Section]:
    """On the interpreter without limits, for its times mean nothing."""
    known = [section.name for section in SECTIONS]
    if unknown := set(options.sections or ()) - set(known):
        raise SystemExit(f"device_check: --sections: expected some of {', '.join(known)}, found {unknown.pop()}")
    limited = [section for section in SECTIONS if not options.sections or section.name in options.sections]
    return [replace(section, seconds=math.inf) for section in limited] if options.interpret else limited


if __name__ == "__main__":
    sys.exit(main())
