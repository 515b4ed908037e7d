"""What is written is read back: the offered workload of a run request for request, public formats row for row."""

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from replay import facts, replay

from schedlab.framework.content import TokenContent, UniqueContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, EngineRequest, SamplingParams
from schedlab.framework.results.packed import CODECS
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.source import Terms
from schedlab.workloads.statistics import reuse
from schedlab.workloads.trace import Trace
from schedlab.workloads.workload import make_source
from schedlab.workloads.writers import WorkloadWriter, write_mooncake, write_offered, write_vidur

MS = 10**6


def offered(source, path, service_ns) -> list[EngineRequest]:
    """Replays a source and writes what it offers."""
    with WorkloadWriter(path) as writer:
        requests = [request for _, request in replay(source, lambda r: service_ns)]
        for request in requests:
            writer.write(request)
    return requests


@given(strategies.traces(), st.integers(0, 30), st.integers(0, 2), st.integers(0, 99))
def test_a_run_repeats_from_its_own_folder(tmp_path_factory, trace, service_ms, preparation_ms, seed):
    path = tmp_path_factory.mktemp("run") / "workload.jsonl.gz"
    terms = Terms(slo=SLO("default", 1.0), prompt_seed=seed, max_tokens=9)
    trace = strategies.with_stages(trace, preparation_ms * MS, 5)
    first = offered(make_source(trace, terms), path, service_ms * MS)
    again = read(path)
    source = make_source(again, Terms(slo_classes=again.slo_classes, prompt_seed=again.provenance.prompt_seed or 0))
    assert [facts(r) for r in first] == [facts(r) for _, r in replay(source, lambda r: service_ms * MS)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_a_killed_run_offered_is_read_up_to_its_last_flush(tmp_path, codec):
    if codec.name == "zstd":
        pytest.importorskip("zstandard")
    path = tmp_path / f"workload.jsonl{codec.suffix}"
    requests = [
        EngineRequest(f"r{i}", i, 5, UniqueContent(i), recorded_output_tokens=3, source_row=i) for i in range(9)
    ]
    writer = WorkloadWriter(path)
    for request in requests[:7]:
        writer.write(request)
    writer.flush()
    killed = path.read_bytes()
    for request in requests[7:]:
        writer.write(request)
    writer.close()
    assert len(read(tmp_path)) == 9
    path.write_bytes(killed)
    with pytest.warns(UserWarning, match=rf"{path.name}: the compressed file ends early; read up to its last"):
        trace = read(tmp_path)
    assert trace.request_id.tolist() == [f"r{i}" for i in range(7)]


@given(strategies.traces(sessions=False))
def test_offered_traces_are_read_as_they_are(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("w") / "workload.jsonl.gz"
    write_offered(trace, path)
    once = read(path)
    write_offered(once, path)
    assert read(path).equals(once)


def test_live_requests_keep_their_tokens_and_sampling(tmp_path):
    path = tmp_path / "workload.jsonl.gz"
    sampling = SamplingParams(temperature=0.7, top_k=5, stop=("x",), stop_token_ids=(3, 4))
    live = EngineRequest("live", 5, 3, TokenContent([7, 8, 9]), max_tokens=20, sampling=sampling, source_row=0)
    with WorkloadWriter(path) as writer:
        writer.write(live)
    (again,) = make_source(read(path), Terms()).pop(5)
    assert facts(again) == facts(live)


@given(strategies.traces(extras=False))
def test_mooncake_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("m") / "m.jsonl.gz"
    options = ReadOptions(block_size=trace.ids.width if trace.ids else None)
    write_mooncake(trace, path)
    once = read(path, "mooncake", options)
    assert once.arrival_ns.tolist() == (trace.arrival_ns - trace.arrival_ns[0]).tolist()
    assert (once.ids is None) == (trace.ids is None)
    write_mooncake(once, path)
    assert read(path, "mooncake", options).equals(once)


def test_mooncake_files_are_whole_milliseconds_for_other_readers(tmp_path):
    trace = Trace("t", np.arange(2), np.array([0, 1_234_567]), np.array([5, 6]), np.array([1, 2]))
    write_mooncake(trace, tmp_path / "m.jsonl")
    assert (tmp_path / "m.jsonl").read_text().splitlines()[1] == (
        '{"timestamp":1,"arrival_ns":1234567,"input_length":6,"output_length":2}'
    )


def test_segments_have_no_mooncake_form(tmp_path):
    segments = Trace("t", np.arange(1), np.zeros(1, np.int64), np.array([9]), np.array([1]),
                     ids=strategies.ragged([[1, 2]], 0, [[4, 5]]))  # fmt: skip
    with pytest.raises(ConfigError, match="t: prompts of segments of unequal length have no Mooncake form"):
        write_mooncake(segments, tmp_path / "m.jsonl")


@given(strategies.traces(ids=False, sessions=False, extras=False))
def test_vidur_round_trip(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("v") / "v.csv"
    write_vidur(trace, path)
    once = read(path, "vidur")
    assert once.equals(trace.with_columns(arrival_ns=trace.arrival_ns - trace.arrival_ns[0]))


@pytest.mark.parametrize("name", ["mooncake-fast25/synthetic_trace.jsonl.gz", "burstgpt/BurstGPT_3.first60.csv"])
def test_published_traces_survive_the_recorder(traces, tmp_path, name):
    trace = read(traces / name)
    write_mooncake(trace, tmp_path / "m.jsonl.gz")
    again = read(tmp_path / "m.jsonl.gz", "mooncake")
    kept = trace.with_columns(model=None, kind=None)
    assert again.equals(kept if kept.ids is not None else kept.with_columns(ids=None))


def test_equal_traces_are_equal_files(tmp_path):
    trace = Trace("t", np.arange(1), np.zeros(1, np.int64), np.array([5]), np.array([1]))
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_mooncake(trace, tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_local_ids_without_tails_become_global_ids_with(traces, tmp_path):
    weka = read(traces / "weka-agentic/sessions_49.jsonl.gz")
    write_mooncake(weka, tmp_path / "m.jsonl.gz")
    again = read(tmp_path / "m.jsonl.gz", "mooncake", ReadOptions(block_size=64))
    assert again.scope is None and reuse(again).prefix == pytest.approx(reuse(weka).prefix, abs=1e-12)
    assert reuse(again).unique_blocks == reuse(weka).unique_blocks + int((weka.prompt_tokens % 64 > 0).sum())
    assert (again.after >= 0).sum() == (weka.after >= 0).sum(), "sub-agents wait for their parents there too"
