"""A machine as the cost model sees it: peaks, bandwidths, sizes, the share of them that is reached, fixed overheads.

The numbers are configuration (conf/hardware), each with its source beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from schedlab.framework.errors import ConfigError

Route = Literal["memory", "interconnect", "host"]
Unit = Literal["linear", "attention"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device (of `tensor_parallel` equal ones).

    peak_tflops           dense peak by dtype of the arithmetic, 1e12 FLOP/s
    memory_gb, memory_gb_s        device memory, 1e9 bytes, and its bandwidth, 1e9 bytes/s
    host_link_gb_s        device <-> host, one direction; where swapped blocks travel
    interconnect_gb_s     device <-> device, one direction; 0 = a single device only
    linear_efficiency     share of the peak that large products reach, or that share by dtype of the arithmetic
    attention_efficiency  share of the peak that prefill attention reaches at long prompts
    memory_efficiency, link_efficiency        share of the bandwidth of memory, and of the host's link, that is reached
    interconnect_efficiency   share of the device link's bandwidth, or that share by number of devices: where they
                          talk over PCIe it falls with their number; None: link_efficiency
    kernel_us             start and drain of one kernel, over and above its roofline time
    attention_us          what an attention kernel of a layer takes beyond that, however short the contexts
    step_us, request_us   host time of a step, and of each request in it, that the device waits for
    sequence_us           per request and layer, where attention runs one sequence after another
    scheduler_us, scheduler_request_us        modelled time of the scheduler per step, and per request in it
    collective_us, copy_us   latency of one collective, and of the block copies of a step

    Raises ConfigError for a value out of range.
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gb: float
    memory_gb_s: float
    host_link_gb_s: float
    interconnect_gb_s: float
    linear_efficiency: float | Mapping[str, float]
    attention_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    kernel_us: float
    step_us: float
    request_us: float
    sequence_us: float
    scheduler_us: float
    scheduler_request_us: float
    collective_us: float
    copy_us: float
    interconnect_efficiency: float | Mapping[int, float] | None = None
    attention_us: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_tflops", dict(self.peak_tflops))
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value is None:
                continue
            if isinstance(value, Mapping):
                object.__setattr__(self, field.name, dict(value))
                self._check_shares(field.name, value)
            else:
                self._check(field.name, value)
        for dtype, peak in self.peak_tflops.items():
            if not peak > 0:
                raise ConfigError(f"hardware.peak_tflops.{dtype}: expected more than 0, found {peak}")

    def _check_shares(self, name: str, shares: Mapping[str, float] | Mapping[int, float]) -> None:
        if name not in ("linear_efficiency", "interconnect_efficiency"):
            raise ConfigError(f"hardware.{name}: expected a number, found {dict(shares)}")
        if not shares:
            raise ConfigError(f"hardware.{name}: expected at least one share, found none")
        for key, share in shares.items():
            self._check(f"{name}.{key}", share)

    def _check(self, name: str, value: float) -> None:
        if "_efficiency" in name:
            if not 0 < value <= 1:
                raise ConfigError(f"hardware.{name}: expected a share in (0, 1], found {value}")
        elif name.endswith("_us") or name == "interconnect_gb_s":
            if not value >= 0:
                raise ConfigError(f"hardware.{name}: expected at least 0, found {value}")
        elif not value > 0:
            raise ConfigError(f"hardware.{name}: expected more than 0, found {value}")

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    def peak_flops(self, arithmetic: tuple[str, ...]) -> float:
        """Datasheet FLOP/s of the first dtype that this hardware computes in. ConfigError if it knows none."""
        for dtype in arithmetic:
            if dtype in self.peak_tflops:
                return self.peak_tflops[dtype] * 1e12
        expected, found = " or ".join(arithmetic), ", ".join(self.peak_tflops)
        raise ConfigError(f"hardware.peak_tflops ({self.name}): expected {expected}, found {found}")

    def peak_bandwidth(self, route: Route) -> float:
        """Datasheet bytes/s of a route."""
        rates = {"memory": self.memory_gb_s, "interconnect": self.interconnect_gb_s, "host": self.host_link_gb_s}
        return rates[route] * 1e9

    def flops(self, arithmetic: tuple[str, ...], unit: Unit) -> float:
        """FLOP/s that are reached."""
        efficiency = self.linear_share(arithmetic) if unit == "linear" else self.attention_efficiency
        return self.peak_flops(arithmetic) * efficiency

    def linear_share(self, arithmetic: tuple[str, ...]) -> float:
        """Share of the peak that products reach in the first dtype that this hardware computes in.

        A dtype that `linear_efficiency` does not name reaches what the first one named does.
        """
        shares = self.linear_efficiency
        if not isinstance(shares, Mapping):
            return shares
        dtype = next(dtype for dtype in arithmetic if dtype in self.peak_tflops)
        return shares.get(dtype, next(iter(shares.values())))

    def bandwidth(self, route: Route, devices: int = 1) -> float:
        """Bytes/s that are reached; over the interconnect by each of `devices`."""
        shares = {
            "memory": self.memory_efficiency, "host": self.link_efficiency,
            "interconnect": self._interconnect_share(devices),
        }  # fmt: skip
        return self.peak_bandwidth(route) * shares[route]

    def _interconnect_share(self, devices: int) -> float:
        """That of the nearest number of devices not below, or of the largest."""
        shares = self.interconnect_efficiency
        if not isinstance(shares, Mapping):
            return self.link_efficiency if shares is None else shares
        return shares[min((number for number in shares if number >= devices), default=max(shares))]

    def ridge(self, dtype: str) -> float:
        """FLOP/byte at which the datasheet's peak and bandwidth take equal time (Williams et al., CACM 52(4), 2009)."""
        return self.peak_flops((dtype,)) / self.peak_bandwidth("memory")
