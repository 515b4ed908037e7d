"""The virtual clock's executor: one function for stepping and jumping, mixed steps, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.framework.batch import Batch
from schedlab.framework.cost.coefficients import Coefficients, DecodeCost
from schedlab.framework.cost.estimate import estimate, largest
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="module")
def executor(llama: ModelConfig, h100: Hardware) -> CostExecutor:
    executor = CostExecutor(llama, h100)
    executor.allocate(1000, 16, 1000, 128)
    return executor


# ---- decodes ----


@settings(max_examples=60)
@given(contexts=st.lists(st.integers(1, 50_000), min_size=1, max_size=40))
def test_decodes_cost_what_the_sum_of_their_contexts_costs(
    executor: CostExecutor, make_batch: MakeBatch, contexts: list[int]
) -> None:
    n, total = len(contexts), sum(contexts)
    even = [total // n + (i < total % n) for i in range(n)]
    duration = executor.decode_cost(n).duration_ns(total)
    assert executor.execute(make_batch(contexts=contexts)).duration_ns == duration
    assert executor.execute(make_batch(contexts=even)).duration_ns == duration
    modelled = estimate(executor.roofline, executor.hardware, Work.total(map(Work.decode, contexts)))
    assert duration == pytest.approx(modelled.seconds * 1e9, abs=1.0)


@settings(max_examples=40)
@given(n=st.integers(1, 1024), context=st.integers(1, 10**7), steps=st.integers(1, 300))
def test_a_jump_takes_the_sum_of_its_steps(executor: CostExecutor, n: int, context: int, steps: int) -> None:
    cost = executor.decode_cost(n)
    assert executor.decode_cost(n) is cost
    stepped = [cost.duration_ns(context + i * n) for i in range(steps)]
    assert all(type(duration) is int for duration in stepped)
    assert stepped == sorted(stepped)
    assert cost.durations_ns(context, n, steps).tolist() == stepped


@settings(max_examples=60)
@given(n=st.integers(1, 2048), context=st.integers(0, 10**8))
def test_bound_of_decodes_is_the_largest_share(executor: CostExecutor, n: int, context: int) -> None:
    shares = executor.coefficients.shares_ns(n, n, n, 0, 0, 0, context, 0)
    assert dict(zip(("compute", "memory", "overhead"), shares, strict=True))[
        executor.decode_cost(n).bound(context)
    ] == pytest.approx(max(shares))


rates = st.floats(0, 1e4)


@settings(max_examples=100)
@given(rates, rates, rates, rates, rates, st.booleans(), st.integers(0, 10**4))
def test_bound_of_measured_decodes_is_the_largest_share(
    weights: float, step: float, read: float, explained_read: float, linear: float, computes: bool, context: int
) -> None:
    """The measured cost may grow faster or slower than what explains it; what is left over is overhead."""
    measured = Coefficients(step_ns=step + weights, decode_key_ns=read)
    explained = Coefficients(
        weights_ns=weights, linear_ns=linear, linear_ridge=4.0, decode_key_ns=explained_read, decode_computes=computes
    )
    compute, memory, _ = explained.shares_ns(8, 8, 8, 0, 0, 0, context, 0)
    overhead = measured.total_ns(Work(8, 8, 8, 0, 0, 0, context)) - compute - memory
    shares = {"compute": compute, "memory": memory, "overhead": overhead}
    bound = DecodeCost(measured, explained, 8).bound(context)
    assert shares[bound] == pytest.approx(max(shares.values()))


# ---- mixed steps ----

chunks = st.tuples(st.integers(0, 8_000), st.integers(1, 2_048), st.integers(0, 100)).map(
    lambda chunk: (chunk[0], chunk[1], chunk[0] + chunk[1] + chunk[2] // 50)  # half of them are final
)


@settings(max_examples=60)
@given(
    prefills=st.lists(chunks, min_size=1, max_size=4), contexts=st.lists(st.integers(1, 9_000), max_size=20),
    copies=st.integers(0, 5),
)  # fmt: skip
def test_a_mixed_step_is_the_roofline_of_its_work(
    executor: CostExecutor,
    make_batch: MakeBatch,
    prefills: list[tuple[int, int, int]],
    contexts: list[int],
    copies: int,
) -> None:
    batch = make_batch(prefills, contexts, copies)
    result = executor.execute(batch)
    modelled = estimate(executor.roofline, executor.hardware, Work.of_batch(batch, executor.block_bytes(16)))
    assert result.tokens is None and type(result.duration_ns) is int
    assert result.duration_ns == pytest.approx(modelled.seconds * 1e9, abs=1.0)
    assert modelled.shares_s[result.bound] == pytest.approx(max(modelled.shares_s.values()))  # type: ignore[index]


def test_copies_take_the_host_link(executor: CostExecutor, make_batch: MakeBatch, h100: Hardware) -> None:
    idle = executor.execute(make_batch(copies=8)).duration_ns
    link = 8 * 16 * 131_072 / (64e9 * h100.link_efficiency) * 1e9
    assert idle == pytest.approx(link + (h100.copy_us + h100.scheduler_us) * 1e3, abs=1.0)
    without, with_copies = (executor.execute(make_batch(contexts=[500], copies=n)).duration_ns for n in (0, 8))
    assert with_copies - without == pytest.approx(link + h100.copy_us * 1e3, abs=2.0)


def test_the_schedulers_time_is_a_modelled_constant(llama: ModelConfig, h100: Hardware, make_batch: MakeBatch) -> None:
    slower = replace(h100, scheduler_us=h100.scheduler_us + 100, scheduler_request_us=h100.scheduler_request_us + 1)
    batch = make_batch(contexts=[100] * 7)
    fast, slow = (CostExecutor(llama, machine).execute(batch).duration_ns for machine in (h100, slower))
    assert slow - fast == pytest.approx(107_000, abs=1.0)


def test_a_sliding_window_is_stepped(
    model: Callable[[str], ModelConfig], h100: Hardware, make_batch: MakeBatch
) -> None:
    executor = CostExecutor(model("mistral-7b-v0.1"), h100)
    assert not executor.jumpable
    short, long = make_batch(contexts=[4_000, 4_000]), make_batch(contexts=[1_000, 7_000])
    assert executor.execute(short).duration_ns > executor.execute(long).duration_ns
    seen = Work.total([Work.decode(1_000), Work.decode(4_096)])
    modelled = estimate(executor.roofline, h100, seen).seconds
    assert executor.execute(long).duration_ns == pytest.approx(modelled * 1e9, abs=1.0)


def test_a_chain_takes_the_hosts_time_once(executor: CostExecutor, h100: Hardware, make_batch: MakeBatch) -> None:
    cost, batch = executor.decode_cost(8), make_batch(contexts=[1000] * 8)
    batch.steps = 4
    single = sum(cost.duration_ns(8000 + 8 * i) for i in range(4))
    host_us = h100.step_us + h100.scheduler_us + 8 * (h100.request_us + h100.scheduler_request_us)
    assert executor.execute(batch).duration_ns == cost.chain_ns(8000, 8, 4)
    assert single - cost.chain_ns(8000, 8, 4) == pytest.approx(3 * host_us * 1e3, abs=4)
    assert cost.chain_ns(8000, 8, 1) == cost.duration_ns(8000)


def test_a_further_step_takes_at_least_what_explains_it(executor: CostExecutor) -> None:
    """However much of a step is said to be the host's; a measured profile does not say."""
    explained = executor.explained
    greedy = DecodeCost(replace(explained, host_ns=1e12), explained, 8)
    compute, memory, _ = explained.shares_ns(8, 8, 8, 0, 0, 0, 8008, 0)
    assert greedy.chain_ns(8000, 8, 2) - greedy.duration_ns(8000) == pytest.approx(compute + memory, abs=2)
    silent = DecodeCost(replace(explained, host_ns=0.0, host_request_ns=0.0), explained, 8)
    assert silent.chain_ns(8000, 8, 2) == silent.duration_ns(8000) + silent.duration_ns(8008)


def test_a_windowed_chain_reads_what_its_steps_would(
    model: Callable[[str], ModelConfig], h100: Hardware, make_batch: MakeBatch
) -> None:
    executor = CostExecutor(model("mistral-7b-v0.1"), replace(h100, step_us=0, scheduler_us=0, scheduler_request_us=0,
                                                              request_us=0))  # fmt: skip
    chain = make_batch(contexts=[4_094, 7_000])
    chain.steps = 4
    single = sum(executor.execute(make_batch(contexts=[4_094 + i, 7_000 + i])).duration_ns for i in range(4))
    assert executor.execute(chain).duration_ns == pytest.approx(single, abs=8)


def test_a_small_model_alone_waits_for_overhead(smollm: ModelConfig, h100: Hardware, make_batch: MakeBatch) -> None:
    assert CostExecutor(smollm, h100).execute(make_batch(contexts=[500])).bound == "overhead"


# ---- memory ----


def test_blocks_are_what_weights_and_activations_leave(llama: ModelConfig, h100: Hardware) -> None:
    executor = CostExecutor(llama, h100)
    used = 2 * llama.num_parameters() + Roofline(llama).activation_bytes(2048, 128)
    assert executor.block_bytes(16) == 16 * 131_072
    assert executor.kv_blocks(16, 131_072) == int((0.9 * 80e9 - used) // (16 * 131_072))
    half = CostExecutor(llama, h100, kv_cache_dtype="fp8")
    assert half.kv_blocks(16, 131_072) in range(
        2 * executor.kv_blocks(16, 131_072), 2 * executor.kv_blocks(16, 131_072) + 2
    )


def test_a_model_that_does_not_fit_says_by_how_much(llama: ModelConfig, h100: Hardware) -> None:
    large = replace(
        llama, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672, dtype="bfloat16"
    )
    executor = CostExecutor(large, h100)
    excess = (executor.roofline.weight_bytes + executor.roofline.activation_bytes(2048, 128) - 0.9 * 80e9) / 2**30
    with pytest.raises(
        ConfigError, match=f"does not fit on hardware=h100: .* by {excess:.1f} GiB; raise tensor_parallel"
    ):
        executor.kv_blocks(16, 8192)
    assert CostExecutor(large, h100, tensor_parallel=4).kv_blocks(16, 8192) > 0


def test_a_pool_smaller_than_one_request_is_refused(llama: ModelConfig, h100: Hardware) -> None:
    tight = replace(h100, memory_gb=20)
    executor = CostExecutor(llama, tight)
    left = executor.cache_bytes() // (16 * 131_072) * 16
    with pytest.raises(ConfigError, match=f"max_model_len: 131072 tokens need .* expected at most {left}"):
        executor.kv_blocks(16, 131_072)
    assert executor.kv_blocks(16, left) * 16 == left


def test_blocks_beyond_memory_are_refused(llama: ModelConfig, h100: Hardware) -> None:
    executor = CostExecutor(llama, h100)
    blocks = executor.kv_blocks(16, 8192)
    executor.allocate(blocks, 16, 0, 128)
    with pytest.raises(ConfigError, match=r"num_blocks: .* blocks of 16 exceed .* by 2.0 GiB"):
        executor.allocate(blocks + 1024, 16, 0, 128)


def test_prompts_are_their_contents_tokens(executor: CostExecutor, make_batch: MakeBatch) -> None:
    request = make_batch(contexts=[0]).decodes[0]
    assert executor.prompt_token_ids(request).dtype == np.int64
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        CostExecutor(executor.roofline.model, executor.hardware, gpu_memory_utilization=1.5)


def test_equal_shares_have_an_order() -> None:
    assert (largest(1, 1, 1), largest(0, 1, 1), largest(0, 0, 1)) == ("compute", "memory", "overhead")
