"""The time of a step on a machine: its parts by the machine's ceilings, and the overheads that no roofline explains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import EXCHANGES, Part, Roofline, Work
from schedlab.framework.errors import ConfigError

Bound = Literal["compute", "memory", "overhead"]


@dataclass(frozen=True, slots=True)
class Timed:
    """A part on a machine. Transfers on any route count as memory."""

    part: Part
    compute_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.transfer_s)

    @property
    def bound(self) -> Bound:
        return "compute" if self.compute_s > self.transfer_s else "memory"


@dataclass(frozen=True, slots=True)
class Estimate:
    """One step on a machine: its parts, and the fixed overheads that no roofline explains."""

    parts: tuple[Timed, ...]
    overhead_s: float

    @property
    def seconds(self) -> float:
        return sum(timed.seconds for timed in self.parts) + self.overhead_s

    @property
    def shares_s(self) -> dict[Bound, float]:
        """Seconds of the step by what bounds them."""
        shares: dict[Bound, float] = {"compute": 0.0, "memory": 0.0, "overhead": self.overhead_s}
        for timed in self.parts:
            shares[timed.bound] += timed.seconds
        return shares

    @property
    def bound(self) -> Bound:
        return largest(*self.shares_s.values())


def largest(compute: float, memory: float, overhead: float) -> Bound:
    """What bounds a step: the largest of its shares."""
    if compute >= memory:
        return "compute" if compute >= overhead else "overhead"
    return "memory" if memory >= overhead else "overhead"


def overhead_s(roofline: Roofline, hardware: Hardware, work: Work) -> float:
    """Time of a step that does not shrink with its work: scheduler, host, kernel starts, collectives, copies."""
    requests = work.decodes + work.prefills
    us = hardware.scheduler_us + hardware.scheduler_request_us * requests
    if work.copied_bytes:
        us += hardware.copy_us
    if work.tokens:
        layers = roofline.model.num_hidden_layers
        us += hardware.step_us + (hardware.request_us + hardware.sequence_us * layers) * requests
        us += hardware.attention_us * layers * ((work.prefills > 0) + (work.decodes > 0))
        us += hardware.kernel_us * roofline.kernels
        if roofline.tensor_parallel > 1:
            us += hardware.collective_us * (2 * layers + 1 - roofline.exchanging_layers)
        us += hardware.collective_us * EXCHANGES * roofline.exchanging_layers
    return us * 1e-6


def estimate(roofline: Roofline, hardware: Hardware, work: Work) -> Estimate:
    """Time of one step of `work`. ConfigError if the hardware lacks an arithmetic or a link that the step needs."""
    for name in ("tensor_parallel", "expert_parallel"):
        if getattr(roofline, name) > 1 and not hardware.interconnect_gb_s:
            raise ConfigError(f"{name}: expected 1 on hardware={hardware.name}, found {getattr(roofline, name)}")
    parts = roofline.parts(work)
    timed = tuple(Timed(part, part.compute_s(hardware), part.transfer_s(hardware)) for part in parts)
    return Estimate(timed, overhead_s(roofline, hardware, work))
