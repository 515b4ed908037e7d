"""Requests that wait for several others: who arrives when, through every selection, file and run."""

import json

import numpy as np
import pytest
import rows
import strategies
from hypothesis import given
from hypothesis import strategies as st
from replay import facts, replay
from strategies import parents_of

import schedlab
from schedlab.framework.errors import ConfigError, SchedlabError, TraceError
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads import select
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.readers.otel_genai import read_with
from schedlab.workloads.replicate import bootstrap, leaders
from schedlab.workloads.soundness import request_names
from schedlab.workloads.source import Terms
from schedlab.workloads.trace import Labels, Trace, concatenate
from schedlab.workloads.workload import Recorded, make_source
from schedlab.workloads.writers import WorkloadWriter, starts_session, write_mooncake, write_offered

MS = 10**6
DELIVERY = 7


def arrivals(trace, service_ns, **how):
    """By name: (arrival, end) of each request that arrives, where each takes `service_ns`."""
    seen = replay(make_source(strategies.with_stages(trace, 0, DELIVERY), Terms(), **how), lambda r: service_ns)
    return {request.request_id: (request._arrival_ns, now + service_ns) for now, request in seen}, seen


@given(strategies.programs(), st.integers(0, 30))
def test_a_request_arrives_its_think_time_after_the_last_end_and_delivery(trace, service_ms):
    came, _ = arrivals(trace, service_ms * MS)
    names, parents = request_names(trace), parents_of(trace)
    assert sorted(came) == sorted(names)
    for row, name in enumerate(names):
        ends = [came[parent][1] + DELIVERY for parent in parents[name]]
        think = int(trace.think_ns[row]) if ends else 0
        assert came[name][0] == (max(ends) + think if ends else trace.arrival_ns[row])


@given(strategies.programs(), st.integers(0, 30))
def test_a_run_of_programs_repeats_from_its_own_folder(tmp_path_factory, trace, service_ms):
    path = tmp_path_factory.mktemp("run") / "workload.jsonl.gz"
    _, seen = arrivals(trace, service_ms * MS)
    with WorkloadWriter(path) as writer:
        for _, request in seen:
            writer.write(request)
    again = read(path)
    first = [(facts(r), r.program, r.depth) for _, r in seen]
    second = replay(make_source(again, Terms()), lambda r: service_ms * MS)
    assert first == [(facts(r), r.program, r.depth) for _, r in second]


@given(strategies.programs())
def test_depth_and_program_are_those_of_the_graph(trace):
    parents, names = parents_of(trace), request_names(trace)
    depth = dict(zip(names, trace.depth.tolist() if trace.depth is not None else [None] * len(trace), strict=True))
    if trace.depth is None:
        return
    for name in names:
        assert depth[name] == max((depth[parent] + 1 for parent in parents[name]), default=0)
    program = dict(zip(names, trace.program.tolist() if trace.program else [None] * len(trace), strict=True))
    groups = {name: {name} for name in names}
    links = [(a, b) for a in names for b in parents[a]]
    if trace.session is not None:
        session = dict(zip(names, trace.session.tolist(), strict=True))
        links += [(a, b) for a in names for b in names if session[a] is not None and session[a] == session[b]]
    for a, b in links:
        joined = groups[a] | groups[b]
        for member in joined:
            groups[member] = joined
    for a in names:
        for b in names:
            assert (b in groups[a]) == (a == b or (program[a] is not None and program[a] == program[b]))


def topological(parents):
    """The names, parents first."""
    order = []
    while len(order) < len(parents):
        order += [name for name in parents if name not in order and parents[name] <= set(order)]
    return order


@given(strategies.programs(), st.data())
def test_a_choice_of_rows_keeps_what_is_left_to_wait_for(trace, data):
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(trace), max_size=len(trace))))
    if not keep.any():
        return
    before, kept = parents_of(trace), select.choose(trace, keep, "left_out")
    there = {name for name, keeps in zip(request_names(trace), keep, strict=True) if keeps}
    ancestors = {}
    for name in sorted(
        before, key=lambda name: trace.depth[request_names(trace).index(name)] if trace.depth is not None else 0
    ):
        ancestors[name] = before[name].union(*(ancestors.get(p, set()) for p in before[name]))
    for name, parents in parents_of(kept).items():
        assert before[name] & there <= parents <= ancestors[name] & there
    came, _ = arrivals(kept, 5 * MS)
    assert set(came) == there
    if trace.program is not None and kept.provenance.counts.get("dependencies_cut", 0) == 0:
        lost = sum(len(before[name]) - len(parents) for name, parents in parents_of(kept).items())
        assert lost == 0


@given(strategies.programs(), st.integers(2, 3))
def test_laps_and_parts_keep_their_own_links(trace, number):
    once = parents_of(trace)
    lapped = parents_of(select.laps(trace, number))
    assert len(lapped) == number * len(trace)
    for name, parents in lapped.items():
        own, _, lap = name.partition("#")
        assert parents == {f"{p}#{lap}" if lap else p for p in once[own]}
    renamed = trace.with_columns(request_id=Labels(np.arange(len(trace)), tuple(f"q{i}" for i in range(len(trace)))))
    assert parents_of(concatenate([trace, renamed])) == {**once, **parents_of(renamed)}


@given(strategies.programs(), st.integers(0, 99))
def test_a_bootstrap_keeps_programs_whole(trace, seed):
    if trace.arrival_ns[-1] < 20:
        return
    try:
        drawn = bootstrap(trace, np.random.default_rng(seed))
    except ConfigError as nothing:
        assert "hold no request" in str(nothing)
        return
    once = parents_of(trace)
    for name, parents in parents_of(drawn).items():
        own, _, copy = name.partition("#")
        assert parents == {f"{p}#{copy}" if copy else p for p in once[own]}
    assert len(np.unique(leaders(drawn))) <= len(drawn)


@given(strategies.programs(), st.data())
def test_with_abandon_nothing_that_follows_a_failure_arrives(trace, data):
    names = request_names(trace)
    failing = set(data.draw(st.lists(st.sampled_from(names))))
    source = make_source(trace, Terms(), abandon=True)

    def service(request):
        request._state = "rejected" if request.request_id in failing else "finished"
        return 3 * MS

    came = {request.request_id for _, request in replay(source, service)}
    parents, expected = parents_of(trace), set()
    for name in sorted(
        names, key=lambda n: trace.depth[names.index(n)] if trace.depth is not None else int(bool(parents[n]))
    ):
        if parents[name] <= expected - failing:
            expected.add(name)
    if trace.depth is not None or not any(parents.values()):
        assert came == expected and getattr(source, "abandoned", 0) == len(names) - len(came)


# files


def agentic(folder, *records, **options):
    path = folder / "m.jsonl"
    path.write_text(rows.lines(*records))
    return read(path, "mooncake", ReadOptions(**options))


def test_agentic_rows_wait_for_all_that_they_name(tmp_path):
    trace = read(rows.write(tmp_path, "mooncake-agentic"))
    assert parents_of(trace) == {"root": set(), "a": {"root"}, "b": {"root"}, "join": {"root", "a", "b"}}
    by_name = dict(zip(request_names(trace), range(4), strict=True))
    join = by_name["join"]
    assert trace.after[join] == by_name["root"], "the turn before in its session, whose prompt it continues"
    assert trace.think_ns[join] == 500 * MS and trace.think_ns[by_name["a"]] == 5 * MS
    assert trace.depth[join] == 2 and set(trace.program.tolist()) == {"s"}


@given(st.permutations(rows.AGENTIC.splitlines()))
def test_the_order_of_an_agentic_file_is_free(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("order") / "m.jsonl"
    path.write_text("\n".join(lines) + "\n")
    trace = read(path)
    assert parents_of(trace) == {"root": set(), "a": {"root"}, "b": {"root"}, "join": {"root", "a", "b"}}
    assert sorted(zip(request_names(trace), trace.arrival_ns.tolist(), strict=True)) == [
        ("a", 5 * MS), ("b", 2 * MS), ("join", 505 * MS), ("root", 0)]  # fmt: skip


@pytest.mark.parametrize(
    "records, said",
    [
        ([("a", []), ("a", [])], r"m\.jsonl: rows 0 and 1 are both request 'a'"),
        ([("a", []), ("b", ["x"])], r"m\.jsonl: row 1 waits for 'x', which is no request of the file"),
        ([("a", ["c"]), ("b", ["a"]), ("c", ["b"])], r"m\.jsonl: row 0 waits for itself: 0 → 2 → 1 → 0"),
        ([("a", ["a"])], r"row 0 waits for itself: 0 → 0"),
    ],
)
def test_wrong_graphs_name_the_rows(tmp_path, records, said):
    made = [{"request_id": name, "timestamp": 0, "input_length": 5, "output_length": 1, "wait_for": wait}
            for name, wait in records]  # fmt: skip
    with pytest.raises(TraceError, match=said):
        agentic(tmp_path, *made)


def test_keys_that_would_change_what_is_sent_are_never_ignored(tmp_path):
    row = {"timestamp": 0, "input_length": 5, "output_length": 1}
    with pytest.raises(TraceError, match=r"row 1 \(line 2\): has dependencies \(dependencies with triggers\), which"):
        agentic(tmp_path, row, {**row, "dependencies": [{"request_id": "a"}]})
    with pytest.raises(TraceError, match="row 0 branches into 'b', whose wait_for does not name it"):
        agentic(tmp_path, {**row, "request_id": "a", "branches": ["b"]}, {**row, "request_id": "b"})
    assert any(
        "ignored keys: group_id" in said for said in agentic(tmp_path, {**row, "group_id": 3}).provenance.assumed
    )


def turn(session="s", **more):
    return {"session_id": session, "input_length": 600, "output_length": 5, **more}


def test_turns_with_a_stamp_and_no_delay(tmp_path):
    both = [turn(timestamp=0, hash_ids=[0, 1]), turn(timestamp=250, hash_ids=[0, 2])]
    stamped = agentic(tmp_path, *both)
    assert stamped.after is None and any("arrives as stamped (gap: tie" in said for said in stamped.provenance.assumed)
    tied = agentic(tmp_path, *both, gap="tie")
    assert tied.after.tolist() == [-1, 0] and tied.think_ns.tolist() == [-1, 250 * MS]
    assert any("(gap: tie)" in said for said in tied.provenance.assumed)
    by_ms = agentic(tmp_path, both[0], turn(delay_ms=250, hash_ids=[0, 2]), time_unit="s")
    assert by_ms.think_ns.tolist() == [-1, 250 * MS]
    with pytest.raises(TraceError, match="has delay and delay_ms"):
        agentic(tmp_path, turn(timestamp=0, delay=1, delay_ms=1))


DELTA = [
    turn(timestamp=0, hash_ids=[0, 1]),
    turn(delay=250, input_length=520, hash_ids=[2, 3]),
    turn("t", timestamp=1, hash_ids=[0, 9]),
]


def test_deltas_are_refused_as_plain_and_read_as_such(tmp_path):
    with pytest.raises(TraceError, match="row 1 and all 1 later turns share no block with the turn before: they bring"):
        agentic(tmp_path, *DELTA)
    trace = read(tmp_path / "m.jsonl", "mooncake_delta")
    by_session = {s: i for i, s in enumerate(trace.session.tolist())}  # the last turn of each
    second = by_session["s"]
    assert trace.prompt_tokens[second] == 1120 and trace.ids.row(second).tolist() == [0, 1, 2, 3]
    assert trace.ids.row_widths(second).tolist() == [512, 88, 512, 8]
    assert trace.prompt_tokens[by_session["t"]] == 600 and trace.think_ns[second] == 250 * MS


def test_dynamo_sessions_fork_and_join(tmp_path):
    trace = read(rows.write(tmp_path, "dynamo"))
    assert parents_of(trace) == {"p1": set(), "c1": {"p1"}, "p2": {"p1", "c1"}}
    assert trace.think_ns.tolist() == [-1, 50 * MS, 99_500_000], "from the end of c1, half a millisecond past 1,500"
    assert trace.provenance.counts == {"events_that_are_no_request": 1} and trace.ids.counts.tolist() == [2, 1, 3]


def test_spans_without_texts_follow_by_time(tmp_path):
    trace = read(rows.write(tmp_path, "otel_genai"))
    assert parents_of(trace) == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    assert trace.provenance.counts == {"spans_of_other_kinds": 1} and trace.think_ns[3] == 1000 * MS


def test_spans_with_texts_follow_the_answers_that_they_quote(tmp_path):
    def span(name, start, end, messages, answer):
        texts = [{"role": "user", "content": text} for text in messages]
        return {"traceId": "t", "spanId": name, "startTimeUnixNano": str(start), "endTimeUnixNano": str(end),
                "attributes": [{"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(texts)}},
                               {"key": "gen_ai.output.text", "value": {"stringValue": answer}}]}  # fmt: skip

    spans = [
        span("a", 0, 10, ["q one"], "A"),
        span("b", 20, 30, ["q two"], "B"),
        span("c", 40, 50, ["A", "B", "go"], "C"),
    ]
    path = tmp_path / "o.json"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, indent=1))
    trace = read_with(path, lambda text: len(text.split()), ReadOptions())
    assert parents_of(trace) == {"a": set(), "b": set(), "c": {"a", "b"}}
    assert trace.prompt_tokens.tolist() == [2, 2, 3] and trace.think_ns.tolist() == [-1, -1, 10]
    with pytest.raises(ConfigError, match="set tokenizer to a directory or name to count"):
        read(path)


def test_copilot_calls_follow_each_other(tmp_path):
    trace = read(rows.write(tmp_path, "copilot"))
    assert trace.session.tolist() == ["s1", "s2", "s1"] and trace.think_ns.tolist() == [-1, -1, 3000 * MS]
    assert trace.grows.tolist() == [False, False, True]


def test_tables_with_parents_ends_and_paths(tmp_path):
    named = {"prompt_tokens": "usage.prompt", "output_tokens": "usage.answers.0", "arrival": "at", "duration": "took"}
    path = tmp_path / "t.jsonl"
    records = [
        {"request_id": name, "at": f"2026-03-01T10:00:0{i}", "took": took, "usage": {"prompt": 5 + i, "answers": [3]}}
        for i, (name, took) in enumerate([("a", 0.5), ("b", 1.5), ("c", 1)])
    ]
    records[2]["parents"] = ["a", "b"]
    path.write_text(rows.lines(*records))
    trace = read(path, "table", ReadOptions(time_unit="s", columns=named))
    assert parents_of(trace) == {"a": set(), "b": set(), "c": {"a", "b"}}
    assert trace.prompt_tokens.tolist() == [5, 6, 7] and trace.provenance.wall_clock
    assert trace.think_ns.tolist() == [-1, -1, 0], "c began half a second before b had ended"
    assert trace.provenance.counts["overlapping_turns"] == 1
    with pytest.raises(TraceError, match=r"row 0 \(line 1\): no key 'usage\.answers\.7'"):
        read(path, "table", ReadOptions(time_unit="s", columns={**named, "output_tokens": "usage.answers.7"}))
    csv = tmp_path / "t.csv"
    csv.write_text("request_id,arrival,prompt_tokens,output_tokens,session,end\na,1,5,5,s,3\nb,7,5,5,s,9\n")
    assert read(csv, "table", ReadOptions(time_unit="s")).think_ns.tolist() == [-1, 4000 * MS]
    csv.write_text(
        "request_id,arrival,prompt_tokens,output_tokens,parents,think\na,1,5,5,,\nb,1,5,5,,\nc,1,5,5,a b,2\n"
    )
    trace = read(csv, "table", ReadOptions(time_unit="s"))
    assert parents_of(trace)["c"] == {"a", "b"} and trace.think_ns.tolist() == [-1, -1, 2000 * MS]


def thinks(trace):
    """By name, ns between the last end that a request waits for and its arrival."""
    think = [-1] * len(trace) if trace.think_ns is None else trace.think_ns.tolist()
    return dict(zip(request_names(trace), think, strict=True))


@given(strategies.programs())
def test_programs_are_written_and_read_back(tmp_path_factory, trace):
    folder = tmp_path_factory.mktemp("written")
    write_offered(trace, folder / "o.jsonl.gz")
    write_mooncake(trace, folder / "m.jsonl")
    again = [read(folder / "o.jsonl.gz")]
    if trace.also_after is not None or starts_session(trace).any():  # else Mooncake rows need no names
        again.append(read(folder / "m.jsonl", "mooncake"))
    for other in again:
        assert parents_of(other) == parents_of(trace)
        assert thinks(other) == thinks(trace)


def test_conversations_keep_their_ties_when_written(tmp_path):
    column = lambda *values: np.array(values, dtype=np.int64)  # noqa: E731
    trace = Trace(
        "t", np.arange(2), column(0, 5), column(10, 16), column(3, 3), session=Labels(column(0, 0), ("s",)),
        turn=column(0, 1), after=column(-1, 0), think_ns=column(-1, 5), grows=np.array([False, True]),
    )  # fmt: skip
    write_offered(trace, tmp_path / "o.jsonl.gz")
    again = read(tmp_path / "o.jsonl.gz")
    assert again.after.tolist() == [-1, 0] and again.grows.tolist() == [False, True]


# runs


def run(path, **options):
    """By name, (arrival, end) in seconds, on the modelled H100 with Llama-3.1-8B."""
    engine = schedlab.engines.virtual("llama3.1-8b", "h100")
    ended = schedlab.run(ChunkedPrefill(), Recorded(path=str(path), **options), engine).requests
    return dict(zip(ended["request_id"], zip(ended["arrival_s"], ended["finished_s"], strict=True), strict=True))


def test_a_join_arrives_half_a_second_after_the_later_of_its_parents(tmp_path):
    """To the nanosecond, on the modelled H100 with Llama-3.1-8B."""
    came = run(rows.write(tmp_path, "mooncake-agentic"))
    ns = {name: [round(second * 1e9) for second in times] for name, times in came.items()}
    last = max(ns[parent][1] for parent in ("root", "a", "b"))
    assert ns["join"][0] == last + 500 * MS
    assert ns["a"][0] == ns["root"][1] + 5 * MS and ns["b"][0] == ns["root"][1] + 2 * MS
    assert last == ns["a"][1] > ns["b"][1], "the branch of 200 tokens is the later one"


FOLDER = "programs-2026"
READ = {
    "agentic_mooncake_min.jsonl": (4, None, {}),
    "aiperf_inference_day_delta.jsonl": (33, "mooncake_delta", {}),
    "azure2025.csv": (2, None, {}),
    "bailian_rows.jsonl": (3, None, {}),
    "copilot2026.jsonl": (2, None, {}),
    "dynamo_context_free.jsonl": (1, None, {}),
    "dynamo_request_trace.jsonl": (3, None, {}),
    "guidellm_minimal.jsonl": (2, "table", {"time_unit": "s", "columns": {
        "prompt_tokens": "input_length", "output_tokens": "output_length", "arrival": "timestamp"}}),
    "inference_perf_trace.csv": (20, None, {}),
    "litellm_spend.jsonl": (2, "table", {"columns": {
        "output_tokens": "completion_tokens", "arrival": "startTime", "end": "endTime", "session": "session_id"}}),
    "openai_batch_output.jsonl": (1, "table", {"time_unit": "s", "columns": {
        "prompt_tokens": "response.body.usage.prompt_tokens", "request_id": "custom_id",
        "output_tokens": "response.body.usage.completion_tokens", "arrival": "response.body.created"}}),
    "otel_code_review_workflow.json": (15, "otel_genai", {}),
    "otel_fan_in_dependencies.json": (4, "otel_genai", {}),
    "otel_multi_agent_research.json": (12, "otel_genai", {}),
    "otel_parallel_requests.json": (5, "otel_genai", {}),
    "otel_simple_chain.json": (3, "otel_genai", {}),
    "sglang.log.jsonl": (1, "table", {"time_unit": "s", "columns": {
        "prompt_tokens": "out.meta_info.prompt_tokens", "output_tokens": "out.meta_info.completion_tokens",
        "arrival": "timestamp", "request_id": "rid", "duration": "out.meta_info.e2e_latency"}}),
    "weka_agentic_mooncake.jsonl.gz": (85, None, {"block_size": 64}),
}  # fmt: skip
REFUSED = {
    "README.md": "no format's own",
    "aiperf_inference_day_delta.jsonl": "which format=mooncake_delta reads",
    "openai_batch.jsonl": "is a batch of requests to OpenAI's API: texts without times or lengths",
    "otel_simple_chain.json": "set tokenizer to a directory or name to count its texts with",
    "vllm_server.log": "is a log of vLLM's server, which has no lengths in it",
}


def test_every_sample_is_read_or_refused_for_a_reason(traces):
    files = {path.name for path in (traces / FOLDER).iterdir()}
    assert files == {*READ, *REFUSED}
    for name, (number, format, options) in READ.items():
        path = traces / FOLDER / name
        if format == "otel_genai":
            trace = read_with(path, lambda text: len(text.split()), ReadOptions())
        else:
            trace = read(path, format, ReadOptions(**options))
        assert len(trace) == number, name
    for name, said in REFUSED.items():
        with pytest.raises(SchedlabError, match=said):
            read(traces / FOLDER / name)
    deltas = read(traces / FOLDER / "aiperf_inference_day_delta.jsonl", "mooncake_delta")
    assert deltas.prompt_tokens.sum() == 2_232_451


def test_no_edge_of_the_recorded_agents_is_violated(traces):
    path = traces / FOLDER / "weka_agentic_mooncake.jsonl.gz"
    came = run(path, block_size=64)
    trace = read(path, options=ReadOptions(block_size=64))
    edges = [(parent, name) for name, parents in parents_of(trace).items() for parent in parents]
    assert len(edges) == 88 and sum(len(p) > 1 for p in parents_of(trace).values()) == 5
    assert [edge for edge in edges if came[edge[1]][0] < came[edge[0]][1]] == []


def test_a_run_of_programs_says_how_long_they_took(tmp_path):
    path = rows.write(tmp_path, "mooncake-agentic")
    engine = schedlab.engines.virtual("llama3.1-8b", "h100")
    told = schedlab.run(ChunkedPrefill(), Recorded(path=str(path)), engine)
    took = max(told.requests["finished_s"]) - min(told.requests["arrival_s"])
    assert told.summary["program/duration/p50"] == pytest.approx(took) and told.summary["program/count"] == 1
    failing = schedlab.engines.virtual("llama3.1-8b", "h100", max_num_waiting_reqs=1)  # one of the branches is refused
    ended = schedlab.run(ChunkedPrefill(), Recorded(path=str(path), on_failure="abandon", think_scale=1e-9), failing)
    assert ended.result["counters"]["abandoned"] == 1 and ended.summary["requests/queue_full"] == 1
    assert ended.summary["program/unserved"] == 1 and len(ended.requests["request_id"]) == 3
