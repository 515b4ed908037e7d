"""What a check consists of, in the order of its worth, and how long each part of it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

from schedlab.experiments.device.rows import Row

Work = Callable[..., Iterator[Row]]
"""From a device to rows."""


@dataclass(frozen=True, slots=True)
class Section:
    """`work` names a function, "module:function", that yields rows of a device; after `seconds` its process is ended.

    `launches` names another that launches the same kernels on a device without data, where `work` itself cannot.
    """

    name: str
    work: str
    seconds: float
    launches: str | None = None


HERE = __package__
ENGINE = f"{HERE}.engine_checks:launches"

SECTIONS = (
    Section("ceilings", f"{HERE}.kernel_speeds:ceilings", 30),
    Section("correctness", f"{HERE}.kernel_checks:correctness", 60),
    Section("decode", f"{HERE}.kernel_speeds:decode", 40),
    Section("prefill", f"{HERE}.kernel_speeds:prefill", 40),
    Section("policies", f"{HERE}.engine_checks:policies", 60, ENGINE),
    Section("steps", f"{HERE}.engine_checks:steps", 60, ENGINE),
    Section("pointwise", f"{HERE}.kernel_speeds:pointwise", 20),
    Section("sampling", f"{HERE}.kernel_speeds:sampling", 20),
    Section("products", f"{HERE}.kernel_speeds:products", 40),
    Section("graphs", f"{HERE}.kernel_speeds:graphs", 30),
    Section("calibration", f"{HERE}.engine_checks:calibration", 70, ENGINE),
    Section("weights", f"{HERE}.engine_checks:weight_types", 60, f"{HERE}.engine_checks:quantised_launches"),
    Section("tiles", f"{HERE}.kernel_speeds:tiles", 60),
)


def resolve(path: str) -> Work:
    module, name = path.split(":")
    work: Work = getattr(import_module(module), name)
    return work
