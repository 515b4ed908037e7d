"""What of vLLM this package relies on beyond its public interface, and what of vLLM a policy cannot be combined with.

All of it is looked at when a scheduler is made, so that another vLLM is one line at the start and no fault later on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedlab.framework.errors import ConfigError

OLDEST, NEWEST = (0, 31), (0, 33)
NAMES: Mapping[str, tuple[str, ...]] = {
    "": (
        "_preempt_request", "_reserve_prefill_lookahead", "_handle_blocked_waiting_request", "_pause_state",
        "add_request", "finish_requests", "schedule", "update_from_output", "reset_prefix_cache", "shutdown",
        "requests", "running", "waiting", "finished_req_ids", "current_step", "grammar_compile_error_reqs",
        "max_num_active_reqs", "max_num_scheduled_tokens", "max_model_len", "block_size", "hash_block_size",
    ),
    "kv_cache_manager": (
        "allocate_slots", "get_computed_blocks", "get_blocks", "get_block_ids", "cache_blocks", "evict_blocks", "free",
        "block_pool", "watermark_blocks", "enable_caching", "empty_kv_cache_blocks", "new_step_starts",
        "prefix_cache_lookup_enabled",
    ),
    "kv_cache_manager.block_pool": (
        "cached_block_hash_to_block", "get_num_free_blocks", "free_blocks", "blocks", "num_gpu_blocks",
    ),
}  # fmt: skip
"""By the scheduler's attribute, "" for itself: the names that are used of it."""
OF_A_REQUEST = (
    "request_id", "status", "num_tokens", "num_computed_tokens", "num_prompt_tokens", "max_tokens", "block_hashes",
    "sampling_params", "num_stale_output_tokens", "num_output_placeholders", "resumable", "arrival_time", "priority",
    "session_id", "output_token_ids",
)  # fmt: skip


def check_version(version: str) -> None:
    """ConfigError for a vLLM that nobody has tried."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= parts <= NEWEST:
        span = " to ".join(".".join(map(str, end)) for end in (OLDEST, NEWEST))
        raise ConfigError(f"schedlab.vllm: expected vLLM {span}, found {version}")


def check_names(scheduler: Any) -> None:
    """ConfigError naming what this vLLM has no more."""
    missing = []
    for path, names in NAMES.items():
        owner = scheduler
        for part in filter(None, path.split(".")):
            owner = getattr(owner, part, None)
        missing += [".".join(filter(None, (path, name))) for name in names if not hasattr(owner, name)]
    if missing:
        raise ConfigError(f"schedlab.vllm: this vLLM's scheduler has no {', '.join(missing)}")


def check_request(theirs: Any) -> None:
    """The same of a request; asked once, of the first."""
    missing = [name for name in OF_A_REQUEST if not hasattr(theirs, name)]
    if missing:
        raise ConfigError(f"schedlab.vllm: this vLLM's requests have no {', '.join(missing)}")


def check_features(scheduler: Any) -> None:
    """ConfigError naming every feature that is on and that no policy is told of."""
    found = [name for name, is_on in _features(scheduler).items() if is_on]
    if found:
        raise ConfigError(f"schedlab.vllm: a schedlab policy cannot be combined with {', '.join(found)}")


def _features(scheduler: Any) -> dict[str, bool]:
    config, limits = scheduler.vllm_config, scheduler.scheduler_config
    parallel, model, groups = config.parallel_config, config.model_config, scheduler.kv_cache_config.kv_cache_groups
    return {
        "speculative decoding": bool(scheduler.num_spec_tokens),
        "a KV connector": scheduler.connector is not None,
        "an EC connector": scheduler.ec_connector is not None,
        "encoder inputs": bool(model.supports_multimodal_inputs or scheduler.is_encoder_decoder),
        "a pooling model": model.runner_type != "generate",
        "LoRA": scheduler.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "several KV cache groups": len(groups) != 1,
        "attention that forgets (a sliding window or a state)": any(
            type(group.kv_cache_spec).__name__ not in ("FullAttentionSpec", "MLAAttentionSpec") for group in groups
        ),
        "blocks that are hashed in parts": scheduler.hash_block_size != scheduler.block_size,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold > 0,
        "vLLM's policy=priority": limits.policy != "fcfs",
        "enable_chunked_prefill=false": not limits.enable_chunked_prefill,
    }
