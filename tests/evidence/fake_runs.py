"""Run directories with nothing but what a comparison reads: labels, a summary, and what was offered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedlab.framework.results.metrics import empty_summary

SLO = {"name": "default", "ttft_s": 1.0, "tpot_s": 0.1, "e2e_s": None}


def offered(seed: int, count: int = 5) -> list[dict[str, Any]]:
    return [
        {
            "request_id": f"{seed}-{i}", "source_row": i, "arrival_ns": 1000 * i + seed, "prompt_tokens": 10 + i,
            "output_tokens": 5, "content": {"row": i, "seed": 0},
        }
        for i in range(count)
    ]  # fmt: skip


def fake_run(
    directory: Path, policy: str, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], *,
    overrides: Mapping[str, str] | None = None, knobs: Mapping[str, Any] | None = None, seed: int = 0,
    limits: Mapping[str, Any] | None = None, wandb: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    directory.mkdir(parents=True)
    with gzip.open(directory / "workload.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    result = {
        "status": "finished", "config_hash": None, "digest": "d", "record": "summary", "error": None, "counters": {},
        "measurement": {"slo": [SLO]}, "summary": {**empty_summary(), **summary},
    }  # fmt: skip
    manifest = {
        "labels": {"policy": policy, "workload": "sample", "seed": seed}, "overrides": dict(overrides or {}),
        "policy": {"class": policy, "knobs": dict(knobs or {})}, "engine": dict(limits or {}), "workload": {},
        "config": {"wandb": dict(wandb)} if wandb else {},
    }  # fmt: skip
    (directory / "result.json").write_text(json.dumps(result))
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def sweep(directory: Path, values: Mapping[str, Sequence[float]], metric: str = "ttft/mean", **more: Any) -> Path:
    """A run for each policy and replicate, with these values of `metric`."""
    for policy, of_policy in values.items():
        for seed, value in enumerate(of_policy):
            fake_run(directory / f"{policy}{seed}", policy, offered(seed), {metric: value}, seed=seed, **more)
    return directory
