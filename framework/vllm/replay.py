"""Requests of a source, replayed at their times into a vLLM engine in this process. One such engine a process.

What decides is the scheduler of this package; requests, steps and decisions go to a recorder as from any engine.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, __version__

from schedlab.framework.attempts import leaves, leaving_times, why_it_leaves
from schedlab.framework.clock import Clock
from schedlab.framework.errors import ConfigError, PolicyStalled, SchedlabError
from schedlab.framework.limits import EngineConfig, never_fits, set_limits, tokens_served
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor
from schedlab.framework.request import EngineRequest
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import Source
from schedlab.framework.vllm.books import VllmBooks
from schedlab.framework.vllm.journal import Journal
from schedlab.framework.vllm.scheduler import Steered
from schedlab.framework.vllm.settings import Settings

VERSION = f"vllm {__version__}"
LONGEST_NAP_S = 0.05
"""How long the loop sleeps at most where nothing is to be done."""


def engine_arguments(model: str, limits: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's engine arguments for the limits of a run; `more` wins. vLLM keeps block 0 for itself."""
    blocks = limits["num_blocks"]
    watermark = math.ceil(limits["watermark"] * blocks) if blocks else 0
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "max_num_seqs": limits["max_num_seqs"],
        "max_num_batched_tokens": limits["max_num_batched_tokens"],
        "max_model_len": limits["max_model_len"],
        "block_size": limits["block_size"],
        "enable_prefix_caching": limits["enable_prefix_caching"],
        "num_gpu_blocks_override": blocks + 1 if blocks else None,
        "watermark": (watermark + 0.5) / (blocks + 1) if blocks and watermark else limits["watermark"],
        "scheduler_cls": "schedlab.framework.vllm.scheduler.steered",
        "disable_log_stats": True,
        **more,
    }


class Replay:
    """A vLLM engine that serves a source; what `Experiment` asks of an engine."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is looked at from here
        self._arguments = dict(arguments)
        self._llm: Any = None

    def start(self, policy: Policy, predictor: Predictor | None, on_fault: str, publish: str) -> int:
        """Load the model; returns the blocks that a policy has."""
        Steered.settings = Settings(policy, predictor, publish, on_fault)
        try:
            self._llm = LLMEngine.from_engine_args(EngineArgs(**self._arguments))
        except SchedlabError:
            raise
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise ConfigError(f"engine=vllm: vLLM does not start: {' '.join(str(error).split())}") from error
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    def attach(self, source: Source, config: EngineConfig, clock: Clock, recorder: Recorder) -> Replay:
        """What to serve, under which limits, and who is told."""
        self.source, self.config, self.clock, self.recorder = source, config, clock, recorder
        self._scheduler.record(Journal(recorder, self._finished))
        self._aborts: list[tuple[int, int, EngineRequest]] = []
        self._served: dict[str, int] = {}
        self._demanded: dict[str, int] = {}
        self._is_last_told = False
        return self

    # -- what is shown while it runs --

    @property
    def now_ns(self) -> int:
        return self.clock.now()

    @property
    def ledger(self) -> VllmBooks:
        """The books, as a run's progress reads them."""
        books: VllmBooks = self._scheduler._books
        return books

    @property
    def num_unfinished(self) -> int:
        return len(self.ledger.theirs)

    def close(self) -> None:
        """vLLM keeps its memory as long as its process lasts, and shuts its scheduler down when that ends: it must find
        no journal to close then, as records are the run's.
        """
        self._scheduler.record(None)

    def counters(self) -> dict[str, int]:
        """What a policy asked for and vLLM did otherwise."""
        counters: dict[str, int] = self._scheduler.counters()
        return counters

    # -- the loop --

    def run(self, on_step: Callable[[Any], None] | None = None) -> None:
        """Until the source has no more and every request has ended."""
        self._scheduler.start_clock(self.clock)
        while self._boundary():
            if on_step is not None:
                on_step(self)

    def _boundary(self) -> bool:
        now = self._scheduler.boundary_ns = self.clock.now()
        self._take_aborts(now)
        self._take_arrivals(now)
        self._take_aborts(now)
        if self._llm.has_unfinished_requests() or self._scheduler.num_flying:
            self._check_awake()
            self._llm.step()
            return True
        due = self._next_event_ns()
        if due == math.inf:
            return False
        self.clock.idle_until(min(int(due), self.clock.now() + int(LONGEST_NAP_S * 1e9)))
        return True

    def _next_event_ns(self) -> float:
        arrival = self.source.peek()
        abort = self._aborts[0][0] if self._aborts else math.inf
        return abort if arrival is None else min(arrival, abort)

    def _check_awake(self) -> None:
        """Nothing but an arrival or an abort wakes a policy that idles without end."""
        if self._scheduler.sleeps_for_ever and self._next_event_ns() == math.inf:
            raise PolicyStalled(self._scheduler.policy_name, f"idle_until(inf s) at {self.now_ns / 1e9} s never wakes")

    def _take_arrivals(self, now: int) -> None:
        for request in self.source.pop(now):
            self._submit(request, now)
        if not self._is_last_told and self.source.peek() is None:
            self._is_last_told = True
            served = dict(self._served)
            for request in self.ledger.theirs:
                served[request.client] = served.get(request.client, 0) + tokens_served(request)
            self.recorder.last_arrival(now, served, self._demanded)

    def _submit(self, request: EngineRequest, now: int) -> None:
        reason = never_fits(request, self.config)
        if reason is not None:
            request.mirror("rejected", request.num_tokens, 0)
            request.reason, request.finished_ns = reason, now
            self.recorder.request(request)
            self.source.finished(request, now)
            return
        set_limits(request, self.config)
        self._demanded[request.client] = self._demanded.get(request.client, 0) + request.final_tokens
        tokens = request.content.tokens(request.num_prompt_tokens, self._vocab_size).tolist()
        self._scheduler.offer(request)
        self._llm.add_request(request.request_id, {"prompt_token_ids": tokens}, sampling_params(request))
        for due_ns in leaving_times(request):
            heapq.heappush(self._aborts, (due_ns, request.order, request))

    @property
    def _vocab_size(self) -> int:
        return int(self._llm.model_config.get_vocab_size())

    def _take_aborts(self, now: int) -> None:
        while self._aborts and self._aborts[0][0] <= now:
            due_ns, _, request = heapq.heappop(self._aborts)
            if request in self.ledger.theirs and leaves(request, due_ns):
                request.reason = why_it_leaves(request, due_ns)
                self._llm.abort_request([request.request_id])

    def _finished(self, request: EngineRequest, now_ns: int) -> None:
        self._served[request.client] = self._served.get(request.client, 0) + tokens_served(request)
        self._is_last_told = False  # it may bring another arrival
        self.source.finished(request, now_ns)


def sampling_params(request: EngineRequest) -> Any:
    """vLLM's parameters of a request: a recorded length is forced, a live request ends at a stop token or its limit."""
    ours, length = request.sampling, request.final_tokens - request.num_prompt_tokens
    keys: dict[str, Any] = {"temperature": 0.0}
    if ours is not None:
        if ours.stop and request.recorded_output_tokens is None:
            raise ConfigError(f"request {request.request_id}: engine=vllm ends requests by tokens, found stop strings")
        keys = {"temperature": ours.temperature, "top_p": ours.top_p, "top_k": ours.top_k or -1, "seed": ours.seed}
    if request.recorded_output_tokens is not None:
        keys["ignore_eos"] = True
    elif ours is not None:
        keys |= {"ignore_eos": ours.ignore_eos, "stop_token_ids": list(ours.stop_token_ids)}
    extras = {"schedlab_offered": request.request_id}
    return SamplingParams(max_tokens=length, detokenize=False, extra_args=extras, **keys)
