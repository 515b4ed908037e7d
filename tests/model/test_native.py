"""The compiled CPU kernels against the float64 specification and against torch's; unowned slots are poison."""

import math
import os
import random
import subprocess
import sys

import pytest
import torch
from checkpoints import VARIANTS, assert_same_stream, double, greedy, reference_logits, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_build import native, native_folder  # noqa: F401 (fixtures)
from paged import Pages
from test_torch_backend import WINDOWS, Case, cases, relative_error
from torch.nn import functional

from schedlab.experiments.bench.quantisation import TEXT
from schedlab.framework.errors import ConfigError, ModelError
from schedlab.framework.model import linear
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.files import model_directory
from schedlab.framework.model.hf import read_config
from schedlab.framework.model.tokenizer import Tokenizer
from schedlab.kernels import native_library, reference, torch_backend
from schedlab.kernels.quantised import quantise

once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ("float32", "bfloat16", "int8", "int4")
GROWTH = 8
ROUNDING = {"bfloat16": 1.66e-3, "float16": 1.66e-3 / 8}
"""Root mean square of a rounding's relative error: half a step of 2^-7 at most, uniform, over log-uniform numbers."""


def on_cpu(case, dtype):
    """The case as a CPU engine would have it: float32 queries, a cache of `dtype`."""
    case.q = case.q.float()
    case.k_cache, case.v_cache = case.k_cache.to(dtype), case.v_cache.to(dtype)
    return case


@once
@given(case=cases(), window=WINDOWS, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_prefill_attention(native, case, window, dtype):  # noqa: F811
    case = on_cpu(case, dtype)
    out = torch.full_like(case.q, torch.nan)
    ours = case.prefill(native, window=window, out=out)
    assert ours is out and ours.isfinite().all()
    assert relative_error(ours, case.prefill(reference, window=window)) <= 2e-6


@once
@given(cases(st.tuples(st.just(1), st.integers(0, 200))), WINDOWS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_decode_attention(native, case, window, dtype):  # noqa: F811
    case = on_cpu(case, dtype)
    expected = case.decode(reference, window=window)
    assert relative_error(case.decode(native, window=window), expected) <= 2e-6
    assert relative_error(case.prefill(native, window=window), expected) <= 2e-6


@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_attention_over_several_tiles(native, head_dim):  # noqa: F811
    case = on_cpu(Case([(1, 90), (300, 300), (129, 400)], block_size=16, head_dim=head_dim), torch.float32)
    for window in (None, 17, 200):
        ours = case.prefill(native, window=window)
        assert relative_error(ours, case.prefill(reference, window=window)) <= 2e-6


def test_large_scores_neither_overflow_nor_vanish(native):  # noqa: F811
    case = on_cpu(Case([(40, 150), (1, 99)], head_dim=64), torch.float32)
    for scale in (1e-4, 3.0, 50.0):
        ours = case.prefill(native, scale=scale)
        assert relative_error(ours, case.prefill(reference, scale=scale)) <= 2e-5


def test_what_is_not_compiled_is_left_to_torch(native):  # noqa: F811
    case = Case([(5, 21), (1, 9)], dtype=torch.float64)
    assert relative_error(case.prefill(native), case.prefill(reference)) <= 1e-12
    case = on_cpu(case, torch.float32)
    for options in ({"softcap": 5.0}, {"return_lse": True}, {"k_scale": 2.0}):
        ours, expected = (case.prefill(kernels, **options) for kernels in (native, torch_backend))
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, expected)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("pairs", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_kv_write(native, pairs, dtype):  # noqa: F811
    """Views of one packed row, as the decoder has them; partial rotation; slot -1; rounding to the cache's type."""
    rng = torch.Generator().manual_seed(1)
    packed = torch.randn(5, 10, 8, generator=rng)
    angles, slots = 10 * torch.rand(5, pairs, generator=rng), torch.tensor([7, -1, 3, 0, -1])
    results = []
    for kernels in (native, reference):
        caches = [torch.full((3, 4, 2, 8), 9.0, dtype=dtype) for _ in range(2)]
        q, k, v = torch.split(packed.clone(), [6, 2, 2], dim=1)
        results.append([kernels.rope_kv_write(q, k, v, angles.cos(), angles.sin(), *caches, slots), *caches])
    for ours, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) <= (1e-6 if ours.dtype == torch.float32 else 4e-3)
    assert torch.equal(results[0][2], results[1][2]), "values are written as they are"
    assert (results[0][1].flatten(0, 1)[[1, 2, 4, 5, 6, 8, 9, 10, 11]] == 9).all()


@pytest.mark.parametrize("size", [8, 48, 576, 70])
def test_rms_norm_and_silu_mul(native, size):  # noqa: F811
    rng = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(7, size, generator=rng) * 20 for _ in range(2))
    x[0, :4] = torch.tensor([-1e4, -90.0, 90.0, 1e4])
    weight, before = torch.randn(size, generator=rng), x.clone()
    for args in ((x, weight, 1e-5), (x, weight, 1e-5, residual)):
        ours, expected = native.rms_norm(*args), reference.rms_norm(*args)
        for a, b in zip(*((r if isinstance(r, tuple) else (r,)) for r in (ours, expected)), strict=True):
            assert relative_error(a, b) <= 1e-6
    assert relative_error(native.silu_mul(x), reference.silu_mul(x)) <= 1e-6
    assert torch.equal(x, before)


# ---- products ----


def matrix(kind, columns, depth, seed=0):
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(seed))
    return quantise(weight, kind) if kind in ("int8", "int4") else weight.to(getattr(torch, kind))


def exact(weight):
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantised()).double()


@once
@given(st.sampled_from(KINDS), st.integers(1, 100), st.integers(1, 200), st.integers(0, 40), st.booleans())
def test_product(native, kind, columns, depth, rows, with_bias):  # noqa: F811
    weight, bias = matrix(kind, columns, depth), torch.randn(columns) if with_bias else None
    x = torch.randn(rows, depth + 3)[:, :depth]
    expected = x.double() @ exact(weight).T + (0 if bias is None else bias.double())
    ours = native.linear(weight, bias)(x)
    assert ours.dtype == torch.float32 and ours.shape == expected.shape
    assert relative_error(ours, expected) <= 2e-6 or not rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beside_any_others(native, kind):  # noqa: F811
    product, x = native.linear(matrix(kind, 70, 130), None), torch.randn(33, 130)
    alone = torch.cat([product(row) for row in x.split(1)])
    for rows in (2, 3, 5, 7, 13, 33):
        assert torch.equal(product(x[:rows]), alone[:rows])


def test_two_threads_give_the_same_bits(native):  # noqa: F811
    case, product, x = on_cpu(Case([(40, 90), (1, 9)], head_dim=16), torch.float32), None, torch.randn(20, 130)
    product = native.linear(matrix("bfloat16", 200, 130), None)
    one = case.prefill(native), product(x)
    torch.set_num_threads(2)
    try:
        two = case.prefill(native), product(x)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("kind", [*KINDS, "float16", "float64"])
@pytest.mark.parametrize("path", ["prepacked", "plain", "rounding"])
def test_torch_and_compiled_products_agree(native, kind, path, monkeypatch):  # noqa: F811
    """With oneDNN's packed weights where torch has them, without, and as where oneDNN multiplies in 16 bits."""
    linear.multiplies(torch.bfloat16)  # what was found before must not outlive a change
    if path == "plain":
        monkeypatch.setattr(linear, "can_prepack", lambda: False)
    if path == "rounding":
        multiply_in_16_bits(monkeypatch)
    weight, bias = matrix(kind, 96, 64), torch.randn(96)
    bias = bias.double() if kind == "float64" else bias.to(weight.dtype) if kind == "float16" else bias
    narrow = kind in ("float16", "bfloat16") and linear.multiplies(getattr(torch, kind))
    allowed = 2 * ROUNDING[kind] * math.sqrt(2) if narrow else 2e-6  # a row is rounded before and after
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64, dtype=torch.float64 if kind == "float64" else torch.float32)
        expected = x.double() @ exact(weight).T + bias.double()
        for make in (linear.packed, linear.compiled):
            assert relative_error(make(weight, bias)(x), expected) <= allowed


def multiply_in_16_bits(monkeypatch):
    """oneDNN's 16-bit products on any processor: rows rounded before and after, summed in float32."""

    def product(weight, bias):
        wide = None if bias is None else bias.float()
        return lambda x: functional.linear(x.float(), weight.float(), wide).to(x.dtype)

    monkeypatch.setattr(linear, "multiplies", lambda dtype: True)
    monkeypatch.setattr(linear, "_prepacked", product)


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_the_paths_of_lesser_processors(isa):
    """What oneDNN's arithmetic touches, again with its instructions held down to those of an older processor."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("this processor has nothing beyond AVX2, so that every limit gives the path of the other tests")
    chosen = "products_agree or stays_near_float32"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__, "-k", chosen]
    done = subprocess.run(
        command, env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 15)])
def test_quantised_weights_are_within_half_a_step(kind, steps):
    """And a group's scale is its own: a large weight in one group does not touch the others."""
    weight = torch.randn(5, 150, generator=torch.Generator().manual_seed(0))
    weight[0, 3], weight[1, :64], weight[2] = 1e3, 0.0, 0.25
    found = quantise(weight, kind).dequantised()
    for group in torch.split(torch.stack([weight, found]), 64, dim=2):
        reach = group[0].amax(1) - group[0].amin(1) if kind == "int4" else 2 * group[0].abs().amax(1)
        allowed = reach[:, None] / steps * 0.5 + group[0].abs().amax(1, keepdim=True) * 2**-7
        assert ((group[0] - group[1]).abs() <= allowed + 1e-30).all()
    assert (found[1, :64] == 0).all()


def test_quantise_refuses_what_it_does_not_know():
    for options in ({"kind": "int2"}, {"kind": "int8", "group": 48}):
        with pytest.raises(ValueError, match="quantise"):
            quantise(torch.ones(2, 2), **options)


# ---- the engine on them ----


def prompt(length, seed=0):
    return random.Random(seed).choices(range(3, 97), k=length)


def executor(path, **options):
    return ModelExecutor(read_config(path), path=path, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(native, variant, tmp_path):  # noqa: F811
    path, tokens = save(variant, tmp_path), prompt(80, 4)
    expected = reference_logits(double(variant), tokens)
    pages = Pages(executor(path, kernels="native"), num_blocks=128)
    sequence = pages.add(tokens[:61])
    for count in (40, 21, *[1] * 19):
        logits = pages.logits((sequence, count))
        if len(logits):
            torch.testing.assert_close(logits[0].double(), expected[sequence.computed - 1], rtol=5e-5, atol=5e-5)
        if sequence.computed >= 61:
            sequence.tokens = tokens[: sequence.computed + 1]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_streams_beside_others_after_a_hit_and_a_swap(native, kernels, tmp_path):  # noqa: F811
    pages = Pages(executor(save("llama", tmp_path), kernels=kernels))
    shared = prompt(12, seed=2)
    first, second = pages.add(shared + prompt(3, 3), "a"), pages.add(shared + prompt(4, 4), "b")
    pages.generate(first, 5)
    pages.share(second, first, 3)
    pages.generate(second, 8, chunk=2)
    pages.swap_out(second)
    pages.swap_in(second, (first, 1))
    while len(first.output) < 24:
        pages.step((second, 1), (first, 1))
    for sequence in (first, second):
        n = sequence.request.num_prompt_tokens
        assert_same_stream(sequence.output, *greedy("llama", sequence.tokens[:n], len(sequence.output)))


@pytest.mark.parametrize("weight_dtype", [None, "bf16", "int8", "int4"])
def test_torch_and_compiled_engines_agree(native, weight_dtype, tmp_path):  # noqa: F811
    """In every type of weights: a greedy stream through both, and the logits along it."""
    path, tokens, found = save("qwen3", tmp_path), prompt(40), []
    for kernels in ("native", "torch"):
        pages = Pages(executor(path, kernels=kernels, dtype="bfloat16", weight_dtype=weight_dtype), 64, 16)
        sequence = pages.add(tokens[:30])
        rows = []
        for count in (30, *[1] * 9):
            rows.append(pages.logits((sequence, count))[0])
            sequence.tokens = tokens[: sequence.computed + 1]
        found.append(torch.stack(rows))
    assert relative_error(found[0], found[1]) <= 1e-2  # both round keys and values to bfloat16, at other ties


def logits_along(path, tokens, dtype, start):
    """Logits after each of `tokens` from `start` on, a step each."""
    pages = Pages(executor(path, dtype=dtype, kernels="native"), 64, 16)
    sequence, rows = pages.add(tokens[:start]), []
    for count in (start, *[1] * (len(tokens) - start)):
        rows.append(pages.logits((sequence, count))[0])
        sequence.tokens = tokens[: sequence.computed + 1]
    return torch.stack(rows)


def errors_along(path, tokens):
    """Relative errors of the logits that bfloat16 gives, a step each of the last 64 tokens."""
    near, exact = (logits_along(path, tokens, dtype, len(tokens) - 64) for dtype in ("bfloat16", "float32"))
    return [relative_error(a, b) for a, b in zip(near, exact, strict=True)]


@pytest.mark.parametrize("rounding_products", [False, True])
def test_bfloat16_stays_near_float32(native, tmp_path, rounding_products, monkeypatch):  # noqa: F811
    """64 decode steps of a random model, whose attention is peaked: a rounding may grow to GROWTH times its size.

    Rounded are a layer's keys and values, and where products are in 16 bits what goes in and out of its four and of
    the last one. As they are independent, their squares add up.
    """
    if rounding_products:
        multiply_in_16_bits(monkeypatch)
    path = save("llama", tmp_path, torch.bfloat16)
    layers = read_config(path).num_hidden_layers
    roundings = layers * (2 + 8) + 2 if linear.multiplies(torch.bfloat16) else layers * 2
    errors = torch.tensor(errors_along(path, prompt(96, 5)))
    assert errors.square().mean().sqrt() <= GROWTH * ROUNDING["bfloat16"] * math.sqrt(roundings)


@pytest.mark.full
def test_bfloat16_stays_near_float32_in_a_real_model(native):  # noqa: F811
    """On ordinary text. Of one sentence said nine times over, where attention is peaked, the worst is 2.7e-2."""
    try:
        path = model_directory("fetched:smollm2")
    except ModelError as error:
        pytest.skip(str(error))
    allowed = 2e-2 * (math.sqrt(5) if linear.multiplies(torch.bfloat16) else 1)  # five times the roundings
    assert max(errors_along(path, Tokenizer(path).encode(TEXT.replace("\n", " "))[:80])) <= allowed


# ---- how they come to be there ----


def test_without_a_compiler_or_a_build(monkeypatch, tmp_path):
    monkeypatch.setattr(native_library, "directory", lambda: tmp_path / "empty")
    native_library.load.cache_clear()
    with pytest.raises(native_library.BuildError, match="no-such-compiler: expected a C"):
        native_library.build("no-such-compiler")
    with pytest.raises(native_library.BuildError, match="false"):
        native_library.build("false")
    path = save("llama", tmp_path)
    assert executor(path)._backend.kernels.name == "torch"
    with pytest.raises(ConfigError, match=r"engine\.kernels=native: no compiled kernels .*schedlab kernels build"):
        executor(path, kernels="native")


def test_what_cannot_be_asked_for(tmp_path):
    path = save("llama", tmp_path)
    for options, said in (
        ({"kernels": "fast"}, r"engine\.kernels: expected one of auto, torch, native, found fast"),
        ({"weight_dtype": "int2"}, r"model\.weight_dtype: expected null or one of bf16, int8, int4, found int2"),
        ({"kernels": "native", "batch_invariant": True}, r"engine\.batch_invariant: expected engine\.kernels=auto"),
        ({"weight_dtype": "int8", "batch_invariant": True}, r"model\.weight_dtype: expected null in batch-inv"),
    ):
        with pytest.raises(ConfigError, match=said):
            executor(path, **options)
