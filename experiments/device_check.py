"""Check and measure kernels and engine on this machine's GPU: correctness, ceilings, sweeps; a table, JSON to a folder.

    python -m schedlab.experiments.device_check --out DIR        (with src on PYTHONPATH where nothing is installed)

Needs torch, triton and numpy alone, and no network. `--interpret` runs the same on small shapes by Triton's
interpreter, where times mean nothing. A section that fails is a row that says so, and the others still run; sections
that the time does not allow are named. Exit status 1 if a demand was missed or a section failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedlab.experiments.device.rows import Device, Row

Section = Callable[["Device"], Iterator["Row"]]


def sections() -> dict[str, Section]:
    """In the order of their worth: what is cut when time is short comes last."""
    from schedlab.experiments.device import engine_checks, kernel_checks, kernel_speeds

    return {
        "ceilings": kernel_speeds.ceilings,
        "correctness": kernel_checks.correctness,
        "decode": kernel_speeds.decode,
        "prefill": kernel_speeds.prefill,
        "policies": engine_checks.policies,
        "steps": engine_checks.steps,
        "pointwise": kernel_speeds.pointwise,
        "sampling": kernel_speeds.sampling,
        "products": kernel_speeds.products,
        "graphs": kernel_speeds.graphs,
        "calibration": engine_checks.calibration,
        "weights": engine_checks.weight_types,
        "tiles": kernel_speeds.tiles,
    }


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which is from here on
    import torch

    from schedlab.experiments.device.rows import Device

    if not options.interpret and not torch.cuda.is_available():
        print("device_check: expected a GPU, found none; --interpret runs small shapes on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    began = time.monotonic()
    device = Device(options.interpret)
    rows, skipped = collect(device, options, lambda: time.monotonic() - began)
    report = {"machine": machine(options.interpret), "seconds": round(time.monotonic() - began, 1), "skipped": skipped}
    print(table(rows))
    left_out = f"; skipped: {', '.join(skipped)}" if skipped else ""
    print(f"{report['seconds']} s on {machine(options.interpret)['device']}{left_out}")
    if options.out:
        write(options.out, report | {"rows": [asdict(row) | {"ok": row.ok} for row in rows]})
        if device.profile is not None:
            device.profile.save(options.out / "profile.json")
    return int(any(row.ok is False for row in rows))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="device_check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for device_check.json and the engine's profile.json")
    parser.add_argument("--interpret", action="store_true", help="small shapes, by Triton's interpreter, on the CPU")
    parser.add_argument("--sections", nargs="+", help="only these")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no section after this time (default 240)")
    return parser.parse_args(arguments)


def collect(device: Device, options: argparse.Namespace, elapsed: Callable[[], float]) -> tuple[list[Row], list[str]]:
    """Rows of all sections, and the names of those there was no time for."""
    chosen = sections()
    if unknown := set(options.sections or ()) - set(chosen):
        raise SystemExit(f"device_check: --sections: expected some of {', '.join(chosen)}, found {unknown.pop()}")
    rows: list[Row] = []
    skipped = []
    for name, section in chosen.items():
        if options.sections and name not in options.sections:
            continue
        if elapsed() > options.seconds:
            skipped.append(name)
            continue
        before = elapsed()
        rows += guarded(name, section, device)
        print(f"{name}: {elapsed() - before:.1f} s", file=sys.stderr, flush=True)
    return rows, skipped


def guarded(name: str, section: Section, device: Device) -> list[Row]:
    """The section's rows; if it fails, those before the failure and one that tells it."""
    from schedlab.experiments.device.rows import Row

    rows: list[Row] = []
    try:
        rows.extend(section(device))
    except Exception as failure:
        first_line = (str(failure).splitlines() or [""])[0]
        note = f"{type(failure).__name__}: {first_line}"
        rows.append(Row(name, "failed", float("nan"), "", most=0, note=note))
    return rows


def machine(interpreted: bool) -> dict[str, str]:
    import torch
    import triton

    device = "the interpreter" if interpreted else torch.cuda.get_device_name()
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return {"device": device, **versions}


def table(rows: list[Row]) -> str:
    lines = [f"{'section':12} {'what':52} {'value':>10} {'unit':8} {'demand':>10}    note"]
    for row in rows:
        demand = f">= {row.least:g}" if row.least is not None else f"<= {row.most:g}" if row.most is not None else ""
        mark = {True: "ok", False: "NO", None: ""}[row.ok]
        lines.append(f"{row.section:12} {row.what:52} {row.value:10.4g} {row.unit:8} {demand:>10} {mark:2} {row.note}")
    return "\n".join(line.rstrip() for line in lines)


def write(folder: Path, report: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "device_check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
