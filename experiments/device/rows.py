"""What a check of a device reports: rows of a table, and the device that they are of.

On the interpreter and on a device without data times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from schedlab.framework.cost.fit import Profile
    from schedlab.kernels.dispatch import Kernels

COPY = "copy, read and written"
PRODUCT = "bf16 product of square matrices"
"""The rows of the ceilings, which later sections read."""


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

    @classmethod
    def failed(cls, section: str, note: str) -> Row:
        return cls(section, "failed", float("nan"), "", most=0, note=note)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def line(self) -> str:
        demands = ((">=", self.least), ("<=", self.most))
        demand = next((f"{sign} {bound:g}" for sign, bound in demands if bound is not None), "")
        mark = {True: "ok", False: "NO", None: ""}[self.ok]
        line = f"{self.section:12} {self.what:52} {self.value:10.4g} {self.unit:8} {demand:>10} {mark:2} {self.note}"
        return line.rstrip()


HEADER = f"{'section':12} {'what':52} {'value':>10} {'unit':8} {'demand':>10}    note"


@dataclass
class Device:
    """Where tensors lie: a GPU ("cuda"), the CPU under Triton's interpreter ("cpu"), on which only small shapes end in
    time, or nowhere ("meta"): there what a GPU would launch is launched on tensors without data.

    `copy_tb_s` and `matmul_tflops` are the measured ceilings: copied bytes count twice, read and written. `profile`:
    the step times of the engine, once measured. What else is to be kept goes to `folder`.
    """

    name: str
    folder: Path | None = None
    copy_tb_s: float = float("nan")
    matmul_tflops: float = float("nan")
    profile: Profile | None = None

    @cached_property
    def ops(self) -> Kernels:
        from schedlab.kernels.dispatch import kernels

        return kernels("cuda" if self.dataless else self.name, "triton")

    @cached_property
    def reference(self) -> Kernels:
        from schedlab.kernels.dispatch import kernels

        reference = kernels("cpu", "reference")
        if self.dataless:  # which tokens have a slot is data
            return reference._replace(rope_kv_write=lambda q_THD, *_: q_THD)
        return reference

    @property
    def interpreted(self) -> bool:
        return self.name == "cpu"

    @property
    def dataless(self) -> bool:
        return self.name == "meta"

    def keep(self, name: str, text: str) -> None:
        if self.folder is not None:
            (self.folder / name).write_text(text, encoding="utf-8")

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a call: replayed from a CUDA graph, so that the host's own time is not in it."""
        if self.name == "cuda":
            from triton.testing import do_bench_cudagraph

            return 1e-3 * float(do_bench_cudagraph(run, rep=10, return_mode="median"))
        began = time.perf_counter()
        run()
        return float("nan") if self.dataless else time.perf_counter() - began

    def captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """`run`, once called, as it is replayed from a CUDA graph on a GPU."""
        run()
        if self.name != "cuda":
            return run
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def wall_seconds(self, run: Callable[[], object], times: int = 20) -> float:
        """Mean time of a call, the host's own in it; NaN where there is no GPU."""
        if self.name != "cuda":
            return float("nan")
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / times

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Standard normal numbers, by default bfloat16."""
        import torch

        dtype = dtype or torch.bfloat16
        return torch.randn(shape, device=self.name, dtype=torch.float32 if self.interpreted else dtype).to(dtype)


def count(mask: torch.Tensor) -> float:
    """How many are true; NaN where there is no data."""
    return float("nan") if mask.is_meta else float(mask.sum())
