"""The four situations of `schedlab roofline`: what they conclude and that they can be shown."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from schedlab.experiments.studies.roofline import render, roofline
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig


def by_name(result: dict[str, Any]) -> dict[str, Any]:
    return {situation["name"]: situation for situation in result["situations"]}


def test_what_bounds_an_8b_model_on_an_h100(llama: ModelConfig, h100: Hardware) -> None:
    result = roofline(llama, h100)
    steps = by_name(result)
    bounds = {name: situation["step"]["bound"] for name, situation in steps.items()}
    assert bounds == {
        "long uncached prompt": "compute",
        "one decoding sequence": "memory",
        "large decode batch": "memory",
        "mostly cached prompt": "compute",
    }
    prompt, decode = steps["long uncached prompt"], steps["large decode batch"]
    assert prompt["double_compute_s"] < prompt["double_bandwidth_s"] < prompt["step"]["seconds"]
    assert decode["double_bandwidth_s"] < decode["double_compute_s"] == decode["step"]["seconds"]
    json.dumps(result)


def test_a_small_model_at_batch_one_waits_for_overhead(smollm: ModelConfig, h100: Hardware) -> None:
    shares = by_name(roofline(smollm, h100))["one decoding sequence"]["step"]["shares"]
    assert shares["overhead"] > 0.5
    assert sum(shares.values()) == pytest.approx(1.0)


def test_parts_make_the_step(llama: ModelConfig, h100: Hardware) -> None:
    for situation in roofline(llama, h100)["situations"]:
        seconds = sum(part["seconds"] for part in situation["parts"]) + situation["overhead_s"]
        assert seconds == pytest.approx(situation["step"]["seconds"])


def test_the_large_batch_is_what_fits(llama: ModelConfig, h100: Hardware, hardware: Callable[[str], Hardware]) -> None:
    decode = by_name(roofline(llama, hardware("l40s"), context_tokens=8192))["large decode batch"]
    assert decode["work"]["decodes"] < 128
    assert f"{decode['work']['decodes']} × decode at 8,192" in decode["description"]
    with pytest.raises(ConfigError, match="does not fit"):
        roofline(llama, hardware("cpu"), weight_dtype="fp32")
    with pytest.raises(ConfigError, match="cached_tokens: expected 1 to 99, found 100"):
        roofline(llama, h100, prompt_tokens=100, cached_tokens=100)


def test_situations_stay_within_the_models_limit(model: Callable[[str], ModelConfig], h100: Hardware) -> None:
    tiny = model("tiny")
    for situation in roofline(tiny, h100)["situations"]:
        work = situation["work"]
        assert work["prefill_keys"] <= tiny.max_position_embeddings
        assert work["decode_keys"] <= work["decodes"] * tiny.max_position_embeddings


def test_tables_show_measurements_beside_the_model(smollm: ModelConfig, hardware: Callable[[str], Hardware]) -> None:
    modelled = by_name(roofline(smollm, hardware("cpu")))["one decoding sequence"]["step"]["seconds"]
    measured = {"one decoding sequence": 3 * modelled, "mostly cached prompt": 1e9}
    result = roofline(smollm, hardware("cpu"), measured_s=measured)
    assert not by_name(result)["one decoding sequence"]["explained"]
    text = io.StringIO()
    render(result, Console(file=text, width=120))
    shown = text.getvalue()
    for expected in (
        "long uncached prompt: prefill of 8,192 tokens",
        "decode attention",
        "overhead",
        "3.00 unexplained",
    ):
        assert expected in shown
    plain = io.StringIO()
    render(roofline(smollm, hardware("cpu")), Console(file=plain, width=120))
    assert "measured" not in plain.getvalue()
