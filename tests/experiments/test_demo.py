"""The demonstration shows what it is meant to: capacity is short, and each policy meets every hard case that it can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CANNOT = {
    ("fcfs", "pressure/split_prompts"): "prompts below the token budget are never split",
    ("decode_priority", "preemptions/recompute"): "admission leaves a watermark of free blocks for running requests",
}
"""Which policy need not show what, and why; the sample has no prompt above the token budget."""


@pytest.mark.parametrize("requests", [64, *(pytest.param(n, marks=pytest.mark.full) for n in (128, 254))])
def test_capacity_binds_under_all_four(schedlab, requests):
    done = schedlab(
        "run", "experiment=demo", f"workload.max_requests={requests}", "wandb.mode=disabled", "plots=false",
        "progress=false", "hydra.sweep.dir=demo",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert f"generated tokens: identical in 4 runs, for each of the {requests} requests" in done.out
    runs = json.loads(Path("demo/comparison.json").read_text())["runs"]
    assert [run["labels"]["policy"] for run in runs] == ["fcfs", "chunked_prefill", "decode_priority", "prefix_reuse"]
    for run in runs:
        assert run["summary"]["pressure/queue"] >= 0.5, run["name"]
        for figure in ("preemptions/recompute", "prefix/tokens_reused", "pressure/split_prompts"):
            shown = run["summary"][figure] > 0
            assert shown or (run["labels"]["policy"], figure) in CANNOT, f"{run['name']}: no {figure}"
