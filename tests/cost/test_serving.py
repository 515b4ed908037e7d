"""A server's host constants reach the hardware and the client's view; the tables' ratios hold in the presets."""

from __future__ import annotations

import pytest

from schedlab.experiments import engines
from schedlab.experiments.run import compose
from schedlab.framework.cost.roofline import Roofline, Work

SERVERS = ("none", "vllm", "vllm_async", "trtllm", "sglang")


@pytest.mark.parametrize("name", SERVERS)
def test_host_constants_are_the_servers(name: str) -> None:
    keys, machine = compose.preset("serving", name), engines.hardware_preset("h200", name)
    assert keys["name"] == name
    assert [getattr(machine, key) for key in ("step_us", "request_us", "kernel_us")] == [
        keys[key] for key in ("step_us", "request_us", "kernel_us")
    ]


def test_a_run_and_a_client_see_them() -> None:
    config = compose.compose(["engine=virtual", "hardware=h100", "serving=vllm", "observed_at=client"])
    keys = compose.resolve(config)
    assert keys["engine"]["hardware"]["step_us"] == keys["serving"]["step_us"] == 650.0
    assert keys["observed_at"]["preparation"]["constant_s"] == keys["serving"]["preparation_s"]
    assert compose.resolve(compose.compose(["hardware.step_us=7"]))["hardware"]["step_us"] == 7


@pytest.mark.parametrize(("card", "whole", "split"), [("h100", 1.49, 1.28), ("h200", 1.76, 1.45), ("l40s", 1.56, 1.37)])
def test_the_gain_of_fp8_is_within_15_percent_of_the_tables(card: str, whole: float, split: float) -> None:
    """Measured: fp8 beside bf16 products of 1k-8k rows of 8B, 32B and 70B layers, on one device and split over 2-8."""
    machine, shape = engines.hardware_preset(card), engines.model_preset("llama3.1-70b")[0]
    work = Work(tokens=4096)
    bf16, fp8 = (Roofline(shape, dtype).linears(work).compute_s(machine) for dtype in ("bf16", "fp8"))
    for measured in (whole, split):
        assert bf16 / fp8 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("devices", "gb_s"), [(2, 18.4), (4, 3.8), (8, 1.8)])
def test_all_reduces_over_pcie(devices: int, gb_s: float) -> None:
    """Measured: all-reduces of 2-16 MB between L40S, bytes of a ring over time."""
    machine = engines.hardware_preset("l40s")
    for megabytes in (2, 4, 8, 16):
        moved = 2 * (devices - 1) / devices * megabytes * 1e6
        modelled = machine.collective_us * 1e-6 + moved / machine.bandwidth("interconnect", devices)
        assert modelled == pytest.approx(moved / (gb_s * 1e9), rel=0.3)


def test_links_are_named_by_the_devices_that_share_them() -> None:
    machine = engines.hardware_preset("l40s")
    assert machine.bandwidth("interconnect", 3) == machine.bandwidth("interconnect", 4)
    assert machine.bandwidth("interconnect", 16) == machine.bandwidth("interconnect", 8)
    assert machine.bandwidth("host") == machine.bandwidth("host", 8)
