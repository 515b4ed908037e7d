"""What can never fit, and where a request ends: the length rules. Knows sizes only; changes nothing but a request's
limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from schedlab.framework.errors import ConfigError
from schedlab.framework.eviction import EVICTIONS, Eviction
from schedlab.framework.request import EngineRequest, State


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The scheduler's limits, named as in vLLM where vLLM has them.

    `num_blocks`: KV blocks on the device. `swap_space_gib`: host memory for swapped requests. `watermark`: share of the
    blocks that an admission leaves free, if anybody runs. `eviction`: which cached block goes first when blocks are
    short. `fast_forward` and `honour_holds` change how a standing decision is executed, never what is decided.
    `audit_every`: boundaries between full audits of the books; above 1, more of them where the books are large, so that
    audits take little of a run. `max_chained_steps`: decode steps of a held decision
    that run back to back, as one boundary: arrivals and aborts wait for its end, and its tokens become visible there
    together. `max_num_waiting_reqs`, `max_num_queued_reqs` (waiting and running) and `max_num_queued_tokens` (prompt
    tokens still to compute): who arrives beyond is rejected.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    enable_prefix_caching: bool = True
    swap_space_gib: float = 0.0
    watermark: float = 0.0
    eviction: Eviction = "lru"
    max_chained_steps: int = 1
    fast_forward: bool = True
    honour_holds: bool = True
    audit_every: int = 1000
    max_num_waiting_reqs: int | None = None
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None

    def __post_init__(self) -> None:
        for key in (
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "max_chained_steps",
            "audit_every",
        ):
            if getattr(self, key) < 1:
                raise ConfigError(f"engine.{key}: expected a number of at least 1, found {getattr(self, key)}")
        for key in ("max_num_waiting_reqs", "max_num_queued_reqs", "max_num_queued_tokens"):
            if (limit := getattr(self, key)) is not None and limit < 1:
                raise ConfigError(f"engine.{key}: expected null or a number of at least 1, found {limit}")
        if not 0 <= self.swap_space_gib < math.inf:
            raise ConfigError(f"engine.swap_space_gib: expected a size of at least 0, found {self.swap_space_gib}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"engine.watermark: expected a share in [0, 1), found {self.watermark}")
        if self.eviction not in EVICTIONS:
            raise ConfigError(f"engine.eviction: expected {' or '.join(EVICTIONS)}, found {self.eviction}")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"engine.max_num_batched_tokens: expected at least engine.max_num_seqs = {self.max_num_seqs}, so that "
                f"all running requests can decode in one step; found {self.max_num_batched_tokens}"
            )

    @property
    def watermark_blocks(self) -> int:
        """Blocks that an admission leaves free."""
        return math.ceil(self.watermark * self.num_blocks)

    @property
    def pool_tokens(self) -> int:
        """Tokens whose keys and values the device holds at most."""
        return self.num_blocks * self.block_size


EMPTY, NEEDS = "empty: ", "needs "
"""How the reasons of `never_fits` begin."""


def never_fits(request: EngineRequest, config: EngineConfig) -> str | None:
    """Why `request` is rejected at submission, or None.

    A replay needs its recorded length: all but the last token in the cache. A live request needs room for one token.
    """
    prompt, recorded = request._num_prompt_tokens, request.recorded_output_tokens
    if prompt < 1 or (request._max_tokens if recorded is None else recorded) == 0:
        return f"{EMPTY}{prompt} prompt tokens, {request._max_tokens if recorded is None else recorded} output tokens"
    length = prompt + (1 if recorded is None else recorded)
    cached = length if recorded is None else length - 1
    if cached > config.pool_tokens:
        return f"{NEEDS}{cached} tokens of KV cache, the pool holds {config.pool_tokens}"
    if length > config.max_model_len:
        return f"{NEEDS}{length} tokens, max_model_len is {config.max_model_len}"
    return None


def is_too_large(request: EngineRequest) -> bool:
    """Whether `request` was rejected by `never_fits`."""
    return request.reason is not None and request.reason.startswith((EMPTY, NEEDS))


def set_limits(request: EngineRequest, config: EngineConfig) -> None:
    """Where `request` ends at the latest: by its recorded or allowed length, the model's limit, or the pool's."""
    if request._max_tokens < 0:
        request._max_tokens = config.max_model_len - request._num_prompt_tokens
    wanted = request._num_prompt_tokens + _wanted_output(request)
    request.final_tokens = min(wanted, config.max_model_len, config.pool_tokens + 1)


def ending(request: EngineRequest, config: EngineConfig) -> State:
    """How a request that reached its final length ended."""
    if request.num_output_tokens >= _wanted_output(request):
        return "finished"
    request.reason = f"outgrew max_model_len {config.max_model_len} or a KV cache of {config.pool_tokens} tokens"
    return "length_capped"


def _wanted_output(request: EngineRequest) -> int:
    recorded = request.recorded_output_tokens
    return request._max_tokens if recorded is None else recorded


def tokens_served(request: EngineRequest) -> int:
    """Prompt tokens computed, once each, plus tokens generated."""
    prompt = request._num_prompt_tokens
    done = prompt if request._first_token_ns is not None else min(request._base_computed, prompt)
    return done + request.num_output_tokens
