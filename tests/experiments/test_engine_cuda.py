"""How engine=cuda is set up, on a stand-in for the device: the CPU under its name, and memory that is told."""

import gc
import weakref

import pytest
import torch

from schedlab.experiments import engines
from schedlab.experiments.notebook.runs import run
from schedlab.experiments.run.compose import preset
from schedlab.framework.errors import ConfigError, PolicyError
from schedlab.framework.model import executor as executor_module
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
def test_a_run_replays_its_decodes_unless_it_is_eager(device, eager, steps, monkeypatch):
    replayed, replay = [], graphs.DecodeGraphs.run
    monkeypatch.setattr(graphs.DecodeGraphs, "run", lambda *given: (replayed.append(given), replay(*given))[1])
    workload = Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=6)
    limits = {"num_blocks": 600, "max_num_seqs": 8, "max_model_len": 2048}
    setup = engines.cuda("tiny", device="cpu", dtype="float32", enforce_eager=eager, max_chained_steps=steps, **limits)
    result = run(ChunkedPrefill(), workload, setup, clock="wall", record="summary")
    assert result.summary["requests/finished"] == 6
    assert (not replayed) == eager
    assert setup.clocks == ("wall",)


def test_without_a_device_one_line_says_so():
    with pytest.raises(ConfigError, match="torch finds no CUDA device; engine=cpu and engine=virtual need none"):
        engines.cuda("tiny")


# ---- engines one after another -------------------------------------------------------------------------------------


@pytest.fixture
def h200(monkeypatch):
    """140 GiB that are held by weights and KV caches without values; nothing is computed, and nothing collected."""
    alive = weakref.WeakSet()

    def used() -> int:
        return sum(2 * executor.config.num_parameters() + executor._kv.nbytes for executor in alive)

    def noted(executor, *args, **options):
        begin(executor, *args, **options)
        alive.add(executor)

    begin = executor_module.ModelExecutor.__init__
    monkeypatch.setattr(executor_module.ModelExecutor, "__init__", noted)
    monkeypatch.setattr(executor_module.ModelExecutor, "_run", nothing)
    monkeypatch.setattr(executor_module.ModelExecutor, "copy_blocks", lambda *_: None)
    monkeypatch.setattr(executor_module, "available_bytes", lambda device: 140 * GIB - used())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (140 * GIB - used(), 140 * GIB))
    monkeypatch.setattr(graphs, "CudaGraphRecorder", lambda device: graphs.called)
    monkeypatch.setattr(engines, "cuda", eight_billion)
    gc.collect()
    gc.disable()
    yield used
    gc.enable()


def nothing(executor, inputs, steps):
    return torch.zeros((len(inputs.emitting_S), steps), dtype=torch.int64)


CUDA = engines.cuda


def eight_billion():
    shape = preset("model", "llama3.1-8b") | {"max_position_embeddings": 2048}
    return CUDA(shape, device="meta", max_num_seqs=16)


class Breaks(ChunkedPrefill):
    def schedule(self, step):
        if step.running:
            raise RuntimeError("a fault of the policy")
        super().schedule(step)


def test_each_engine_has_the_memory_of_the_first(h200):
    """As in a sweep, a comparison, a leaderboard: one after the other, also after one that failed."""
    workload = Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=2)
    blocks = []
    for policy in (ChunkedPrefill(), Breaks(), ChunkedPrefill()):
        setup = engines.cuda()
        blocks.append(setup.config.num_blocks)
        try:
            run(policy, workload, setup)
        except PolicyError:
            assert isinstance(policy, Breaks)
        assert h200() == 2 * setup.executor.config.num_parameters(), "the KV cache is held by who is done"
        del setup
        assert h200() == 0
    assert blocks[0] > 50_000 and blocks == blocks[:1] * 3


def test_fidelity_has_room_for_every_engine(h200):
    """What measures steps makes place for the runs between, on a clock that counts real time."""
    from schedlab.experiments.studies import calibrate, fidelity
    from schedlab.framework.cost.roofline import Roofline

    workload = Recorded(path="embedded:sample.jsonl.gz", format="mooncake", block_size=16, max_requests=2)
    setting = fidelity.Setting(
        policies={"chunked_prefill": ChunkedPrefill}, workload=workload, make_engine=engines.cuda,
        roofline=Roofline(engines.cuda().executor.config, "bf16"), hardware=engines.hardware_preset("h200"),
    )  # fmt: skip
    profiler = fidelity.Profiler(setting, calibrate.CalibrationOptions(2, 0.0, 2, 64, 64, 64, None), None, str)
    assert h200() == 0
    for _ in range(2):
        setting.run("chunked_prefill", 1.0, setting.make_engine(), "wall")
        assert h200() == 0
        profiler.after(1.0)
        assert h200() == 0
