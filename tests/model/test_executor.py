"""The executor: what a draw depends on, what fails alone, how memory is refused, and tiny's streams."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from paged import Pages
from test_config import preset

from schedlab.framework.batch import Batch
from schedlab.framework.errors import ConfigError
from schedlab.framework.model import executor as executor_module
from schedlab.framework.model import memory
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.request import SamplingParams

WARM = SamplingParams(temperature=1.0, top_k=50, top_p=0.95)


def tiny(**options):
    return ModelExecutor(preset("tiny"), **options)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, 1024, length).tolist()


def streams(pages, *requests, count=16):
    """Streams of (request_id, prompt, sampling) computed together."""
    sequences = [pages.add(tokens, name, sampling) for name, tokens, sampling in requests]
    pages.step(*[(s, len(s.tokens)) for s in sequences])
    for _ in range(count - 1):
        pages.step(*[(s, 1) for s in sequences])
    for sequence in sequences:
        pages.drop(sequence)
    return [sequence.output for sequence in sequences]


def test_tiny_streams_wander():
    outputs = streams(Pages(tiny(), 512, 16), *[(f"r{i}", prompt(20 + i, i), None) for i in range(16)], count=64)
    assert statistics.median(len(set(output)) for output in outputs) >= 16
    assert len({tuple(output) for output in outputs}) == 16


def test_a_sampled_stream_depends_on_seed_request_position_and_parameters_alone():
    pages = Pages(tiny(sampling_seed=5), 256, 16)
    mine = ("mine", prompt(30), WARM)
    [alone] = streams(pages, mine)
    together = streams(pages, ("a", prompt(9, 1), None), mine, ("b", prompt(50, 2), SamplingParams(temperature=2.0)))
    assert together[1] == alone
    chunked = pages.add(mine[1], "mine", WARM)
    assert pages.generate(chunked, 16, chunk=7) == alone
    assert streams(Pages(tiny(sampling_seed=5), 256, 16), mine) == [alone]
    for other in (("other", *mine[1:]), ("mine", mine[1], SamplingParams(temperature=1.5, top_k=50, top_p=0.95))):
        assert streams(pages, other) != [alone]
    assert streams(Pages(tiny(sampling_seed=6), 256, 16), mine) != [alone]


def test_a_request_with_a_seed_needs_no_name():
    pages = Pages(tiny(), 256, 16)
    seeded = SamplingParams(temperature=1.0, seed=3)
    first, second, third = streams(
        pages, ("a", prompt(30), seeded), ("b", prompt(30), seeded), ("c", prompt(30), SamplingParams(1.0, seed=4))
    )
    assert first == second != third


def test_temperature_zero_and_top_k_one_are_greedy():
    pages = Pages(tiny(), 256, 16)
    greedy, cold, single = streams(
        pages, ("a", prompt(30), None), ("b", prompt(30), SamplingParams(seed=9)),
        ("c", prompt(30), SamplingParams(temperature=5.0, top_k=1)),
    )  # fmt: skip
    assert greedy == cold == single


def test_inner_chunks_emit_nothing():
    pages = Pages(tiny())
    first, second = pages.add(prompt(9), "a"), pages.add(prompt(7), "b")
    result = pages.step((first, 4), (second, 7))
    assert result.tokens.tolist()[0] == [-1] and result.tokens[1, 0] >= 0
    assert result.tokens.dtype == np.int64 and result.duration_ns > 0 and not result.failed
    assert pages.step().tokens.shape == (0, 1)


def test_a_request_with_broken_logits_fails_alone():
    """One vocabulary entry of the embedding is NaN; only the request that contains it fails, in the step that emits."""
    pages = Pages(tiny(), 256, 16)
    healthy = ("healthy", [5, 6, 7, 8], None)
    expected = streams(pages, healthy, count=4)
    pages.executor._decoder._embed_VH[9] = torch.nan
    good, sick = pages.add(healthy[1], "healthy"), pages.add([5, 9, 7, 8], "sick")
    assert pages.step((sick, 2)).failed == {}
    result = pages.step((good, 4), (sick, 2))
    assert result.failed == {1: "logits at position 4 are not finite"} and result.tokens[1, 0] == -1
    pages.drop(sick)
    assert pages.generate(good, 3) == expected[0]


def test_block_bytes_are_what_allocation_takes():
    executor = tiny(dtype="bfloat16")
    executor.allocate(10, 16, 3, 4)
    allocated = sum(cache.numel() * cache.element_size() for pair in executor.kv_caches for cache in pair)
    assert executor.block_bytes(16) * 10 == allocated
    assert executor.block_bytes(16) == 16 * preset("tiny").kv_bytes_per_token("bfloat16")


def test_copies_run_out_before_in_before_compute():
    """A block is read for its copy-out in the step that overwrites it."""
    pages = Pages(tiny())
    sequence = pages.add(prompt(8))
    pages.prefill(sequence)
    cache = pages.executor.kv_caches[0][0]
    block, other = sequence.blocks[0], pages.free[0]
    before = cache[block].clone()
    cache[other] = 1.0
    pages.executor.execute(Batch(copies_out=[(other, 0), (block, 1)], copies_in=[(0, block), (1, other)]))
    assert (cache[block] == 1).all() and torch.equal(cache[other], before)


def test_what_does_not_fit_in_memory_is_refused_in_one_line(monkeypatch):
    executor = tiny()
    monkeypatch.setattr(executor_module, "available_bytes", lambda device: 2**20)
    executor.allocate(16, 16, 16, 4)
    with pytest.raises(ConfigError) as error:
        executor.allocate(32, 16, 8, 4)
    assert str(error.value) == (
        "engine.num_blocks: 32 blocks and 8 host blocks of 16 tokens need 1.2 MiB, found 1.0 MiB available"
    )
    with pytest.raises(ConfigError) as error:
        ModelExecutor(preset("llama3.1-8b"), dtype="bfloat16")
    assert str(error.value) == ("model: 8,030,261,248 parameters in bfloat16 need 15.0 GiB, found 1.0 MiB available")


@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (5, 1), (7, 4)])
def test_failed_grants_are_named_by_their_first_missing_token(shape):
    rows = shape[0]
    draw = np.random.default_rng(rows)
    drawn = np.where(draw.random(shape) < 0.3, -1, 5)
    emitting, positions = np.sort(draw.choice(20, rows, replace=False)), draw.integers(0, 99, rows)
    inputs = SimpleNamespace(emitting_S=emitting, output_positions_S=positions)
    expected = {
        int(emitting[n]): f"logits at position {positions[n] + drawn[n].tolist().index(-1)} are not finite"
        for n in range(rows) if -1 in drawn[n]
    }  # fmt: skip
    assert executor_module._failed(inputs, drawn) == expected


def test_host_blocks_are_of_the_hosts_memory(monkeypatch):
    """A device with room for its own blocks alone, and a host with room for four of its."""
    executor = ModelExecutor(preset("tiny"), device="meta", recorder=None)
    room = {"meta": 16 * executor.block_bytes(16), "cpu": 4 * executor.block_bytes(16)}
    monkeypatch.setattr(executor_module, "available_bytes", lambda device: room[device.type])
    executor.allocate(16, 16, 4, 4)
    with pytest.raises(ConfigError) as error:
        executor.allocate(16, 16, 5, 4)
    assert str(error.value) == (
        "engine.swap_space_gib: 5 host blocks of 16 tokens need 0.2 MiB of the host's memory, found 0.1 MiB available"
    )
    with pytest.raises(ConfigError, match=r"^engine.num_blocks: 17 blocks of 16 tokens need"):
        executor.allocate(17, 16, 4, 4)


def test_available_memory_heeds_the_control_group(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert memory._cgroup_rest(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_rest(tmp_path) == memory._cgroup_rest(tmp_path / "absent") > 1 << 60
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   3 kB\n")
    assert memory._free_ram(tmp_path / "meminfo") == 3072
    assert memory.available_bytes(torch.device("cpu")) > 0


def test_unknown_dtype():
    with pytest.raises(ConfigError, match=r"engine\.dtype: expected one of float64, .*, found int4"):
        tiny(dtype="int4")
