"""Kernel tables of public sources: what they answer, what they refuse, and the profile that they add up to."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kernel_files
import pytest
from kernel_files import MODEL, all_reduce_us, decode_us, experts_us, prefill_us, product_us, windowed_us

import schedlab
from schedlab.experiments import engines
from schedlab.experiments.studies.kernel_tables.aiconfigurator import ELEMENTWISE_US, AIConfigurator, find_root
from schedlab.experiments.studies.kernel_tables.csv_files import columns
from schedlab.experiments.studies.kernel_tables.curves import Curve, Surface, neighbours
from schedlab.experiments.studies.kernel_tables.kernels import step_us
from schedlab.experiments.studies.kernel_tables.llmservingsim import LLMServingSim
from schedlab.experiments.studies.kernel_tables.vidur import Vidur
from schedlab.experiments.studies.profile_import import imported, open_source
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import Profile, identity_of
from schedlab.framework.cost.model import CostExecutor
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.errors import ConfigError
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.populations import CommonWork

LAYER = ((4 * 64, 128), (128, 128), (512, 128), (128, 256))  # qkv, out, gate with up, down: columns, rows


@pytest.fixture(scope="module")
def h100():
    return engines.hardware_preset("h100")


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> Path:
    return find_root(str(kernel_files.aiconfigurator(tmp_path_factory.mktemp("tables"))))


def kernels(tables, h100, **options):
    return AIConfigurator(tables, Roofline(MODEL, **options), h100, "vllm", None)


# ---- interpolation ----


def test_a_power_is_met_between_its_points() -> None:
    curve = Curve.of([8, 1, 2], [8**0.7, 1, 2**0.7])
    assert [curve(x) for x in (1, 1.5, 3, 8)] == pytest.approx([x**0.7 for x in (1, 1.5, 3, 8)])
    assert curve(0.5) == pytest.approx(1.0), "below the first size its time"
    assert curve(16) == pytest.approx(2 * 8**0.7), "beyond the last linearly"
    with pytest.raises(ConfigError, match="measured up to a size of 8, found 17"):
        curve(17)


def test_of_repeats_the_least_counts() -> None:
    assert Curve.of([4, 4, 4], [3.0, 1.0, 2.0])(4) == pytest.approx(1.0)


def test_neighbours_weigh_by_logarithms() -> None:
    assert neighbours([1, 4, 16], 8, "x") == [(4, pytest.approx(0.5)), (16, pytest.approx(0.5))]
    assert neighbours([1, 4, 16], 4, "x") == [(4, 1.0)]
    assert neighbours([1, 4, 16], 32, "x") == [(4, pytest.approx(-0.5)), (16, pytest.approx(1.5))]
    with pytest.raises(ConfigError, match=r"x: expected 0\.5 to 32, found 33"):
        neighbours([1, 4, 16], 33, "x")


def test_a_surface_knows_where_fewer_sizes_were_measured() -> None:
    surface = Surface({1: Curve.of([1, 100], [1, 100]), 8: Curve.of([1, 10], [8, 80])}, "batch")
    assert surface.answers(1, 200) and not surface.answers(8, 50) and not surface.answers(17, 1)


# ---- aiconfigurator ----


def test_a_layer_is_its_four_products(tables, h100) -> None:
    found = kernels(tables, h100)
    for tokens in (1, 3, 100, 5000):
        assert found.projections_us(tokens) == pytest.approx(sum(product_us(tokens, n, k) for n, k in LAYER))
    assert found.head_us(3) == pytest.approx(product_us(3, 512, 128))
    assert found.prefill_attention_us(300) == pytest.approx(prefill_us(300))
    assert found.decode_attention_us(20, 700) == pytest.approx(decode_us(20, 700))
    assert found.elementwise_us(1) == pytest.approx(ELEMENTWISE_US, rel=1e-3)
    assert found.facts["version"] == "0.2.0" and found.facts["licence"] == "Apache-2.0" and found.dropped == 0


def test_a_step_is_layers_and_a_head(tables, h100) -> None:
    found = kernels(tables, h100)
    layer = (
        sum(product_us(124, n, k) for n, k in LAYER) + found.elementwise_us(124) + prefill_us(100) + decode_us(24, 900)
    )
    assert step_us(found, 2, 100, 24, 900) == pytest.approx(2 * layer + product_us(25, 512, 128))
    assert step_us(found, 2, 0, 24, 900) < step_us(found, 2, 100, 24, 900)


SPARSE = replace(MODEL, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=64)


@pytest.mark.parametrize(("dtype", "times"), [(None, 1), ("fp8", 2)])
def test_experts_stand_in_place_of_a_feed_forward(dtype, times, tables, h100) -> None:
    """Beside their router; of two kernels in one dtype the faster."""
    ours = AIConfigurator(tables, Roofline(replace(SPARSE, expert_dtype=dtype)), h100, "vllm", None)
    expected = sum(product_us(8, n, k) for n, k in [*LAYER[:2], (64, 128)]) + times * experts_us(8)
    assert ours.projections_us(8) == pytest.approx(expected, rel=1e-6)
    assert ours.facts["routing"] == "power_law_1.2"


@pytest.mark.parametrize(("change", "said"), [
    ({"num_experts_per_tok": 3}, r"3 of 64 experts of 128 by 64 on 1 devices, sliced, in bf16, found no dtype of them"),
    ({"expert_dtype": "mxfp4"}, r"on 1 devices, sliced, in mxfp4, found bfloat16, fp8, fp8_block of them"),
])  # fmt: skip
def test_experts_that_were_not_measured_are_refused(change, said, tables, h100) -> None:
    with pytest.raises(ConfigError, match=said):
        AIConfigurator(tables, Roofline(replace(SPARSE, **change)), h100, "vllm", None)


def test_attention_is_the_mean_over_the_windows_of_the_layers(tables, h100) -> None:
    mixed = replace(MODEL, num_hidden_layers=4, layer_windows=(32, 32, 32, None))
    ours = AIConfigurator(tables, Roofline(mixed), h100, "vllm", None)
    assert ours.decode_attention_us(8, 1024) == pytest.approx(0.75 * windowed_us(8, 1024) + 0.25 * decode_us(8, 1024))
    assert ours.prefill_attention_us(128) == pytest.approx((0.75 / 2 + 0.25) * prefill_us(128))
    with pytest.raises(ConfigError, match=r"with a window of 48$"):
        AIConfigurator(tables, Roofline(replace(MODEL, sliding_window=48)), h100, "vllm", None)


def test_a_profile_of_experts_and_windows_is_near_its_steps(tables, h100) -> None:
    line = Roofline(replace(SPARSE, layer_windows=(32, None)))
    profile = imported(open_source("aiconfigurator", line, h100, str(tables.parent)), line, h100)
    assert profile.coefficients.num_experts == 64 and profile.error.held_out_mean < 0.15
    executor = CostExecutor(line.model, h100, profile=profile)
    assert executor.coefficients.experts_per_token == 2
    other = Roofline(replace(line.model, expert_dtype="fp8"))
    with pytest.raises(ConfigError, match="profile: measured with expert_dtype = None, this run has fp8"):
        profile.coefficients_for(other, h100)


@pytest.mark.parametrize(("change", "source", "said"), [
    ({"kv_lora_rank": 8}, "aiconfigurator", "layers of one kind, found latent attention"),
    ({"num_dense_layers": 1}, "aiconfigurator", "layers of one kind, found 1 layers without experts"),
    ({}, "vidur", "profile import vidur: expected a dense model without windows, found 64 experts"),
])  # fmt: skip
def test_models_that_a_source_has_no_kernels_of(change, source, said, tables, h100) -> None:
    with pytest.raises(ConfigError, match=said):
        open_source(source, Roofline(replace(SPARSE, **change)), h100, str(tables))


def test_devices_split_the_products_and_reduce_twice_a_layer(tables, h100) -> None:
    shape = replace(MODEL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    found = AIConfigurator(tables, Roofline(shape, tensor_parallel=2), h100, "vllm", None)
    assert found.all_reduce_us(10) == pytest.approx(all_reduce_us(1280))
    assert found.projections_us(7) == pytest.approx(sum(product_us(7, n, k) for n, k in LAYER))
    with pytest.raises(ConfigError, match=r"custom_allreduce_perf.parquet has 2 devices, found 4"):
        wider = replace(shape, num_attention_heads=8, num_key_value_heads=4)
        AIConfigurator(tables, Roofline(wider, tensor_parallel=4), h100, "vllm", None)


def test_the_newest_version_counts_unless_one_is_named(tmp_path, h100) -> None:
    for version in ("0.9.0", "0.10.0", "0.10.0rc2"):
        kernel_files.aiconfigurator(tmp_path, version=version)
    root, roofline = find_root(str(tmp_path)), Roofline(MODEL)
    assert AIConfigurator(root, roofline, h100, "vllm", None).facts["version"] == "0.10.0"
    assert AIConfigurator(root, roofline, h100, "vllm", "0.9.0").facts["version"] == "0.9.0"
    with pytest.raises(ConfigError, match=r"import.version: .* has 0.9.0, 0.10.0rc2, 0.10.0, found 1"):
        AIConfigurator(root, roofline, h100, "vllm", "1")


def test_rows_faster_than_the_peak_are_left_out(tables, h100) -> None:
    slow = replace(h100, peak_tflops={"bf16": 0.5, "fp32": 0.5})
    found = AIConfigurator(tables, Roofline(MODEL), slow, "vllm", None)
    assert found.dropped > 0
    m, n, k = 16384, 512, 512
    assert 2 * m * n * k / product_us(m, n, k) / 1e6 > 0.5, "this one among them"


@pytest.mark.parametrize(
    ("options", "backend", "hardware", "message"),
    [
        ({"weight_dtype": "fp8"}, "vllm", "h100", "engine.weight_dtype: .*gemm_perf.parquet has bf16, found fp8"),
        ({"kv_cache_dtype": "fp8"}, "vllm", "h100", "no row of 2 query and 1 key-value heads of 64, keys"),
        ({}, "sglang", "h100", r"gemm/sglang has no gemm_perf.parquet: gemm is of vllm"),
        ({}, "nim", "h100", "import.backend: expected one of vllm, trtllm, sglang, found nim"),
        ({}, "vllm", "a100", "hardware=a100: expected a device of .*: h100_sxm"),
    ],
)
def test_what_was_not_measured_is_refused(tables, options, backend, hardware, message) -> None:
    with pytest.raises(ConfigError, match=message):
        AIConfigurator(tables, Roofline(MODEL, **options), engines.hardware_preset(hardware), backend, None)


def test_shapes_far_beyond_the_grid_are_refused(tables, h100) -> None:
    wide = replace(MODEL, intermediate_size=4096)
    with pytest.raises(ConfigError, match="columns of a product: expected 32 to 1024, found 8192"):
        AIConfigurator(tables, Roofline(wide), h100, "vllm", None).projections_us(1)


def test_a_vocabulary_beyond_the_grid_is_several_products(tables, h100) -> None:
    wide = replace(MODEL, vocab_size=2048)
    found = AIConfigurator(tables, Roofline(wide), h100, "vllm", None)
    assert found.head_us(4) == pytest.approx(4 * product_us(4, 512, 128))


def test_a_damaged_or_foreign_file_is_one_line(tmp_path, h100) -> None:
    root = find_root(str(kernel_files.aiconfigurator(tmp_path)))
    path = next(root.glob("data/*/gemm/vllm/*/gemm_perf.parquet"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet: expected a parquet file, found"):
        AIConfigurator(root, Roofline(MODEL), h100, "vllm", None)
    kernel_files.write(path, {"m": [1], "n": [1]})
    with pytest.raises(ConfigError, match="expected the column k, found m, n"):
        AIConfigurator(root, Roofline(MODEL), h100, "vllm", None)
    with pytest.raises(ConfigError, match="found no systems/data in"):
        find_root(str(tmp_path / "systems" / "data" / "h100_sxm"))


# ---- the other sources ----


def test_llmservingsim(tmp_path, h100) -> None:
    found = LLMServingSim(str(kernel_files.llmservingsim(tmp_path)), Roofline(MODEL), h100)
    assert found.projections_us(100) == pytest.approx((1 + 2 + 3 + 4) * 10)
    assert found.elementwise_us(100) == pytest.approx((2 * 5 + 6 + 7) * 10)
    assert found.head_us(4) == pytest.approx(2 * 20 + (8 + 9) * 2)
    assert found.attention_us(100, 16, 500) == pytest.approx(2 * (100 * 16) ** 0.25 * 500**0.25), "both in one kernel"
    assert found.attention_us(100, 0, 0) == pytest.approx(prefill_us(100))
    assert found.answers(2048, 64, 8192) and not found.answers(0, 300, 128)
    with pytest.raises(ConfigError, match="expected bf16 weights and cache on 1 device, found fp8, bf16 and 1"):
        LLMServingSim(str(tmp_path), Roofline(MODEL, "fp8"), h100)


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("tokens,us\n1,2\n", encoding="utf-8-sig")
    assert columns(path, ["tokens"])["tokens"].tolist() == [1.0]


def test_files_may_share_a_prefix_and_a_missing_one_is_named(tmp_path, h100) -> None:
    kernel_files.llmservingsim(tmp_path)
    for file in list(tmp_path.iterdir()):
        file.rename(tmp_path / f"card_{file.name}")
    LLMServingSim(f"{tmp_path}/card", Roofline(MODEL), h100)
    (tmp_path / "card_per_sequence.csv").unlink()
    with pytest.raises(ConfigError, match=r"expected .*/card/per_sequence.csv \(or .*card_per_sequence.csv"):
        LLMServingSim(f"{tmp_path}/card", Roofline(MODEL), h100)


def test_vidur(tmp_path, h100) -> None:
    found = Vidur(str(kernel_files.vidur(tmp_path)), Roofline(MODEL), h100)
    assert found.projections_us(100) == pytest.approx((1 + 2 + 3 + 4) * 10)
    assert found.elementwise_us(100) == pytest.approx((5 + 6 + 7 + 8 + 9) * 10)
    assert found.facts["attention"] == "roofline"
    kernel_files.vidur(tmp_path, n_head=4)
    with pytest.raises(ConfigError, match="n_head: expected 2, the model's num_attention_heads, found 4"):
        Vidur(str(tmp_path), Roofline(MODEL), h100)


# ---- the profile ----


@pytest.fixture(scope="module")
def profile(tables, h100) -> Profile:
    roofline = Roofline(MODEL)
    return imported(kernels(tables, h100), roofline, h100)


def test_the_profile_says_where_it_is_from_and_survives_its_file(profile, tmp_path) -> None:
    assert profile.identity["imported"]["source"] == "aiconfigurator-core"
    assert profile.identity["imported"]["backend"] == "vllm" and not profile.measured_host
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_the_host_comes_from_the_machine_and_its_server(profile, h100) -> None:
    roofline = Roofline(MODEL)
    slow = replace(h100, step_us=h100.step_us + 500, request_us=h100.request_us + 7)
    fast, served = (profile.coefficients_for(roofline, hardware) for hardware in (h100, slow))
    assert served.step_ns - fast.step_ns == pytest.approx(500e3)
    assert served.request_ns - fast.request_ns == pytest.approx(7e3)
    preset = Coefficients.from_roofline(roofline, h100)
    assert (fast.host_ns, fast.host_request_ns) == (preset.host_ns, preset.host_request_ns)
    assert fast.step_ns >= preset.host_ns


def test_jumps_and_steps_agree_under_an_imported_profile(profile, h100) -> None:
    """The profile is made one of `tiny`, as if its kernels had been measured."""
    shape, _ = engines.model_preset("tiny")
    of_tiny = replace(profile, identity=identity_of(Roofline(shape), h100))
    runs = [
        schedlab.run(
            ChunkedPrefill(), CommonWork(num_requests=60, rate=2000.0),
            engines.virtual("tiny", h100, num_blocks=400, max_model_len=2048, fast_forward=jump, profile=of_tiny),
        )
        for jump in (True, False)
    ]  # fmt: skip
    assert runs[0].digest == runs[1].digest and runs[0].summary["e2e/mean"] == runs[1].summary["e2e/mean"]


# ---- the command ----


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "schedlab", "profile", "import", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def test_without_a_source_the_command_says_which_there_are(tmp_path) -> None:
    done = command("somebody", cwd=tmp_path)
    assert done.returncode == 2 and "one of aiconfigurator, llmservingsim, vidur" in done.stderr
    assert done.stderr.rstrip().endswith("found somebody")
