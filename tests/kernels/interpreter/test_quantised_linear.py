"""Products of quantised matrices against float64, and that the checks see what goes wrong in such kernels.

The reference reads a `Quantised` number by number, by none of the code that packs or dequantises it.
"""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import error
from hypothesis import given
from hypothesis import strategies as st

from schedlab.experiments.engines import model_preset
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.kernels import configs, quantised_linear
from schedlab.kernels.configs import LinearTile, linear_tiles
from schedlab.kernels.quantised import GROUP, KINDS, Quantised, quantise

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1.5e-2}
"""Weights and results are truncated to bfloat16 by the interpreter, where a GPU rounds."""
PRESETS = ("llama3.1-8b", "llama3.2-1b", "mistral-7b", "qwen3-0.6b", "qwen3-8b", "smollm2-135m", "tiny")
GROUPS = st.sampled_from([1, 2, 8, 16, 32, 64, 128, 512])


@pytest.fixture
def split_early(monkeypatch):
    monkeypatch.setattr(configs, "LEAST_DEPTH", 64)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(weight):
    """[O, K] in float64."""
    group_of_K = np.arange(weight.shape[1]) // weight.group
    matrix = weight.numbers_OK.numpy().astype(np.float64) * weight.scales_OG.double().numpy()[:, group_of_K]
    if weight.zeros_OG is not None:
        matrix += weight.zeros_OG.double().numpy()[:, group_of_K]
    return torch.from_numpy(matrix)


def expected(x, weight, bias=None):
    return x.double() @ exact(weight).T + (0 if bias is None else bias.double())


def drawn(kind, columns, depth, group=GROUP, seed=0):
    """Every number, scales of either sign and far apart, some of them 0, as a checkpoint's own could be."""
    rng = torch.Generator().manual_seed(seed)
    shape = columns, -(-depth // group)
    scales = (torch.randn(shape, generator=rng) * torch.logspace(-3, 1, shape[1])).bfloat16()
    scales[torch.rand(shape, generator=rng) < 0.1] = 0.0
    if kind == "int8":
        numbers = torch.randint(-128, 128, (columns, depth), generator=rng).to(torch.int8)
        return Quantised(numbers, scales, None, group)
    numbers = torch.randint(0, 16, (columns, depth), generator=rng).to(torch.uint8)
    return Quantised(numbers, scales, torch.randn(shape, generator=rng).bfloat16(), group)


@given(
    kind=st.sampled_from(KINDS), dtype=st.sampled_from(DTYPES), rows=st.integers(1, 20), columns=st.integers(8, 90),
    depth=st.integers(1, 150), group=GROUPS, with_bias=st.booleans(),
)  # fmt: skip
def test_product(ops, kind, dtype, rows, columns, depth, group, with_bias):
    weight = quantise(normal(columns, depth), kind, group)
    x, bias = normal(rows, depth + 3, seed=1).to(dtype)[:, :depth], normal(columns, seed=2).to(dtype)
    bias = bias if with_bias else None
    found = quantised_linear.linear(weight, bias)(x)
    assert found.dtype == dtype and found.shape == (rows, columns)
    assert error(found, expected(x, weight, bias)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "group"), [(128, 64), (200, 64), (192, 64), (130, 16), (100, 8), (64, 512)], ids=str)
def test_whatever_the_numbers_and_scales(ops, kind, depth, group):
    """To the depth's end and between groups; one row, where an error has nothing to hide behind."""
    weight, x = drawn(kind, 70, depth, group), normal(1, depth)
    assert error(quantised_linear.linear(weight, None)(x), expected(x, weight)) <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(ops, kind):
    """All numbers least, largest or alternating; zero scales; a matrix of nothing but zeros."""
    least, largest = (-128, 127) if kind == "int8" else (0, 15)
    weight = drawn(kind, 6, 128)
    for row, (even, odd) in enumerate([(least, least), (largest, largest), (least, largest), (largest, least)]):
        weight.numbers_OK[row, ::2], weight.numbers_OK[row, 1::2] = even, odd
    weight.scales_OG[4] = 0.0
    if weight.zeros_OG is not None:
        weight.zeros_OG[5] = -weight.zeros_OG[5].abs() * 100
    x = normal(2, 128)
    assert error(quantised_linear.linear(weight, None)(x), expected(x, weight)) <= 2e-6
    nothing = quantise(torch.zeros(3, 128), kind)
    assert (quantised_linear.linear(nothing, None)(x) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 130])
def test_every_class_of_rows(ops, kind, rows):
    weight, x = drawn(kind, 24, 128), normal(rows, 128).half()
    assert error(quantised_linear.linear(weight, None)(x), expected(x, weight)) <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_split_along_the_depth(ops, kind, split_early):
    """Unequal parts; the bias is added once; a row is the same bits at either end of its class."""
    tile = LinearTile(64, 16, 4, 3, programs=3)
    weight, bias = drawn(kind, 20, 320), normal(20)
    assert tile.splits(20, 320) == 3
    panels, x = quantised_linear.Panels.of(weight), normal(16, 320)
    found = quantised_linear.product(x, panels, bias, tile=tile)
    assert error(found, expected(x, weight, bias)) <= 2e-6
    assert torch.equal(quantised_linear.product(x[5:6], panels, bias, tile=tile), found[5:6])


def test_splits_depend_on_the_matrix_alone():
    few, *_, many = linear_tiles(torch.bfloat16)
    assert few.splits(4096, 4096) == 4 and few.splits(28672, 4096) == 1 and few.splits(576, 576) == 1
    assert many.splits(64, 65536) == 1


def test_nan_and_strides(ops):
    """NaN stays in its row; what lies between rows is not read; no rows are no rows."""
    wide = torch.full((3, 200), torch.nan)
    wide[0, :130], wide[2, :130] = normal(130), normal(130, seed=1)
    weight = drawn("int4", 20, 130)
    found = quantised_linear.linear(weight, None)(wide[:, :130])
    assert found[1].isnan().all()
    assert error(found[::2], expected(wide[::2, :130], weight)) <= 2e-6
    assert quantised_linear.linear(weight, None)(wide[:0, :130]).shape == (0, 20)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (normal(2, 64).double(), "x must be bfloat16, float16 or float32, got torch.float64"),
        (normal(2, 65), r"x must be of shape \[2, 64\], got \[2, 65\]"),
        (normal(64), "x must be a tensor of 2 dimensions, got 1"),
        (normal(2, 128)[:, ::2], "x must be contiguous in its last dimension"),
    ],
)
def test_wrong_rows_are_named(x, message):
    with pytest.raises(ValueError, match=f"^linear: {message}"):
        quantised_linear.linear(drawn("int8", 8, 64), None)(x)


# ---- what they weigh ----


def packed_bytes(kind, columns, depth):
    """Of a matrix without data."""
    numbers = torch.empty(columns, depth, dtype=torch.int8 if kind == "int8" else torch.uint8, device="meta")
    scales = torch.empty(columns, -(-depth // GROUP), dtype=torch.bfloat16, device="meta")
    return quantised_linear.Panels.of(Quantised(numbers, scales, scales if kind == "int4" else None)).nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRESETS)
def test_the_virtual_clock_counts_the_bytes_that_the_kernels_read(name, kind):
    """Numbers, scales and zeros. int8's scales come in pairs of groups: the ninth of SmolLM2's has a partner of 0."""
    shape, _ = model_preset(name)
    hidden, inner, q, kv = shape.hidden_size, shape.intermediate_size, shape.q_size, shape.kv_size
    matrices = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    found = shape.num_hidden_layers * sum(packed_bytes(kind, *matrix) for matrix in matrices)
    odd = sum(2 * columns for columns, depth in matrices if kind == "int8" and depth // GROUP % 2)
    assert found == Roofline(shape, kind).linears(Work.decode(1)).bytes + shape.num_hidden_layers * odd
    assert (odd > 0) == (kind == "int8" and name == "smollm2-135m")


# ---- what the checks above must see ----

MUTANTS = {
    "nibbles in the other order": (">> (4 * part)", ">> (4 - 4 * part)"),
    "nibbles not cut off": ("(4 * part) & 15", "(4 * part) & 255"),
    "the zero of the group before": ("(pairs_OC & -65536)", "(pairs_OC - 1 & -65536)"),
    "scale and zero exchanged": ("* scale_OC + zero_OC", "* zero_OC + scale_OC"),
    "no zero": ("* scale_OC + zero_OC", "* scale_OC"),
    "int8 off by one": ("- MIDDLE * scale_OC", "- (MIDDLE + 1) * scale_OC"),
    "the scale of the other group of a word": ("groups_1C % 2 * 16 <<", "(groups_1C + 1) % 2 * 16 <<"),
    "scales off by one group": ("((first + c_C) // GROUP)", "tl.maximum((first + c_C) // GROUP - 1, 0)"),
    "one scale a step": ("WIDTH if GROUP < WIDTH else 1)", "1)"),
    "the tail not cut off": ("(k_W < depth)[:, None]", "(k_W < depth + 1)[:, None]"),
    "the last step left out": ("steps_per_split, num_steps)", "steps_per_split, num_steps - 1)"),
    "the bias of another column": ("(bias_ptr + o_O, mask=o_O", "(bias_ptr + o_O // 2, mask=o_O"),
    "columns stored beside their place": ("* stride_out + o_O[:, None]", "* stride_out + (o_O ^ 1)[:, None]"),
    "half of the panels": ("o_O % PANEL * WIDTH", "o_O % (PANEL // 2) * WIDTH"),
    "a part left out of the sum": ("for _ in range(num_splits)", "for _ in range(num_splits - 1)"),
    "the parts at one place": ("split.to(tl.int64) * stride_split", "split.to(tl.int64) * 0"),
    "int8 packed as it is": ("^ MIDDLE.value", "^ 0"),
    "packed in the other order": ("0, :] | numbers_PRSNW[..., 1, :] << 4", "1, :] | numbers_PRSNW[..., 0, :] << 4"),
}  # fmt: skip


def passes(module):
    """Small products of both kinds that touch every line."""
    tile = replace(linear_tiles(torch.float32)[0], programs=2)
    for kind, depth, group in (("int4", 100, 64), ("int8", 200, 64), ("int4", 40, 8)):
        weight, bias = drawn(kind, 20, depth, group), normal(20)
        x = normal(2, depth + 1)[:, :depth]
        found = module.product(x, module.Panels.of(weight), bias, tile=tile)
        if not error(found, expected(x, weight, bias)) <= 2e-6:
            return False
    return True


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_kernels_are_found(ops, name, split_early, tmp_path, monkeypatch):
    source, (old, new) = Path(quantised_linear.__file__).read_text(), MUTANTS[name]
    assert old in source
    (tmp_path / "mutant.py").write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("schedlab.kernels.mutant", tmp_path / "mutant.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert not passes(module)


def test_the_kernel_itself_is_not(ops, split_early):
    assert passes(quantised_linear)
