"""The published traces: every file loads, and its figures are those worked out independently of this code."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from schedlab.framework.errors import ConfigError
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.servegen import ServeGen
from schedlab.workloads.statistics import Distribution, arrival_statistics, oddities, reuse, reuse_with_memory
from schedlab.workloads.workload import Recorded

EVERYTHING = ReadOptions(keep_failed=True, keep_empty=True)

# rows, span s, rate, gap CV, variance/mean per s; then mean, median, p99, max of prompt and output; prefix reuse in %
FIGURES = {
    "azure-2023/AzureLLMInferenceTrace_code.csv.gz":
        ("8819 3436 2.57 13.15 13.2", "2048 1469 7436 7437", "28 13 251 1899", None),
    "azure-2023/AzureLLMInferenceTrace_conv.csv.gz":
        ("19366 3502 5.53 1.09 1.39", "1155 1020 4142 14050", "211 129 601 1000", None),
    "mooncake-fast25/conversation_trace.jsonl.gz":
        ("12031 3537 3.40 3.03 7.9", "12035 6909 85400 126195", "343 350 1119 2000", "37.4"),
    "mooncake-fast25/synthetic_trace.jsonl.gz":
        ("3993 1022 3.91 1.01 1.09", "15325 11587 66456 191378", "149 69 768 893", "65.1"),
    "ragpulse/0_trace.jsonl.gz":
        ("7106 604603 0.012 3.06 1.01", "2944 3140 5438 7712", "283 234 891 2183", "31.4"),
    "burstgpt/BurstGPT_1.first400.csv":
        ("400 37269 0.011 4.56 1.01", "520 314 1958 2126", "277 230 1421 2019", None),
}  # fmt: skip


def shown(value: float, like: str) -> str:
    """`value` with as many decimals as the expected text has; halves away from zero, as people round."""
    decimals = len(like.partition(".")[2])
    return f"{value + 1e-9:.{decimals}f}"


def assert_shown(expected: str, found: list[float]) -> None:
    words = expected.split()
    assert [shown(value, word) for word, value in zip(words, found, strict=True)] == words


@pytest.mark.parametrize("name", FIGURES)
def test_figures(traces, name):
    trace = read(traces / name, options=EVERYTHING)
    arrivals, prompts, outputs, hit = FIGURES[name]
    a, p, o = arrival_statistics(trace), Distribution.of(trace.prompt_tokens), Distribution.of(trace.output_tokens)
    assert_shown(arrivals, [len(trace), a.span_s, a.rate, a.gap_cv, a.dispersion])
    assert_shown(prompts, [p.mean, p.median, p.p99, p.max])
    assert_shown(outputs, [o.mean, o.median, o.p99, o.max])
    found = reuse(trace)
    assert (found is None) == (hit is None)
    if hit is not None:
        assert_shown(hit, [100 * found.prefix])


def test_mooncake_conversation_in_detail(traces):
    trace = read(traces / "mooncake-fast25/conversation_trace.jsonl.gz")
    a = arrival_statistics(trace)
    assert (a.distinct, a.most) == (1180, 28)
    assert oddities(trace)["at the stamp of the row before"] == 10_851
    assert oddities(trace)["of one output token (no decode step)"] == 72
    assert oddities(trace)["of more than 32,768 prompt tokens"] == 828
    assert reuse(trace).fully_cached == 118
    assert (trace.ids.values[trace.ids.offsets[:-1]] == 0).all(), "every prompt begins with the same block"
    assert reuse_with_memory(trace, 1 << 40) == pytest.approx(reuse(trace).prefix)


def test_mooncake_synthetic_in_detail(traces):
    trace = read(traces / "mooncake-fast25/synthetic_trace.jsonl.gz")
    odd = oddities(trace)
    assert reuse(trace).fully_cached == 213
    assert odd["of one output token (no decode step)"] == 4
    assert odd["of more than 131,072 prompt tokens"] == 10


def test_ragpulse_segments(traces):
    trace = read(traces / "ragpulse/0_trace.jsonl.gz")
    in_file_order = reuse(trace.take(np.argsort(trace.source_row)))
    assert_shown("33.5 72.0", [100 * in_file_order.leading, 100 * in_file_order.any_position])
    assert trace.provenance.counts == {"inversions": 1}
    turns = np.bincount(trace.session.codes)
    assert (len(turns), int((turns == 1).sum()), int(turns.max())) == (3990, 2347, 25)


def test_burstgpt_failures_are_counted(traces):
    trace = read(traces / "burstgpt/BurstGPT_1.first400.csv")
    assert len(trace) == 383 and trace.provenance.counts == {"empty_prompt": 17}


def test_burstgpt_3_starts_at_its_first_row(traces):
    trace = read(traces / "burstgpt/BurstGPT_3.first60.csv")
    assert trace.arrival_ns[0] == 0 and trace.provenance.origin_ns == 19_440_110 * 10**9
    assert trace.session.names[0] == "1722ac82-0a46-4bf0-aa08-89794e7a2b3f"
    second = 4  # its second turn: 191 s after the first, which took 43 s
    assert trace.after[second] == 0 and trace.think_ns[second] == (191 - 43) * 10**9


def test_weka_sessions(traces):
    trace = read(traces / "weka-agentic/sessions_49.jsonl.gz", options=EVERYTHING)
    top = trace.take(np.flatnonzero([kind == "call" for kind in trace.kind.tolist()]))
    assert (len(top), len(trace) - len(top)) == (865, 56)
    p, o = Distribution.of(top.prompt_tokens), Distribution.of(top.output_tokens)
    assert_shown("82985 71668 260454 451691", [p.mean, p.median, p.p99, p.max])
    assert_shown("467 252 4382 6786", [o.mean, o.median, o.p99, o.max])
    assert_shown("90.6", [100 * reuse(top).prefix])
    assert int((top.output_tokens == 0).sum()) == 2
    spans = [np.ptp(top.arrival_ns[top.session.codes == code]) / 1e9 for code in np.unique(top.session.codes)]
    assert (len(spans), round(float(np.median(spans)))) == (49, 824)


def test_weka_sub_agents_run_beside_their_parent(traces):
    trace = read(traces / "weka-agentic/sessions_49.jsonl.gz", options=EVERYTHING)
    names = trace.session.tolist()
    first = names.index("trace_0277/agent_001")
    parent = int(trace.after[first])
    assert names[parent] == "trace_0277" and trace.think_ns[first] == round((79.224 - 18.78) * 1e9)
    assert trace.scope[first] == "trace_0277"
    following = [row for row in np.flatnonzero(trace.after == parent).tolist() if names[row] == "trace_0277"]
    (join,) = following
    others = trace.also_after.values[slice(*trace.also_after.offsets[join : join + 2])].tolist()
    assert others and all(names[row].startswith("trace_0277/agent") for row in others), "it joins its sub-agents"
    assert trace.think_ns[join] == 92_886 * 10**6 < 209 * 10**9, "what is left after the last of them"


@pytest.mark.parametrize("kind", ["code", "conv"])
def test_vidur_copies_are_azure_row_for_row(traces, kind):
    azure = read(traces / f"azure-2023/AzureLLMInferenceTrace_{kind}.csv.gz")
    vidur = read(traces / f"vidur/splitwise_{kind}.csv.gz")
    assert vidur.equals(azure)


def test_vidur_lengths_need_an_arrival_process(traces):
    path = str(traces / "vidur/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz")
    p, o = (Distribution.of(c) for c in (read(path).prompt_tokens, read(path).output_tokens))
    assert_shown("2588 2730 3933 4054", [p.mean, p.median, p.p99, p.max])
    assert_shown("291 167 3271 4056", [o.mean, o.median, o.p99, o.max])
    with pytest.raises(ConfigError, match=r"set workload\.arrivals"):
        Recorded(path=path).load()


def test_azure_equals_a_plain_reading_of_the_file(traces):
    path = traces / "azure-2023/AzureLLMInferenceTrace_conv.csv.gz"
    with gzip.open(path, "rt", newline="") as text:
        rows = list(csv.DictReader(text))
    trace = read(path)
    assert trace.prompt_tokens.tolist() == [int(row["ContextTokens"]) for row in rows]
    stamps = np.array([row["TIMESTAMP"] for row in rows], dtype="datetime64[ns]").astype(np.int64)
    assert trace.arrival_ns.tolist() == (stamps - stamps[0]).tolist()
    assert trace.provenance.origin == "2023-11-16T18:15:46.680590000"


def test_mooncake_equals_a_plain_reading_of_the_file(traces):
    path = traces / "mooncake-fast25/conversation_trace.jsonl.gz"
    with gzip.open(path, "rt") as text:
        rows = [json.loads(line) for line in text]
    trace = read(path)
    assert trace.arrival_ns.tolist() == [row["timestamp"] * 10**6 for row in rows]
    assert [trace.ids.row(i).tolist() for i in range(len(trace))] == [row["hash_ids"] for row in rows]


def test_format_samples_load(traces):
    assert len(read(traces / "splitwise-sim/test_trace.csv")) == 3
    assert len(read(traces / "llmservingsim/example_trace.jsonl")) == 10
    sizes = {
        "multi_session_example.csv": 8,
        "multi_session_large.csv": 303,
        "session_workload_example.csv": 11,
        "round_trace.jsonl": 19,
    }
    assert {name: len(read(traces / "tracelab" / name)) for name in sizes} == sizes


def test_tracelab_compacted_history_begins_anew(traces):
    trace = read(traces / "tracelab/session_workload_example.csv")
    assert trace.provenance.counts == {"histories_begun_anew": 1}
    assert trace.grows.tolist() == [False] + [True] * 9 + [False]


def servegen_clients(traces: Path) -> list[str]:
    return [str(p).removesuffix("-trace.csv.gz") for p in sorted((traces / "servegen").glob("*-trace.csv.gz"))]


def test_every_servegen_client_loads(traces):
    for client in servegen_clients(traces):
        if client.endswith("m-small_chunk-1"):
            continue
        trace = ServeGen(clients=[client], duration_s=14 * 86_400).load()
        assert len(trace) and trace.client.names == (Path(client).name,)


def test_a_servegen_client_without_lengths_is_named(traces):
    client = next(c for c in servegen_clients(traces) if c.endswith("m-small_chunk-1"))
    with pytest.raises(ValueError, match=r"chunk-1-dataset\.json: no such file"):
        ServeGen(clients=[client]).load()
