"""How engine=cuda is set up, on a stand-in for the device: the CPU under its name, and memory that is told."""

import pytest
import torch

from schedlab.experiments import engines
from schedlab.experiments.notebook.runs import run
from schedlab.framework.errors import ConfigError
from schedlab.framework.model import graphs
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.workload import Recorded

GIB = 1 << 30


@pytest.fixture
def device(monkeypatch):
    """10 GiB, 4 of them taken."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 10 * GIB))
    monkeypatch.setattr(graphs, "CudaGraphRecorder", lambda device: graphs.called)


def cuda(**options):
    return engines.cuda("tiny", device="cpu", dtype="float32", max_model_len=512, **options)


def test_blocks_are_what_the_utilization_leaves_beside_weights_and_a_step(device):
    setup = cuda(gpu_memory_utilization=0.9)
    reserved = setup.executor.step_bytes(2048, 128)
    left = 9 * GIB - 4 * GIB - reserved
    assert setup.config.num_blocks == left // setup.executor.block_bytes(16)
    assert cuda(gpu_memory_utilization=0.5).config.num_blocks < setup.config.num_blocks
    assert cuda(num_blocks=77).config.num_blocks == 77


@pytest.mark.parametrize("share", [0.3, 0.4])
def test_no_room_is_told(device, share):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: 0.[34] of the device leaves .* for the KV cache"):
        cuda(gpu_memory_utilization=share)


@pytest.mark.parametrize("share", [0, 1.5])
def test_a_share_is_a_share(device, share):
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: expected a share in \(0, 1\]"):
        cuda(gpu_memory_utilization=share)


def test_a_larger_step_and_a_longer_context_reserve_more(device):
    executor = cuda(num_blocks=8).executor
    longer = engines.cuda("tiny", device="cpu", dtype="float32", max_model_len=32768, num_blocks=8).executor
    assert executor.step_bytes(2048, 128) < executor.step_bytes(4096, 128)
    assert executor.step_bytes(2048, 128) < executor.step_bytes(2048, 256) < longer.step_bytes(2048, 256)


@pytest.mark.parametrize("eager, steps", [(False, 1), (False, 4), (True, 1)])
def test_a_run_replays_its_decodes_unless_it_is_eager(device, eager, steps):
    workload = Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=6)
    limits = {"num_blocks": 600, "max_num_seqs": 8, "max_model_len": 2048}
    setup = engines.cuda("tiny", device="cpu", dtype="float32", enforce_eager=eager, max_chained_steps=steps, **limits)
    result = run(ChunkedPrefill(), workload, setup, clock="wall", record="summary")
    assert result.summary["requests/finished"] == 6
    assert (setup.executor._graphs is None) == eager
    assert setup.clocks == ("wall",)


def test_without_a_device_one_line_says_so():
    with pytest.raises(ConfigError, match="torch finds no CUDA device; engine=cpu and engine=virtual need none"):
        engines.cuda("tiny")
