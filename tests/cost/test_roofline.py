"""FLOPs and bytes against golden figures, brute force and the parameter count; times against properties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.framework.batch import Batch
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.estimate import estimate
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import ModelShape, Part, Roofline, Work
from schedlab.framework.cost.windows import Mixed, attention_reach, layers_window, seen
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig

MODELS = ("tiny", "smollm2-135m", "qwen3-0.6b", "llama3.2-1b", "llama3.1-8b", "mistral-7b")

prefills = st.builds(
    Work.prefill, st.integers(0, 20_000), st.integers(1, 4_096), st.booleans(), st.sampled_from([None, 1, 100, 4_096])
)
decodes = st.builds(Work.decode, st.integers(1, 50_000))
copies = st.builds(Work, copied_bytes=st.integers(1, 10**9))
works = st.lists(prefills | decodes | copies, min_size=1, max_size=12).map(Work.total)


def by_name(roofline: Roofline, work: Work) -> dict[str, Part]:
    return {part.name: part for part in roofline.parts(work)}


# ---- golden figures ----


@pytest.mark.parametrize("rows", [1, 1024])
def test_one_matrix(llama: ModelConfig, rows: int) -> None:
    square = Roofline(replace(llama, hidden_size=4096, vocab_size=4096))
    part = square.logits(Work(tokens=rows, rows=rows))
    assert part.bytes == 33_554_432
    assert part.intensity == rows


def test_intensity_of_all_linears_is_the_number_of_tokens(llama: ModelConfig) -> None:
    assert Roofline(llama).linears(Work(tokens=77)).intensity == 77


def test_step_of_one_llama_token(llama: ModelConfig) -> None:
    """2 FLOPs for each weight but the embedding's, and 4 · 32 heads · 128 · 32 layers for each key."""
    parts = by_name(Roofline(llama), Work.decode(1000))
    products = llama.num_parameters() - llama.vocab_size * llama.hidden_size
    norms = (2 * llama.num_hidden_layers + 1) * llama.hidden_size
    assert parts["linears"].flops + parts["logits"].flops == 2 * (products - norms)
    assert parts["decode attention"].flops == 4 * 32 * 128 * 32 * 1000
    assert parts["decode attention"].bytes == 131_072 * 1000
    assert parts["kv write"].bytes == 131_072


@pytest.mark.parametrize("name", MODELS)
def test_sizes_agree_with_the_parameter_count(model: Callable[[str], ModelConfig], name: str) -> None:
    shape = model(name)
    satisfied: ModelShape = shape
    assert Roofline(satisfied).weight_bytes == 2 * shape.num_parameters()
    assert Roofline(shape, "fp32").weight_bytes == 4 * shape.num_parameters()
    assert Roofline(shape).kv_bytes_per_token == shape.kv_bytes_per_token("bfloat16")


# ---- attention over real contexts ----


@given(st.integers(0, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_attention_reach_by_brute_force(start: int, count: int, window: int | None) -> None:
    seen = [range(max(0, q - window + 1) if window else 0, q + 1) for q in range(start, start + count)]
    assert attention_reach(start, count, window) == (sum(map(len, seen)), len(set().union(*seen)))


@given(
    windows=st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=5),
    start=st.integers(0, 80), count=st.integers(1, 40),
)  # fmt: skip
def test_layers_of_several_windows_count_as_their_mean(windows: list[int | None], start: int, count: int) -> None:
    window = layers_window(tuple(windows))
    each = [attention_reach(start, count, one) for one in windows]
    for found, exact in zip(attention_reach(start, count, window), zip(*each, strict=True), strict=True):
        assert abs(found - sum(exact) / len(windows)) <= 0.5
    assert abs(seen(start + 1, window) - sum(seen(start + 1, one) for one in windows) / len(windows)) <= 0.5
    assert isinstance(window, Mixed) == (len(set(windows)) > 1)


@given(st.integers(1, 3_000), st.integers(1, 3_000), st.none() | st.integers(1, 2_000))
def test_chunks_cover_the_pairs_of_the_whole_prompt(first: int, second: int, window: int | None) -> None:
    whole, _ = attention_reach(0, first + second, window)
    assert attention_reach(0, first, window)[0] + attention_reach(first, second, window)[0] == whole


def test_only_due_rows_need_logits(llama: ModelConfig) -> None:
    inner = by_name(Roofline(llama), Work.prefill(0, 512, emits=False))
    assert (inner["logits"].flops, inner["logits"].bytes, inner["sampling"].bytes) == (0, 0, 0)
    assert by_name(Roofline(llama), Work.prefill(512, 512))["logits"].flops == 2 * 128_256 * 4096


def test_work_of_a_batch(make_batch: Callable[..., Batch]) -> None:
    batch = make_batch(prefills=[(0, 100, 300), (200, 100, 300)], contexts=[50, 60], copies=3)
    inner, final = Work.prefill(0, 100, emits=False), Work.prefill(200, 100)
    expected = Work.total([inner, final, Work.decode(50), Work.decode(60), Work(copied_bytes=3 * 4096)])
    assert Work.of_batch(batch, 4096) == expected
    windowed = Work.total([
        Work.prefill(0, 100, False, 55), Work.prefill(200, 100, True, 55), Work.decode(50, 55), Work.decode(60, 55),
        Work(copied_bytes=3 * 4096),
    ])  # fmt: skip
    assert Work.of_batch(batch, 4096, window=55) == windowed


# ---- properties ----


@settings(max_examples=60)
@given(a=works, b=works)
def test_parts_add_up_but_for_weights_read_once(llama: ModelConfig, a: Work, b: Work) -> None:
    roofline = Roofline(llama)
    for both, one, other in zip(roofline.parts(a + b), roofline.parts(a), roofline.parts(b), strict=True):
        assert both.flops == one.flops + other.flops
        if both.name in ("linears", "logits"):
            assert both.bytes == max(one.bytes, other.bytes)
        else:
            assert both.bytes == one.bytes + other.bytes


@settings(max_examples=60)
@given(work=works, more=prefills | decodes)
def test_more_work_never_takes_less_time(llama: ModelConfig, h100: Hardware, work: Work, more: Work) -> None:
    assert estimate(Roofline(llama), h100, work + more).seconds >= estimate(Roofline(llama), h100, work).seconds


@settings(max_examples=60)
@given(work=works)
def test_a_step_is_its_parts_and_its_overhead(llama: ModelConfig, h100: Hardware, work: Work) -> None:
    step = estimate(Roofline(llama), h100, work)
    assert step.seconds == pytest.approx(sum(step.shares_s.values()))
    assert step.shares_s[step.bound] == max(step.shares_s.values())
    if work.tokens:
        assert sum(timed.part.bytes for timed in step.parts) >= Roofline(llama).linears(work).bytes > 0


@settings(max_examples=100)
@given(work=works, degree=st.sampled_from([1, 2, 8]), weight=st.sampled_from(["bf16", "fp8", "int4"]))
def test_coefficients_are_the_roofline(
    llama: ModelConfig, h100: Hardware, work: Work, degree: int, weight: str
) -> None:
    roofline = Roofline(llama, weight, "fp8", degree)
    step = estimate(roofline, h100, work)
    coefficients = Coefficients.from_roofline(roofline, h100)
    shares = coefficients.shares_ns(*astuple(work))
    assert [ns * 1e-9 for ns in shares] == pytest.approx(list(step.shares_s.values()), rel=1e-6, abs=1e-9)
    assert coefficients.total_ns(work) == pytest.approx(step.seconds * 1e9)


# ---- dtypes and tensor parallelism ----


@pytest.mark.parametrize(
    ("dtype", "share"), [("fp32", 2), ("fp16", 1), ("fp8", 0.5), ("int8", 8.25 / 16), ("int4", 4.5 / 16)]
)
def test_weights_follow_their_dtype(llama: ModelConfig, dtype: str, share: float) -> None:
    work = Work.decode(100)
    expected = Roofline(llama).linears(work).bytes * share
    assert Roofline(llama, dtype).linears(work).bytes == expected


def test_cache_follows_its_dtype(llama: ModelConfig) -> None:
    half, full = Roofline(llama, kv_cache_dtype="fp8"), Roofline(llama)
    assert half.kv_bytes_per_token * 2 == full.kv_bytes_per_token
    assert half.decode_attention(Work.decode(9)).bytes * 2 == full.decode_attention(Work.decode(9)).bytes
    assert half.linears(Work.decode(9)) == full.linears(Work.decode(9))
    assert Roofline(llama, "fp32").kv_cache_dtype == "fp32"


def test_fp8_computes_in_fp8_where_it_can(
    llama: ModelConfig, h100: Hardware, hardware: Callable[[str], Hardware]
) -> None:
    part = Roofline(llama, "fp8").linears(Work(tokens=4096))
    wide = Roofline(llama).linears(Work(tokens=4096))
    assert part.compute_s(h100) == pytest.approx(part.flops / (0.55 * 1979e12))
    assert wide.compute_s(h100) == pytest.approx(wide.flops / (0.79 * 989e12))
    assert part.compute_s(hardware("a100")) == wide.compute_s(hardware("a100"))


@settings(max_examples=40)
@given(work=works)
def test_two_devices_halve_the_work_and_talk(llama: ModelConfig, work: Work) -> None:
    one, two = by_name(Roofline(llama), work), by_name(Roofline(llama, tensor_parallel=2), work)
    for name in ("linears", "prefill attention", "decode attention", "kv write", "logits", "sampling"):
        assert two[name].flops * 2 == one[name].flops
        assert two[name].bytes * 2 == one[name].bytes
    assert one["collectives"].bytes == 0
    elements = 4 * 32 * 4096 * work.tokens + 128_256 * work.rows
    assert two["collectives"].bytes == 2 * (elements // 2)


def test_key_value_heads_are_replicated_beyond_their_number(llama: ModelConfig) -> None:
    assert Roofline(llama, tensor_parallel=8).kv_bytes_per_token * 8 == 131_072
    assert Roofline(llama, tensor_parallel=16).kv_bytes_per_token * 8 == 131_072


def test_latency_of_collectives_is_overhead(llama: ModelConfig, h100: Hardware) -> None:
    one, two = (estimate(Roofline(llama, tensor_parallel=n), h100, Work.decode(1)) for n in (1, 2))
    assert two.overhead_s - one.overhead_s == pytest.approx(65 * h100.collective_us * 1e-6)


def test_what_cannot_be_configured(llama: ModelConfig, hardware: Callable[[str], Hardware]) -> None:
    with pytest.raises(ConfigError, match=r"weight_dtype: expected one of fp32, bf16, .*, found bf8"):
        Roofline(llama, "bf8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: expected one of auto, .*, found int4"):
        Roofline(llama, kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="tensor_parallel: 3 does not divide 32 attention heads"):
        Roofline(llama, tensor_parallel=3)
    with pytest.raises(ConfigError, match="tensor_parallel: expected 1 on hardware=cpu, found 2"):
        estimate(Roofline(llama, tensor_parallel=2), hardware("cpu"), Work.decode(1))
