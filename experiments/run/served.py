"""The run directory of a vLLM server: written while it serves, so that its load can be explained and tried afterwards.

What was offered is told by the hashes of its blocks, never by its tokens. Needs numpy alone, as vLLM's environment has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from schedlab.experiments.run.manifest import describe_run, write_manifest
from schedlab.framework.errors import ConfigError
from schedlab.framework.limits import EngineConfig
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import NS, EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.writer import RunWriter
from schedlab.framework.vllm.journal import Journal
from schedlab.workloads.readers import OFFERED
from schedlab.workloads.writers import WorkloadWriter

NAME = "served"
FLUSH_S = 1.0
"""How much a kill may cost, about; a server that has nothing left to do has everything on disk."""


def limits_of(scheduler: Any) -> EngineConfig:
    """The limits of a vLLM scheduler as schedlab counts them."""
    config, pool = scheduler.scheduler_config, scheduler.kv_cache_manager.block_pool
    return EngineConfig(
        num_blocks=pool.num_gpu_blocks - 1,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        block_size=scheduler.block_size,
        enable_prefix_caching=scheduler.kv_cache_manager.enable_caching,
        watermark=config.watermark,
    )


class ServedJournal(Journal):
    """Records into `directory`, which must hold no run. At the end the offered requests get the lengths they had."""

    def __init__(
        self, directory: Path, limits: EngineConfig, policy: Policy, predictor: Predictor | None, version: str
    ) -> None:
        if (directory / "result.json").exists():
            raise ConfigError(f"SCHEDLAB_OUT={directory}: expected a new folder, found a run in it")
        super().__init__(RunWriter(directory, Measurement(limits.max_num_seqs, limits.num_blocks)))
        self._directory = directory
        self._manifest = describe_run(
            config={"policy": type(policy).__name__, "engine": "vllm"},
            labels={"policy": type(policy).__name__, "workload": NAME, "engine": "vllm", "seed": 0},
            overrides={}, seeds={"seed": 0}, policy=policy, predictor=predictor, workload=facts(0, 0), clock="wall",
            engine=asdict(limits), kernels=f"vllm {version}",
        )  # fmt: skip
        write_manifest(directory, self._manifest)
        self._offered = WorkloadWriter(packed.find(directory, OFFERED))
        self._ends: dict[str, dict[str, int]] = {}
        self._first_ns: int | None = None
        self._last_ns = self._num_offered = self._num_left = 0
        self._flushed_at = time.monotonic()

    def arrived(self, request: EngineRequest) -> None:
        self._offered.write(request)
        self._num_offered += 1
        self._num_left += 1
        self._first_ns = request.visible_ns if self._first_ns is None else self._first_ns
        self._last_ns = request.visible_ns

    def executed(self, emitted: list[EngineRequest], now_ns: int) -> None:
        super().executed(emitted, now_ns)
        if time.monotonic() > self._flushed_at + FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        self._offered.flush()
        self.recorder.flush()
        self._flushed_at = time.monotonic()

    def ended(self, request: EngineRequest, output_token_ids: list[int], now_ns: int) -> None:
        super().ended(request, [], now_ns)  # what was said is nobody's but its client's
        if request.state == "aborted":
            self._ends[request.request_id] = {"abort_ns": max(now_ns - request.arrival_ns, 0)}
        else:
            self._ends[request.request_id] = {"output_tokens": max(len(output_token_ids), 1)}
        self._num_left -= 1
        if not self._num_left:
            self._flush()

    def close(self, backlog_end: int, counters: Mapping[str, int]) -> Any:
        self._offered.close()
        self._add_ends()
        span_s = 0.0 if self._first_ns is None else (self._last_ns - self._first_ns) / NS
        write_manifest(self._directory, {**self._manifest, "workload": facts(self._num_offered, span_s)})
        return super().close(backlog_end, counters)

    def _add_ends(self) -> None:
        path = packed.find(self._directory, OFFERED)
        whole = path.with_name(f"whole-{path.name}")
        written = packed.PackedText(whole)
        with packed.opened(path) as lines:
            for line in lines:
                row = json.loads(line)
                row |= self._ends.get(row["request_id"], {})
                written.write(json.dumps(row, separators=(",", ":")) + "\n")
        written.close()
        whole.replace(path)


def facts(requests: int, span_s: float) -> dict[str, Any]:
    """What a manifest says of a workload, of one that came from clients."""
    return {
        "name": NAME, "requests": requests, "span_s": span_s, "path": None, "format": None, "sha256": None,
        "assumed": [], "counts": {},
    }  # fmt: skip
