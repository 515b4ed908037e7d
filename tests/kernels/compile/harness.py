"""Compiles the project's own wrappers for a GPU that is not there, and reads what the compiler made.

A stub stands in for the driver, tensors are on the meta device, and a launch becomes a compilation: so each kernel gets
exactly the specialisation (alignment, strides, constants) that the GPU would get.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from schedlab.experiments.device.compiling import launches_compile, variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
UNUSED_DEVICE = 99
"""The number of a device for which nothing was compiled, so that every launch has to ask for a compilation."""


@contextmanager
def compiling_for(target: str, device: int | None = None) -> Iterator[list[tuple[str, Any]]]:
    """Inside, every `kernel[grid](...)` compiles and appends (kernel name, compiled kernel) to the list it yields."""
    compiled: list[tuple[str, Any]] = []
    number = list(TARGETS).index(target) if device is None else device
    with launches_compile(TARGETS[target], number, told=lambda name, kernel: compiled.append((name, kernel))):
        yield compiled


@contextmanager
def specialisations() -> Iterator[dict[str, set[str]]]:
    """Inside, launches compile nothing; yields the keys of what each kernel would have been compiled for."""
    keys: dict[str, set[str]] = defaultdict(set)

    def record(kernel: Any, key: str) -> bool:
        keys[kernel.fn.__name__.strip("_")].add(key)
        return False

    with variants(record), compiling_for("sm_90", device=UNUSED_DEVICE):
        yield keys


@dataclass(frozen=True)
class CodeFacts:
    """Of one compiled kernel: registers a thread, bytes of stack a thread and of shared memory a block, opcodes."""

    registers: int
    stack: int
    shared: int
    warps: int
    local: int
    hgmma: int
    hmma: int
    ldgsts: int
    loads_16_bit: int

    def row(self) -> dict[str, int]:
        return asdict(self)


def cuda_facts(kernel: Any) -> CodeFacts:
    sass = kernel.asm["sass"]
    opcodes = re.findall(r"\t(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", sass)

    def count(*prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode in opcodes)

    usage = resource_usage(kernel.asm["cubin"])
    return CodeFacts(
        registers=usage["REG"],
        stack=usage["STACK"],
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        local=count("STL", "LDL"),
        hgmma=count("HGMMA"),
        hmma=count("HMMA"),
        ldgsts=sum(opcode.startswith("LDGSTS") and "128" in opcode for opcode in opcodes),
        loads_16_bit=sum(opcode.startswith("LDG") and ".U16" in opcode for opcode in opcodes),
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL as `cuobjdump --dump-resource-usage` reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", report.stdout)}
