"""Padded decode steps, called as they are: the tokens of the steps as they come, recorded once, without the host."""

import gc
import weakref
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import Pages
from test_config import preset

from schedlab.framework.batch import Batch
from schedlab.framework.clock import VirtualClock
from schedlab.framework.content import TokenContent
from schedlab.framework.engine import Engine, EngineConfig
from schedlab.framework.errors import PolicyError
from schedlab.framework.model.executor import ModelExecutor
from schedlab.framework.model.graphs import CudaGraphRecorder, DecodeGraphs, Packed, PaddedDecode, called, sizes_up_to
from schedlab.framework.model.phases import all_generated
from schedlab.framework.request import EngineRequest, SamplingParams
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.record import Recorder
from schedlab.framework.source import ListSource
from schedlab.policies.fcfs import FCFS

WARM = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, 1024, length).tolist()


class Recording:
    """A recorder that keeps what it was given and counts the replays."""

    def __init__(self):
        self.recorded, self.replays = [], 0

    def __call__(self, steps):
        self.recorded += [step.__self__.size for step in steps]
        return [self.counted(step) for step in steps]

    def counted(self, step):
        def replay():
            self.replays += 1
            step()

        return replay


def decoding(pages, lengths):
    """Sequences that have emitted one token each, half of them drawn with a temperature."""
    sequences = [pages.add(prompt(n, i), f"r{i}", WARM if i % 2 else None) for i, n in enumerate(lengths)]
    pages.step(*[(s, n) for s, n in zip(sequences, lengths, strict=True)])
    return sequences


def chain(pages, sequences, steps):
    """Run `steps` decodes of all back to back; the tokens [N, steps]."""
    for sequence in sequences:
        pages._grow(sequence, sequence.computed + steps)
    result = pages.executor.execute(Batch(inputs=pages.inputs([(s, 1) for s in sequences]), steps=steps))
    for sequence, tokens in zip(sequences, result.tokens.tolist(), strict=True):
        sequence.computed += steps
        sequence.tokens += tokens
    return result.tokens


def rows(pages, sequence):
    """Keys and values of the sequence's computed positions, of all layers."""
    blocks = torch.tensor(sequence.blocks)
    caches = [cache[blocks].flatten(0, 1)[: sequence.computed] for layer in pages.executor.kv_caches for cache in layer]
    return torch.stack(caches)


@pytest.fixture(scope="module")
def weights():
    from schedlab.framework.model.weights import random_weights

    return random_weights(preset("tiny"), 0, torch.float32)


def pages(weights, recorder=None, **options):
    executor = ModelExecutor(preset("tiny"), weights=weights, recorder=recorder, max_model_len=160, **options)
    return Pages(executor, num_blocks=64, block_size=8)


LENGTHS = (3, 30, 8, 64, 17, 7, 40)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("steps", [1, 4])
def test_padded_steps_and_chains_draw_the_tokens_of_steps_as_they_come(count, steps, weights):
    plain, padded = pages(weights), pages(weights, called)
    expected, got, caches = [], [], []
    for made, tokens in ((plain, expected), (padded, got)):
        sequences = decoding(made, LENGTHS[:count])
        for _ in range(8 // steps):
            tokens.append(chain(made, sequences, steps if made is padded else 1))
            for _ in range(steps - 1 if made is plain else 0):
                tokens.append(chain(made, sequences, 1))
        caches.append([rows(made, sequence) for sequence in sequences])
    assert np.array_equal(np.concatenate(expected, axis=1), np.concatenate(got, axis=1))
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_chains_without_recording_draw_the_same(weights):
    plain, chained = pages(weights), pages(weights)
    expected = np.concatenate([chain(plain, s, 1) for s in [decoding(plain, LENGTHS)] for _ in range(5)], axis=1)
    assert np.array_equal(chain(chained, decoding(chained, LENGTHS), 5), expected)


def test_padding_writes_nothing_and_batches_of_any_size_may_follow_each_other(weights):
    """NaN lies in every slot that no sequence owns: a padding row that read or wrote one would show."""
    made, plain = pages(weights, called), pages(weights)
    ours, theirs = decoding(made, LENGTHS), decoding(plain, LENGTHS)
    for chosen in ([0], [1, 2, 3, 4, 5], [6, 0], [3], [0, 1, 2, 3, 4, 5, 6]):
        assert np.array_equal(chain(made, [ours[i] for i in chosen], 1), chain(plain, [theirs[i] for i in chosen], 1))
    for mine, other in zip(made.executor.kv_caches, plain.executor.kv_caches, strict=True):
        assert torch.equal(torch.cat(mine).isnan(), torch.cat(other).isnan())


def test_each_size_is_recorded_once_before_the_first_batch(weights):
    recording = Recording()
    made = pages(weights, recording)  # 64 sequences at most
    assert sorted(recording.recorded) == list(sizes_up_to(64)) == [1, 2, 4, 8, 16, 32, 64]
    sequences = decoding(made, LENGTHS)
    assert recording.replays == 0, "prompts run as they come"
    for steps in (1, 3):
        chain(made, sequences, steps)
    assert recording.replays == 4 and len(recording.recorded) == 7


@given(st.integers(1, 300))
def test_a_size_holds_every_batch_and_wastes_less_than_half(most):
    sizes = sizes_up_to(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows


FORBIDDEN = ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")


def without_lengths(executor, monkeypatch):
    """The host's own kernels look at lengths, a GPU's do not: here attention is zeros. Returns the kernels."""
    still = executor._backend.kernels._replace(
        decode_attention=lambda q, *given, out, **more: out.zero_(),
        rope_kv_write=lambda q, *given: q.contiguous(),
        sample=lambda logits, *given: logits.argmax(-1),
    )
    monkeypatch.setattr(executor._decoder, "_kernels", still)
    for layer in executor._decoder._layers:
        monkeypatch.setattr(layer, "_kernels", still)
    return still


def refuse(*given, **more):
    raise AssertionError("the host waited for the device")


def test_a_step_asks_the_device_nothing(weights, monkeypatch):
    """What waits for a device raises while a step runs, as it would within a capture."""
    made = pages(weights)
    executor = made.executor
    still = without_lengths(executor, monkeypatch)
    step = PaddedDecode(4, 20, executor._decoder, still, executor.kv_caches, torch.device("cpu"))
    step.load(made.inputs([(s, 1) for s in decoding_inputs(made)]), 1, 0)

    for name in FORBIDDEN:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "from_numpy", refuse)
    with torch.inference_mode():
        step.step()
        with pytest.raises(AssertionError, match="waited"):
            step.drawn_N.tolist()


@pytest.mark.parametrize("steps", [1, 5])
def test_a_batch_waits_for_the_device_once(steps, weights, monkeypatch):
    """For the tokens; a chain as well."""
    made = pages(weights)
    still = without_lengths(made.executor, monkeypatch)
    graphs = DecodeGraphs(
        made.executor._decoder, still, made.executor.kv_caches, torch.device("cpu"), max_num_seqs=4, max_blocks=20,
        recorder=called,
    )  # fmt: skip
    monkeypatch.setattr(made.executor, "_graphs", graphs)
    sequences = decoding_inputs(made)
    for sequence in sequences:
        made._grow(sequence, sequence.computed + steps)
    batch = Batch(inputs=made.inputs([(s, 1) for s in sequences]), steps=steps)
    waits, cpu = [], torch.Tensor.cpu
    for name in set(FORBIDDEN) - {"numpy"}:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (waits.append(tensor.shape), cpu(tensor))[1])
    result = made.executor.execute(batch)
    assert waits == [(3, steps)] and result.tokens.shape == (3, steps)


def decoding_inputs(made):
    sequences = [made.add(prompt(n, n), f"r{n}") for n in (5, 9, 12)]
    for sequence in sequences:
        sequence.computed = len(sequence.tokens)
        sequence.tokens.append(1)
    return sequences


def test_the_inputs_of_a_step_are_one_copy():
    packed = Packed(3, 5, torch.device("cpu"))
    assert packed.bytes.numel() == 7 * 8 * 3 + 4 * 3 * 5
    assert all(field.untyped_storage().data_ptr() == packed.bytes.data_ptr() for field in packed.of.values())
    packed.tables_NB.fill_(-1)
    assert not any(field.any() for field in packed.of.values()), "tables lie behind the fields"
    for i, field in enumerate(packed.of.values()):
        field.fill_(i)
    assert [float(field[1]) for field in packed.of.values()] == list(range(7)) and (packed.tables_NB == -1).all()


def test_a_sequence_beyond_the_recorded_tables_is_refused(weights):
    executor = ModelExecutor(preset("tiny"), weights=weights, recorder=called, max_model_len=16)
    made = Pages(executor, num_blocks=64, block_size=8)
    sequences = decoding(made, [15])
    with pytest.raises(AssertionError, match="outgrows"):
        chain(made, sequences, 3)


def test_logits_that_are_not_finite_fail_their_grant_within_a_chain(weights):
    made = pages(weights, called)
    sequences = decoding(made, [8, 9])
    for caches in made.executor.kv_caches:
        for cache in caches:
            cache[sequences[1].blocks[0]] = torch.nan
    first = made.inputs([(s, 1) for s in sequences])
    result = made.executor.execute(Batch(inputs=first))
    assert result.failed == {1: "logits at position 10 are not finite"} and result.tokens[0, 0] >= 0


def test_only_steps_of_generated_tokens_are_recorded_steps(weights):
    made = pages(weights)
    sequences = decoding(made, [8, 9])
    fresh = made.add(prompt(1), "one")
    assert all_generated(made.inputs([(s, 1) for s in sequences]))
    assert not all_generated(made.inputs([(sequences[0], 1), (fresh, 1)]))
    assert not all_generated(made.inputs([(made.add(prompt(6), "six"), 3)]))


# -- capture, on a stand-in for CUDA ----------------------------------------------------------------------------------


class FakeCuda:
    """Keeps what is captured and when; a captured step runs when it is replayed."""

    def __init__(self, monkeypatch):
        self.events, streams, pools = [], count(1), count(1)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: f"pool {next(pools)}")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream(self, next(streams)))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream(self, 0))
        for name in ("device", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda given: self)

    def graph(self, graph, pool, stream):
        self.events.append(("capture", pool, stream.number))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *given):
        return None


class FakeStream:
    def __init__(self, cuda, number):
        self.cuda, self.number = cuda, number

    def wait_stream(self, other):
        self.cuda.events.append("wait")


class FakeGraph:
    def __init__(self, cuda):
        self.cuda = cuda

    def replay(self):
        self.cuda.events.append("replay")


def test_a_capture_follows_warm_ups_on_its_stream_and_each_engine_has_a_stream_and_a_pool(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    recorder = CudaGraphRecorder(torch.device("cpu"))
    for engine in (1, 2):
        cuda.events.clear()
        replays = recorder([lambda: cuda.events.append("step")] * 2)
        assert cuda.events == ["wait", "step", "step", "wait", ("capture", f"pool {engine}", engine), "step"] * 2
    replays[0]()
    assert cuda.events[-1] == "replay"


def test_graphs_are_recorded_from_the_largest_on(weights):
    recording = Recording()
    executor = pages(weights).executor
    DecodeGraphs(
        executor._decoder, executor._backend.kernels, executor.kv_caches, torch.device("cpu"), max_num_seqs=6,
        max_blocks=4, recorder=recording,
    )  # fmt: skip
    assert recording.recorded == [6, 4, 2, 1]


# -- the whole engine -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fcfs", "prefix_reuse"])
def test_the_engine_generates_the_same_tokens_padded_and_chained(name, weights):
    from schedlab.framework.testing.harness import Spec, run
    from schedlab.policies.fcfs import FCFS
    from schedlab.policies.prefix_reuse import PrefixReuse

    make = {"fcfs": FCFS, "prefix_reuse": lambda: PrefixReuse(chunk_size=24)}[name]
    ids = [(0, 1, 2 + i, 20 + i, 40 + i, 60 + i) for i in range(6)]
    trace = [Spec(f"r{i}", 0, 12 + 5 * i, 10 + i, ids=ids[i], id_width=8) for i in range(6)]
    keys = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    expected = None
    for steps, recorder in ((1, None), (1, called), (4, None), (8, called)):
        executor = ModelExecutor(preset("tiny"), weights=weights, recorder=recorder, max_model_len=256)
        outcome = run(make(), trace, executor=executor, max_chained_steps=steps, **keys)
        expected = expected or outcome.streams
        assert outcome.streams == expected
        assert outcome.tables.steps["repeat"].max() > 1 or steps == 1
        assert (outcome.tables.steps["device_us"] > 0).all()


def test_an_engine_after_another_holds_nothing_of_it(weights):
    executor = pages(weights, called).executor
    before = weakref.ref(executor._kv)
    with no_collections():
        executor.allocate(8, 8, 0, 2)
        assert before() is None


@contextmanager
def no_collections():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Breaks(FCFS):
    def schedule(self, step):
        if step.running:
            raise RuntimeError("a fault of the policy")
        super().schedule(step)


@pytest.mark.parametrize("preset_name", ["tiny", "sandwich norms"])
@pytest.mark.parametrize("policy", [FCFS, Breaks])
def test_a_closed_engine_holds_no_memory(preset_name, policy):
    """Neither KV caches, nor graphs, nor weights are left to a garbage collection, whether the run ended or failed."""
    shape = preset("tiny") if preset_name == "tiny" else replace(preset("tiny"), sandwich_norms=True)
    executor = ModelExecutor(shape, recorder=called, max_model_len=64)
    config = EngineConfig(num_blocks=8, block_size=8, max_model_len=64, swap_space_gib=0.001)
    request = EngineRequest("r", 0, 5, TokenContent(prompt(5)), recorded_output_tokens=4)
    with no_collections():
        recorder = Recorder(Measurement(128, 8))
        engine = Engine(policy(), executor, ListSource([request]), config, VirtualClock(), recorder)
        assert len(executor._host_kv[0, 0]) > 0
        held = [executor._kv, executor._host_kv, executor._graphs, executor._decoder, executor._decoder._layers[0]._qkv]
        held = [weakref.ref(each) for each in held]
        with closing(engine), suppress(PolicyError):
            engine.run()
        assert [each() is None for each in held] == [True, True, True, False, False]
        with pytest.raises(AssertionError, match="the engine is closed"):
            engine.commit.finish(request, "finished", 0)
        engine.close()
        del engine, executor
        assert [each() for each in held] == [None] * 5


@pytest.mark.parametrize("block_size", [1, 8])
def test_warming_up_writes_nothing_and_computes_both_phases(block_size, weights, monkeypatch):
    executor = ModelExecutor(preset("tiny"), weights=weights)
    made = Pages(executor, num_blocks=16, block_size=block_size)  # NaN everywhere
    spans, forward = [], executor._decoder.forward
    monkeypatch.setattr(
        executor._decoder, "forward", lambda batch, caches: (spans.extend(batch.spans), forward(batch, caches))[1]
    )
    executor.warm_up()
    assert [span.decode for span in spans] == [False, True]
    assert all(cache.isnan().all() for layer in executor.kv_caches for cache in layer)
    assert len(made.free) == 16
