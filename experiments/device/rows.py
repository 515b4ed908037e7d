"""What a check of a device reports: rows of a table, and the device that they are of.

On the interpreter times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton

from schedlab.framework.cost.fit import Profile
from schedlab.kernels.dispatch import Kernels, kernels


@dataclass(frozen=True)
class Row:
    """One figure. `least` or `most` is what it has to reach, None if it is only reported."""

    section: str
    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """None where nothing is demanded; a NaN fails every demand."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)


@dataclass
class Device:
    """A GPU, or (`interpreted`) the CPU under Triton's interpreter, on which only small shapes end in time.

    `copy_tb_s` and `matmul_tflops` are the measured ceilings: copied bytes count twice, read and written. `profile`:
    the step times of the engine, once measured.
    """

    interpreted: bool
    copy_tb_s: float = float("nan")
    matmul_tflops: float = float("nan")
    profile: Profile | None = None
    ops: Kernels = field(init=False)

    def __post_init__(self) -> None:
        self.ops = kernels(self.name, "triton")

    @property
    def name(self) -> str:
        return "cpu" if self.interpreted else "cuda"

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a call: replayed from a CUDA graph, so that the host's own time is not in it."""
        if self.interpreted:
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        return 1e-3 * float(triton.testing.do_bench_cudagraph(run, rep=10, return_mode="median"))

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=self.name, dtype=torch.float32 if self.interpreted else dtype).to(dtype)
