"""Hardware presets and their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.errors import ConfigError

GPUS = ("h100", "h200", "a100", "l40s", "b200", "gb200", "b300")
SHARED = (
    "memory_efficiency", "link_efficiency", "kernel_us", "step_us", "request_us", "sequence_us", "scheduler_us",
    "scheduler_request_us", "copy_us",
)  # fmt: skip


def test_ridge_of_h100(h100: Hardware) -> None:
    assert h100.ridge("bf16") == pytest.approx(989e12 / 3.35e12)
    assert round(h100.ridge("bf16")) == 295


def test_what_no_card_measures_is_the_same_for_every_card(hardware: Callable[[str], Hardware]) -> None:
    cards = [hardware(name) for name in GPUS]
    assert {card.name for card in cards} == set(GPUS)
    for name in SHARED:
        assert len({getattr(card, name) for card in cards}) == 1, name


def test_cpu_has_no_interconnect(hardware: Callable[[str], Hardware]) -> None:
    cpu = hardware("cpu")
    assert cpu.interconnect_gb_s == 0
    assert cpu.ridge("fp32") == pytest.approx(190 / 33.3)


def test_first_known_arithmetic_counts(hardware: Callable[[str], Hardware]) -> None:
    assert hardware("h100").peak_flops(("fp8", "bf16")) == 1979e12
    assert hardware("a100").peak_flops(("fp8", "bf16")) == 312e12
    with pytest.raises(ConfigError, match=r"hardware.peak_tflops \(cpu\): expected fp16, found fp32, bf16"):
        hardware("cpu").peak_flops(("fp16",))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory_gb_s", 0, "hardware.memory_gb_s: expected more than 0, found 0"),
        ("linear_efficiency", 1.2, r"hardware.linear_efficiency: expected a share in \(0, 1\], found 1.2"),
        ("step_us", -1.0, "hardware.step_us: expected at least 0, found -1.0"),
        ("peak_tflops", {"bf16": 0}, "hardware.peak_tflops.bf16: expected more than 0, found 0"),
    ],
)
def test_values_out_of_range(h100: Hardware, key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(h100, **{key: value})  # type: ignore[arg-type]
