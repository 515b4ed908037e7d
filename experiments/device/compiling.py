"""Compiles what sections will launch before they do, for a GPU that this process does not touch.

A stand-in answers what the JIT asks of a driver, tensors are on the meta device, and a launch becomes a compilation: so
each kernel gets exactly the specialisation (alignment, strides, constants) that it gets on the device, and what comes
out lies in Triton's cache, where it is found by the process that launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from schedlab.experiments.device import machine
from schedlab.experiments.device.rows import Device, Row
from schedlab.experiments.device.sections import Section, Work, resolve
from schedlab.kernels import configs

UNUSED_DEVICES = 1000
"""From here on no device was compiled for in this process, so that every launch asks for a compilation."""


class NoDriver:
    """What the JIT asks of a driver before a launch: a target, a device number (the key of its cache) and a stream."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target = target
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _forget_device() -> None:
    for cached in (configs.device_backend, configs.has_float8):
        cached.cache_clear()


@contextmanager
def launches_compile(
    target: GPUTarget, device: int = 0, told: Callable[[str, Any], None] | None = None
) -> Iterator[None]:
    """Inside, every `kernel[grid](...)` compiles for `target`; `told` hears the kernel's name and what was compiled."""

    def getitem(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **kwargs)
            if told is not None:
                told(kernel.fn.__name__.strip("_"), compiled)

        return launch

    original = JITFunction.__getitem__
    driver.set_active(NoDriver(target, device))
    _forget_device()
    JITFunction.__getitem__ = getitem
    try:
        yield
    finally:
        JITFunction.__getitem__ = original
        _forget_device()


@contextmanager
def variants(choose: Callable[[Any, str], bool]) -> Iterator[None]:
    """Inside, of all variants of kernels that launches ask for only those are compiled that `choose` takes."""

    def compile_chosen(kernel: Any, key: str, *args: Any) -> Any:
        return original(kernel, key, *args) if choose(kernel, key) else None

    original = JITFunction._do_compile
    JITFunction._do_compile = compile_chosen
    try:
        yield
    finally:
        JITFunction._do_compile = original


class Share:
    """Every `of`-th variant, from the `number`-th on: each process takes another share of the same sequence."""

    def __init__(self, number: int, of: int) -> None:
        self.number, self.of = number, of
        self.seen: set[tuple[str, str]] = set()
        self.taken = 0

    def __call__(self, kernel: Any, key: str) -> bool:
        variant = kernel.fn.__name__, key
        if variant in self.seen:
            return False
        self.seen.add(variant)
        mine = len(self.seen) % self.of == self.number
        self.taken += mine
        return mine


def compile_share(device: Device, sections: tuple[Section, ...], number: int, of: int) -> Iterator[Row]:
    """The share `number` of `of` of what `sections` launch; `device.folder` tells for which card."""
    assert device.folder is not None
    capability = machine.read(device.folder)["capability"]
    share, nowhere = Share(number, of), Device("meta")
    target = GPUTarget("cuda", capability, 32)
    for path in dict.fromkeys(section.launches or section.work for section in sections):
        with launches_compile(target, UNUSED_DEVICES + number), variants(share):
            yield from _launched(path, resolve(path), nowhere)
    yield Row("compile", f"share {number + 1} of {of}", share.taken, "kernels", note=f"of {len(share.seen)} variants")


def _launched(path: str, work: Work, nowhere: Device) -> Iterator[Row]:
    """Its rows say nothing, but for one if it cannot be run without data: the section then compiles by itself."""
    try:
        for _ in work(nowhere):
            pass
    except Exception as failure:
        name, note = path.rpartition(":")[2], f"{type(failure).__name__}: {failure}"
        yield Row("compile", f"{name}: not compiled beforehand", float("nan"), "", note=note)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the kernels that are compiled inside, those found in the cache not among them."""
    compiled: list[str] = []

    def heard(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    before, triton.knobs.compilation.listener = triton.knobs.compilation.listener, heard
    try:
        yield compiled
    finally:
        triton.knobs.compilation.listener = before
