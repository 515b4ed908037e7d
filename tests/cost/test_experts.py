"""What experts cost: how many a step reads, what that takes, and that stepping, jumping and bounds agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlab.framework.cost.bounds import Prices
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.estimate import estimate
from schedlab.framework.cost.fit import Point, fit
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.routing import Routing
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

Load = Callable[[str], ModelConfig]


def test_distinct_experts_of_128_of_which_a_token_takes_8() -> None:
    found = [Routing(128, 8).distinct(tokens) / 128 for tokens in (1, 16, 256)]
    assert found == pytest.approx([0.0625, 0.644, 1.0], abs=5e-4)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 3), st.integers(1, 200))
def test_distinct_experts_by_drawing_them(experts: int, chosen: int, skew: float, tokens: int) -> None:
    """Every expert is drawn by its own probability, as the formula says; these add up to what a token chooses."""
    routing = Routing(experts, min(chosen, experts), skew)
    one, many = routing.distinct(1), routing.distinct(tokens)
    assert one == pytest.approx(routing.chosen)
    assert one - 1e-9 <= many <= experts + 1e-9
    assert many <= Routing(experts, routing.chosen).distinct(tokens) + 1e-9, "an uneven choice reads fewer"
    more = routing.distinct(tokens + 1)
    assert many - 1e-9 <= more and more - many <= many - routing.distinct(tokens - 1) + 1e-9, "concave"


def test_distinct_experts_of_simulated_tokens() -> None:
    rng, routing = np.random.default_rng(0), Routing(16, 3)
    seen = [len({e for _ in range(6) for e in rng.permutation(16)[:3]}) for _ in range(3000)]
    assert np.mean(seen) == pytest.approx(routing.distinct(6), rel=0.01)


def test_milliseconds_of_a_decode_step(model: Load, h100: Hardware) -> None:
    """Weights of a step over the bandwidth, by hand: attention, router and head once, and the experts that are hit."""
    shape = model("qwen3-30b-a3b")
    per_layer = 2048 * (2 * 32 * 128 + 2 * 4 * 128 + 128)
    for decodes in (1, 16, 256):
        hit = 128 * (1 - (1 - 8 / 128) ** decodes)
        expected = 2 * 48 * (per_layer + hit * 3 * 2048 * 768) / h100.bandwidth("memory")
        parts = {
            timed.part.name: timed
            for timed in estimate(Roofline(shape), h100, Work.total([Work.decode(1)] * decodes)).parts
        }
        assert parts["linears"].seconds + parts["experts"].seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "published_gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_experts_may_be_held_in_fewer_bits_than_the_rest(name: str, published_gib: float, model: Load) -> None:
    """Checkpoint sizes of arXiv:2508.10925, table 1, and the same with everything in 16 bits."""
    assert Roofline(model(name)).weight_bytes / 2**30 == pytest.approx(published_gib, abs=0.05)
    alike = replace(model(name), expert_dtype=None)
    assert Roofline(alike).weight_bytes == 2 * alike.num_parameters()
    with pytest.raises(ConfigError, match=r"model\.expert_dtype: expected one of fp32, .*, found nf4"):
        Roofline(replace(alike, expert_dtype="nf4"))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gemma-3-27b"])
def test_weights_weigh_what_there_are_of_them(name: str, model: Load) -> None:
    assert Roofline(model(name)).weight_bytes == 2 * model(name).num_parameters()


@given(st.integers(1, 4000), st.integers(0, 64), st.integers(0, 100_000))
def test_coefficients_are_the_roofline(tokens: int, rows: int, context: int) -> None:
    shape = replace(SMALL, routing_skew=0.7, shared_intermediate_size=64)
    work = Work(tokens, rows, min(tokens, 9), 1, 40 * tokens, tokens, context)
    exact = estimate(Roofline(shape), MACHINE, work).seconds * 1e9
    assert Coefficients.from_roofline(Roofline(shape), MACHINE).total_ns(work) == pytest.approx(exact, rel=1e-6)


def test_a_step_of_decodes_is_a_constant_and_a_slope(model: Load, h100: Hardware) -> None:
    """So that jumps stay exact."""
    executor = CostExecutor(model("qwen3-30b-a3b"), h100)
    assert executor.jumpable
    cost = executor.decode_cost(16)
    for context in (16, 1000, 100_000):
        exact = executor.coefficients.total_ns(Work(16, 16, 16, decode_keys=context))
        assert abs(cost.duration_ns(context) - exact) <= 1


@given(st.lists(st.integers(1, 512), min_size=1, max_size=20), st.floats(0, 2))
def test_no_split_of_tokens_into_steps_is_cheaper_than_its_bounds(steps: list[int], skew: float) -> None:
    coefficients = Coefficients.from_roofline(Roofline(replace(SMALL, routing_skew=skew)), MACHINE)
    prices = Prices(replace(coefficients, linear_ns=1e-9), 512, 64)

    def linears(tokens: int) -> float:
        c = prices.coefficients
        hinge = c.weights_ns + c.linear_ns * max(0.0, tokens - c.linear_ridge)
        return hinge + max(c.experts_read_ns(tokens), c.expert_token_ns * tokens)

    cost, total = sum(map(linears, steps)), np.array([sum(steps)])
    assert prices.token_ns * sum(steps) <= (cost + prices.coefficients.token_ns * sum(steps)) * (1 + 1e-9)
    assert prices.alone_linears_ns(total, np.array([-(-sum(steps) // 512)]))[0] <= cost * (1 + 1e-9)


def test_a_fit_finds_the_saturating_term() -> None:
    """From steps of 1, 4, 16 and 64 decodes, of prompts, and of both."""
    planted = Coefficients(
        step_ns=40_000, request_ns=500, token_ns=900, head_ns=2_000, row_ns=300, pair_ns=1.5, key_ns=2.0,
        decode_key_ns=3.0, experts_ns=250_000, num_experts=16, experts_per_token=4,
    )  # fmt: skip
    works = [Work(n, n, n, decode_keys=n * c) for n in (1, 2, 4, 8, 16, 32, 64) for c in (10, 100, 1000)]
    works += [Work.prefill(start, count) for start in (0, 200) for count in (2, 16, 64, 200, 500)]
    works += [a + b for a in works[:9] for b in works[-3:]]
    found = fit([Point(work, round(planted.total_ns(work))) for work in works], Routing(16, 4))
    for work in works:
        assert found.total_ns(work) == pytest.approx(planted.total_ns(work), rel=0.02)
    assert found.experts_ns == pytest.approx(planted.experts_ns, rel=0.1)


def test_what_a_split_must_divide(model: Load) -> None:
    said = "5 does not divide 32 attention heads, 4 key-value heads and an intermediate size of 768"
    with pytest.raises(ConfigError, match=said):
        Roofline(model("qwen3-30b-a3b"), tensor_parallel=5)
    whole, half = Roofline(model("qwen3-30b-a3b")), Roofline(model("qwen3-30b-a3b"), tensor_parallel=2)
    assert 2 * half.expert_elements == whole.expert_elements


def test_whole_experts_on_every_device_of_the_group(model: Load) -> None:
    """As many bytes and FLOPs as slices of all have where tokens choose evenly and many; fewer bytes of few tokens."""
    sliced = Roofline(model("qwen3-30b-a3b"), tensor_parallel=4)
    whole = Roofline(model("qwen3-30b-a3b"), tensor_parallel=4, expert_parallel=4)
    assert whole.weight_bytes == sliced.weight_bytes
    for tokens in (1, 7, 4096):
        one, other = sliced.experts(Work(tokens=tokens)), whole.experts(Work(tokens=tokens))
        assert (other.flops, other.bytes) == (one.flops, pytest.approx(one.bytes))
    assert whole.exchange(Work(tokens=9)).bytes == 0, "each device of the group has every token"
    assert whole.collectives(Work(tokens=9)) == sliced.collectives(Work(tokens=9))


def test_experts_shared_with_other_engines(model: Load, hardware: Callable[[str], Hardware]) -> None:
    """DeepSeek-V3 over 32 devices, 8 of each engine: by hand from 58 layers of 256 experts of 3 · 7168 · 2048."""
    shape = model("deepseek-v3")
    line = Roofline(shape, "fp8", "bf16", tensor_parallel=8, expert_parallel=32)
    held = Roofline(shape, "fp8", "bf16", tensor_parallel=8).weight_bytes - line.weight_bytes
    assert held == 58 * 3 * 7168 * 2048 * (256 // 8 - 256 // 32), "8 whole experts in place of 32 wholes' worth"
    work = Work(tokens=64)
    hit = 8 * (1 - (1 - 8 / 256) ** (64 * 4))
    assert line.experts(work).bytes == pytest.approx(58 * hit * 3 * 7168 * 2048)
    assert line.experts(work).flops == pytest.approx(2 * 64 * 8 / 8 * 58 * 3 * 7168 * 2048), "as many come as go"
    sent = 64 / 8 * 8 * 7168 * 2 * 31 / 32  # bytes of a device's tokens, a copy for each chosen expert elsewhere
    assert line.exchange(work).bytes == pytest.approx(58 * 2 * sent)
    assert line.collectives(work).bytes == pytest.approx(((2 * 61 - 58) * 2 * 64 * 7168 * 2) * 7 / 8, abs=2), (
        "one reduction of a layer that exchanges"
    )
    h200 = hardware("h200")
    exact = estimate(line, h200, Work(64, 64, 64, decode_keys=64_000)).seconds * 1e9
    coefficients = Coefficients.from_roofline(line, h200)
    assert coefficients.total_ns(Work(64, 64, 64, decode_keys=64_000)) == pytest.approx(exact, rel=1e-6)
    assert CostExecutor(shape, h200, weight_dtype="fp8", tensor_parallel=8, expert_parallel=32).jumpable


@given(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0, 2), st.integers(1, 64))
def test_the_busiest_device_has_a_mean_share_or_more(devices: int, skew: float, tokens: int) -> None:
    """It has at least a mean device's experts, at most all, and no device has more by the probabilities themselves."""
    routing, all_of_them = Routing(16, 3, skew, devices), Routing(16, 3, skew)
    assert all_of_them.distinct(tokens) / devices <= routing.distinct(tokens) * (1 + 1e-9)
    assert routing.distinct(tokens) <= min(16 / devices, all_of_them.distinct(tokens)) * (1 + 1e-9)
    assert 3 / devices <= routing.busiest * (1 + 1e-9)
    assert Routing(16, 3, skew, devices, 5).distinct(tokens) == routing.distinct(5 * tokens)
    assert Routing(16, 3, skew, devices, 5).busiest == pytest.approx(5 * routing.busiest)


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "expert_parallel"),
    [("qwen3-30b-a3b", 4, 2), ("qwen3-30b-a3b", 1, 3), ("qwen3-30b-a3b", 1, 0), ("llama3.1-8b", 1, 2)],
)
def test_devices_that_experts_can_lie_on(name: str, tensor_parallel: int, expert_parallel: int, model: Load) -> None:
    said = rf"expert_parallel: expected 1, or a multiple of .* found {expert_parallel}"
    with pytest.raises(ConfigError, match=said):
        Roofline(model(name), tensor_parallel=tensor_parallel, expert_parallel=expert_parallel)


def test_a_machine_without_links_holds_its_experts_alone(model: Load, hardware: Callable[[str], Hardware]) -> None:
    line = Roofline(model("olmoe-1b-7b"), expert_parallel=2)
    with pytest.raises(ConfigError, match="expert_parallel: expected 1 on hardware=cpu, found 2"):
        estimate(line, hardware("cpu"), Work.decode(1))


def test_latent_attention(model: Load, hardware: Callable[[str], Hardware]) -> None:
    """DeepSeek-V3: parameters and active ones as published; 61 layers of 512 + 64 numbers a token, on every device."""
    shape = model("deepseek-v3")
    assert shape.num_parameters() == pytest.approx(671e9, rel=1e-3)
    assert shape.num_parameters(active=True) == pytest.approx(37e9, rel=0.02)
    assert Roofline(shape).kv_bytes_per_token == Roofline(shape, tensor_parallel=8).kv_bytes_per_token == 70_272
    line = Roofline(shape, "fp8", "bf16", tensor_parallel=8)
    assert 8 * line.weight_bytes == pytest.approx(671e9, rel=0.04)
    decode = line.decode_attention(Work(decode_keys=1))
    assert decode.flops == 2 * 61 * 16 * (2 * 512 + 64) and decode.bytes == 70_272
    prefill = line.prefill_attention(Work(prefill_pairs=1, prefill_keys=1))
    assert prefill.flops == 2 * 61 * 16 * (128 + 64 + 128)
    assert CostExecutor(shape, hardware("h200"), weight_dtype="fp8", tensor_parallel=8).cache_bytes() > 0


def test_weights_of_layers_without_experts(model: Load) -> None:
    shape = model("deepseek-v3")
    assert Roofline(shape).weight_bytes == pytest.approx(2 * shape.num_parameters(), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "context", "uniform", "windowed"),
    [("gemma-3-27b", 8192, 3968, 1056), ("gemma-3-27b", 32768, 15872, 2976), ("gpt-oss-20b", 8192, 384, 195)],
)
def test_what_pools_by_window_would_save(name: str, context: int, uniform: int, windowed: int, model: Load) -> None:
    """MiB of a sequence."""
    line = Roofline(model(name))
    assert line.kv_bytes_per_token * context == uniform << 20
    assert line.windowed_kv_bytes(context) == windowed << 20


SMALL = ModelConfig(
    architecture="qwen3_moe", hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, intermediate_size=1, vocab_size=1000, max_position_embeddings=4096, num_experts=16,
    num_experts_per_tok=4, moe_intermediate_size=128,
)  # fmt: skip
MACHINE = Hardware(
    "lab", {"bf16": 1.0, "fp32": 0.5}, 10.0, 20.0, 5.0, 0.0, 0.8, 0.5, 0.9, 0.8, kernel_us=1.0, step_us=10.0,
    request_us=1.0, sequence_us=0.0, scheduler_us=5.0, scheduler_request_us=0.5, collective_us=0.0, copy_us=0.0,
)  # fmt: skip
