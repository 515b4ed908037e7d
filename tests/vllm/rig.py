"""vLLM's scheduler without a model: the worker is a fake KV memory, in which a wrong block changes the tokens.

The worker learns block tables from vLLM's scheduler output alone, as vLLM's own does. Each position's value derives
from the value before it, read through the table, and its token; the next token derives from the last value.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not importable here; `make test-vllm` makes environments that have it")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import ConfigError  # noqa: F401 - for the tests
from schedlab.framework.predictors import MaxPredictor
from schedlab.framework.request import EngineRequest
from schedlab.framework.request import SamplingParams as OurSampling
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.framework.stub import StubExecutor
from schedlab.framework.vllm.journal import Journal
from schedlab.framework.vllm.requests import read_extras  # noqa: F401 - for the tests
from schedlab.framework.vllm.scheduler import Asynchronous, Synchronous
from schedlab.framework.vllm.settings import Settings

ABORTED = RequestStatus.FINISHED_ABORTED
BLOCK = 32
VOCABULARY = 512
MODEL_LEN = 2048
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "max_position_embeddings": MODEL_LEN, "torch_dtype": "float32", "hidden_act": "silu", "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


@dataclass
class Asked:
    """A request of a load: `tokens` to generate, at the latest."""

    name: str
    prompt: list[int]
    tokens: int
    extras: dict = field(default_factory=dict)
    stop: int | None = None  # a token that ends it


def load_of(seed: int, number: int, *, shared: bool = True, longest: int = 300, outputs: int = 24) -> list[Asked]:
    """Prompts of up to `longest` tokens, two of three of them after one of three common prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(2, VOCABULARY, 96).tolist() for _ in range(3)]
    asked = []
    for i in range(number):
        own = rng.integers(2, VOCABULARY, int(rng.integers(1, longest - 96))).tolist()
        prefix = prefixes[int(rng.integers(3))] if shared and rng.random() < 2 / 3 else []
        asked.append(Asked(f"r{i}", prefix + own, int(rng.integers(1, outputs))))
    return asked


# ---- the memory ----


def next_value(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1) % (1 << 61)


def token_of(value: int) -> int:
    return 2 + (value >> 7) % (VOCABULARY - 2)


def stream_of(asked: Asked) -> list[int]:
    """The tokens that `asked` must get, whatever runs beside it."""
    value, out = 1, []
    for token in asked.prompt:
        value = next_value(value, token)
    while len(out) < asked.tokens and (not out or out[-1] != asked.stop):
        out.append(token_of(value))
        value = next_value(value, out[-1])
    return out


class Worker:
    """What vLLM's model runner does with a scheduler output; `execute` returns its output."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}

    def execute(self, out) -> ModelRunnerOutput:
        for request_id in out.finished_req_ids:
            self.tables.pop(request_id, None)
            self.tokens.pop(request_id, None)
        computed = self._take_tables(out)
        ids, drawn = list(out.num_scheduled_tokens), []
        for request_id in ids:
            drawn.append(self._compute(request_id, computed[request_id], out.num_scheduled_tokens[request_id]))
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={request_id: i for i, request_id in enumerate(ids)}, sampled_token_ids=drawn,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip

    def _take_tables(self, out) -> dict[str, int]:
        computed = {}
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            self.tokens.setdefault(new.req_id, list(new.prompt_token_ids))
            computed[new.req_id] = new.num_computed_tokens
        cached = out.scheduled_cached_reqs
        for request_id, blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = []
            self.tables[request_id] += blocks[0] if blocks else []
            computed[request_id] = start
        return computed

    def _compute(self, request_id: str, start: int, count: int) -> list[int]:
        table, tokens = self.tables[request_id], self.tokens[request_id]
        value = self.memory[self._slot(table, start - 1)] if start else 1
        for position in range(start, start + count):
            value = next_value(value, tokens[position])
            self.memory[self._slot(table, position)] = value
        if start + count < len(tokens):
            return []
        tokens.append(token_of(value))
        return [tokens[-1]]

    @staticmethod
    def _slot(table: list[int], position: int) -> int:
        assert 0 not in table, "block 0 is nobody's"
        return table[position // BLOCK] * BLOCK + position % BLOCK


# ---- vLLM's scheduler ----


@lru_cache
def model_config() -> ModelConfig:
    folder = Path(tempfile.mkdtemp(prefix="schedlab-vllm-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MODEL_LEN)


def arguments(
    *, blocks=199, caching=True, seqs=16, budget=256, is_async=False, additional_config=None, watermark=0.0, **more
) -> dict:
    """What vLLM's engine makes a scheduler with; `blocks` as schedlab counts them, without vLLM's block 0."""
    limits = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MODEL_LEN, enable_chunked_prefill=True,
        is_encoder_decoder=False, watermark=watermark, **more,
    )  # fmt: skip
    config = VllmConfig(
        model_config=model_config(), scheduler_config=limits, additional_config=additional_config or {},
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
    )  # fmt: skip
    config.scheduler_config.async_scheduling = is_async
    config.cache_config.num_gpu_blocks = blocks + 1
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return {
        "vllm_config": config, "kv_cache_config": kv, "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK, "log_stats": False,
    }  # fmt: skip


def predictor_for(policy):
    return MaxPredictor() if policy.needs_prediction else None


def scheduler_of(policy, /, *, predictor=None, publish="commit", on_fault="raise", journal=None, **keys):
    base = Asynchronous if keys.get("is_async") else Synchronous
    predictor = predictor or predictor_for(policy)
    of_run = type("OfRun", (base,), {"settings": Settings(policy, predictor, publish, on_fault), "journal": journal})
    return of_run(**arguments(**keys))


@lru_cache
def hasher():
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def request_of(asked: Asked) -> Request:
    stops = {"ignore_eos": True} if asked.stop is None else {"stop_token_ids": [asked.stop], "ignore_eos": True}
    extras = {f"schedlab_{key}": value for key, value in asked.extras.items()}
    params = SamplingParams(temperature=0, max_tokens=asked.tokens, extra_args=extras or None, **stops)
    return Request(asked.name, list(asked.prompt), params, None, block_hasher=hasher())


@dataclass
class Run:
    scheduler: object
    worker: Worker = field(default_factory=Worker)
    depth: int = 1  # steps in flight
    streams: dict = field(default_factory=dict)
    reasons: dict = field(default_factory=dict)
    flying: deque = field(default_factory=deque)
    outs: list = field(default_factory=list)

    def add(self, *load: Asked) -> None:
        for asked in load:
            self.streams[asked.name] = []
            self.scheduler.add_request(request_of(asked))

    def schedule(self):
        """One more step on its way."""
        out = self.scheduler.schedule()
        self.outs.append(out)
        self.flying.append((out, self.worker.execute(out)))
        return out

    def finish(self) -> None:
        """The oldest step on its way ends."""
        for group in self.scheduler.update_from_output(*self.flying.popleft()).values():
            for answer in group.outputs:
                self.streams[answer.request_id] += answer.new_token_ids
                if answer.finish_reason is not None:
                    self.reasons[answer.request_id] = str(answer.finish_reason)

    def step(self) -> None:
        self.schedule()
        while len(self.flying) >= self.depth:
            self.finish()

    def to_end(self, limit: int = 5000) -> Run:
        while self.scheduler.has_unfinished_requests() and limit:
            limit -= 1
            self.step()
        while self.flying:
            self.finish()
        assert limit, "the run does not end"
        return self

    def check(self, load: list[Asked]) -> None:
        """Every request got its tokens, and nothing is left behind."""
        for asked in load:
            assert self.streams[asked.name] == stream_of(asked), asked.name
        assert_empty(self.scheduler)


def assert_empty(scheduler) -> None:
    pool, books = scheduler.kv_cache_manager.block_pool, scheduler._books
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks[1:])
    assert not (scheduler.running or len(scheduler.waiting) or scheduler.requests)
    for kept in (books.theirs, books.ours, books.running, books.ending, books.blocked, books.waiting, books.rejected):
        assert not kept
    assert not books.decode_set.members and not books.prompts.requests
    hits = books.hits
    assert not (hits._watched or hits._watchers or hits._promised or hits._computing)
    assert not books.index._unfinished


def recorded(policy, load, **keys):
    """A finished run of `load`, all of it there at the start, and its tables."""
    keys.setdefault("blocks", 199)
    journal = Journal(Recorder(Measurement(keys.get("seqs", 16), keys["blocks"])))
    run = Run(scheduler_of(policy, journal=journal, **keys), depth=2 if keys.get("is_async") else 1)
    run.add(*load)
    run.to_end()
    return run, journal.close(0, {})


def on_stub(policy, load, *, blocks=199, caching=True, seqs=16, budget=256, predictor=None):
    """The same on schedlab's own engine; its tables."""
    config = EngineConfig(
        num_blocks=blocks, max_model_len=MODEL_LEN, max_num_seqs=seqs, max_num_batched_tokens=budget, block_size=BLOCK,
        enable_prefix_caching=caching, fast_forward=False, honour_holds=False,
    )  # fmt: skip
    requests = [
        EngineRequest(
            asked.name, 0, len(asked.prompt), TokenContent(asked.prompt), recorded_output_tokens=asked.tokens,
            max_tokens=asked.tokens, sampling=OurSampling(ignore_eos=True),
        )
        for asked in load
    ]  # fmt: skip
    recorder = Recorder(Measurement(seqs, blocks))
    Engine(policy, StubExecutor(VOCABULARY), ListSource(requests), config, VirtualClock(), recorder, predictor).run()
    return recorder.close(backlog_end=0, counters={})


def first_difference(a, b) -> int | None:
    """The index of the first step at which two runs decide differently."""
    columns = ("preempted", "grants", "decodes", "decodes_at")
    left, right = (list(zip(*(t.decisions[name] for name in columns), strict=True)) for t in (a, b))
    for i, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return int(a.decisions["index"][i])
    return None
