"""Digest, tables and run directories: what must merge, what must not be lost, what a killed run leaves."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlab.framework.content import UniqueContent
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO, EngineRequest
from schedlab.framework.results import packed
from schedlab.framework.results.digest import digest_of
from schedlab.framework.results.metrics import SUMMARY_KEYS, Measurement
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.record import Recorder
from schedlab.framework.results.rows import StepRow, request_row
from schedlab.framework.results.tables import REQUESTS, SCHEMAS, SPARSE, STEPS, RunTables
from schedlab.framework.results.writer import RunWriter

MEASUREMENT = Measurement(max_num_seqs=8, num_blocks=100, slo=SLO("default", ttft_s=1.0))
steady = settings(deadline=None, derandomize=True)
AWKWARD = 'a "quoted"\\ id,\n] é☃'

Decision = tuple[list[tuple[str, str]], list[tuple[str, int]], Any, int, list[tuple[str, str]], int | None]
ALL: Decision = ([], [], "all", 0, [], None)

ids = st.sampled_from(["a", "b", "c", AWKWARD])
decode_only = st.tuples(
    st.just([]), st.just([]), st.just("all") | st.lists(ids, min_size=1, max_size=3), st.just(0),
    st.just([]) | st.lists(st.tuples(ids, st.just("memory")), max_size=1), st.none(),
)  # fmt: skip
mixed = st.tuples(
    st.lists(st.tuples(ids, st.sampled_from(["recompute", "swap"])), max_size=2),
    st.lists(st.tuples(ids, st.integers(1, 9)), min_size=1, max_size=2),
    st.just("all") | st.lists(ids, max_size=2), st.integers(0, 1), st.just([]), st.none(),
)  # fmt: skip
idle = st.tuples(st.just([]), st.just([]), st.just([]), st.just(0), st.just([]), st.integers(1, 10**12))
decisions = st.lists(st.one_of(st.just(ALL), decode_only, mixed, idle), max_size=25)


def decide(recorder: Recorder, rows: list[Decision]) -> RunTables:
    for i, row in enumerate(rows):
        recorder.decision(i, 1000 * i, *row)
    return recorder.close(backlog_end=0, counters={})


def digest(rows: list[Decision]) -> str:
    found = decide(Recorder(MEASUREMENT), rows).digest
    assert found is not None
    return found


def ended(i: int, status: str = "finished", **fields: Any) -> EngineRequest:
    request = EngineRequest(f"r{i}", i * 1_000_003, 100 + i, UniqueContent(i), source_row=i, **fields)
    request._state = status  # type: ignore[assignment]
    request.finished_ns = i * 1_000_003 + 5_000_001
    if status == "rejected":
        request.reason = AWKWARD
        return request
    request._base_tokens += 3
    request._max_tokens = 64
    request.first_scheduled_ns, request._first_token_ns = i * 1_000_003 + 7, i * 1_000_003 + 9_999
    request.cached_tokens = 16 * (i % 2)
    return request


def fill(recorder: Recorder, n: int = 50) -> None:
    for i in range(n):
        bound = "memory" if i % 3 else None
        recorder.step(
            StepRow(i, 1, i * 7_000_001, 7_000_001, 5, i % 4, 1, i % 4, 90, 5, i, 90 - i % 5, 3, 0, bound, i / 7)
        )
        recorder.decision(i, i * 7_000_001, [], [(f"r{i}", 5)], "all", 1, [("x", "memory")] if i % 9 == 0 else [], None)
        recorder.decode_all(i, i * 7_000_001 + 5, 3)
        recorder.gap(7_000_001 + i, 2)
        status = "rejected" if i % 10 == 9 else "finished"
        recorder.request(
            ended(i, status, client=f"c{i % 3}", session=None if i % 2 else AWKWARD, deadline_ns=i * 10**9)
        )
    recorder.last_arrival(1, {"c0": 10, "c1": 20})


def same(one: RunTables, other: RunTables) -> None:
    assert one.digest == other.digest and one.summary == other.summary
    for table, schema in SCHEMAS.items():
        left, right = getattr(one, table), getattr(other, table)
        assert list(left) == list(right) == list(schema)
        for name in schema:
            if isinstance(left[name], np.ndarray):
                assert left[name].dtype == right[name].dtype
                np.testing.assert_array_equal(left[name], right[name], err_msg=f"{table}/{name}")
            else:
                assert left[name] == right[name], f"{table}/{name}"


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in packed.opened(path)]


def test_rows_have_the_columns_of_their_tables() -> None:
    assert StepRow._fields == tuple(STEPS)
    row = dict(zip(REQUESTS, request_row(ended(3, session="s")), strict=True))
    assert (row["request_id"], row["session"], row["arrival_s"], row["output_tokens"]) == ("r3", "s", 3_000_009, 3)


# -- the digest --------------------------------------------------------------------------------------------------------


@steady
@given(decisions, st.data())
def test_digest_is_the_same_stepped_jumped_or_told_twice(rows: list[Decision], data: st.DataObject) -> None:
    recorder = Recorder(MEASUREMENT)
    i = 0
    while i < len(rows):
        run = 1
        if rows[i] == ALL:
            while i + run < len(rows) and rows[i + run] == ALL and data.draw(st.booleans()):
                run += 1
        if rows[i] == ALL and data.draw(st.booleans()):
            recorder.decode_all(i, 1000 * i, run)
        else:
            for j in range(i, i + run):
                recorder.decision(j, 1000 * j, *rows[j])
        i += run
    told = recorder.close(backlog_end=0, counters={})
    same(told, decide(Recorder(MEASUREMENT), rows))


@steady
@given(decisions)
def test_digest_follows_from_the_decisions_table(rows: list[Decision]) -> None:
    tables = decide(Recorder(MEASUREMENT), rows)
    assert digest_of(tables.decisions) == tables.digest


@steady
@given(decisions)
def test_digest_covers_the_batches_and_nothing_else(rows: list[Decision]) -> None:
    batches = [row for row in rows if row[0] or row[1] or row[2]]
    bare = [(preempted, grants, decodes, at, [], None) for preempted, grants, decodes, at, _, _ in batches]
    assert digest(rows) == digest(bare)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([ALL], [ALL, ALL]),
        ([ALL], [([], [], ["a"], 0, [], None)]),
        ([([], [], ["a", "b"], 0, [], None)], [([], [], ["b", "a"], 0, [], None)]),
        ([([], [("a", 1), ("b", 2)], [], 0, [], None)], [([], [("b", 2), ("a", 1)], [], 0, [], None)]),
        ([([], [("a", 1)], "all", 0, [], None)], [([], [("a", 1)], "all", 1, [], None)]),
        ([([("a", "swap")], [], "all", 0, [], None)], [([("a", "recompute")], [], "all", 0, [], None)]),
        ([([], [("a", 12)], [], 0, [], None)], [([], [("a", 1), ("2", 12)], [], 0, [], None)]),
    ],
)
def test_digest_tells_different_batches_apart(one: list[Decision], other: list[Decision]) -> None:
    assert digest(one) != digest(other)


def test_mixed_steps_never_merge_and_a_place_without_decodes_does_not_matter() -> None:
    chunk: Decision = ([], [("a", 512)], "all", 0, [], None)
    tables = decide(Recorder(MEASUREMENT), [chunk, chunk])
    assert tables.decisions["repeat"].tolist() == [1, 1]
    assert digest([([], [("a", 1)], [], 1, [], None)]) == digest([([], [("a", 1)], [], 0, [], None)])


def test_the_digest_is_pinned() -> None:
    """The same in every process and version; a change here breaks comparison with every recorded run."""
    rows: list[Decision] = [([], [("a", 512)], [], 0, [], None), ALL, ALL, ([("a", "swap")], [], ["b"], 0, [], None)]
    text = """\
1 "preempted":[],"grants":[["a",512]],"decodes":[],"decodes_at":0
2 "preempted":[],"grants":[],"decodes":"all","decodes_at":0
1 "preempted":[["a","swap"]],"grants":[],"decodes":["b"],"decodes_at":0
"""
    assert digest(rows) == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert digest(rows) == "836b50e0e437ea4e53f96ae8fc4328ff"


# -- the decisions log -------------------------------------------------------------------------------------------------


@steady
@given(decisions)
def test_merged_rows_expand_to_every_step_with_its_refusals_and_idling(rows: list[Decision]) -> None:
    table = decide(Recorder(MEASUREMENT), rows).decisions
    expanded = []
    for i, repeat in enumerate(table["repeat"].tolist()):
        idle_s = table["idle_until_s"][i]
        row = (
            [tuple(p) for p in table["preempted"][i]],
            [tuple(g) for g in table["grants"][i]],
            table["decodes"][i],
            int(table["decodes_at"][i]),
            [tuple(r) for r in table["refusals"][i]],
            None if np.isnan(idle_s) else round(idle_s * 1e9),
        )
        assert table["index"][i] == len(expanded) and table["now_ns"][i] == 1000 * len(expanded)
        expanded += [row] * repeat
    assert expanded == [(p, g, d, at if d else 0, r, t) for p, g, d, at, r, t in rows]


def test_equal_decode_only_steps_are_one_row() -> None:
    listed: Decision = ([], [], ["a", "b"], 0, [], None)
    refused: Decision = ([], [], "all", 0, [("a", "memory")], None)
    table = decide(Recorder(MEASUREMENT), [ALL, ALL, listed, listed, listed, ALL, refused, ALL, ALL]).decisions
    assert table["repeat"].tolist() == [2, 3, 1, 1, 2]


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_format", ["jsonl", "parquet"])
def test_files_hold_what_memory_holds(tmp_path: Path, log_format: str) -> None:
    if log_format == "parquet":
        pytest.importorskip("pyarrow")
    memory, writer = (
        Recorder(MEASUREMENT),
        RunWriter(tmp_path, MEASUREMENT, log_format=log_format, config_hash="c0ffee"),
    )
    fill(memory)
    fill(writer)
    expected = memory.close(backlog_end=2, counters={"swaps_refused": 1})
    written = writer.close(backlog_end=2, counters={"swaps_refused": 1})
    (tmp_path / "manifest.json").write_text('{"seed": 0}')
    found = read_run(tmp_path)
    same(found, expected)
    same(written, expected)
    assert found.status == "finished" and found.manifest == {"seed": 0}
    assert found.result["config_hash"] == "c0ffee" and found.result["counters"] == {"swaps_refused": 1}
    assert found.vllm_bench == expected.vllm_bench
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob("*.tmp"))


def test_rows_are_plain_json_lines_in_schema_order(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, MEASUREMENT)
    fill(writer, 12)
    writer.close(backlog_end=0, counters={})
    for table, schema in SCHEMAS.items():
        rows = json_rows(packed.find(tmp_path, f"{table}.jsonl"))
        columns = [name for name in schema if name not in SPARSE]
        assert rows and all(list(row) == columns for row in rows)
    row = json_rows(packed.find(tmp_path, "requests.jsonl"))[9]
    assert row["reason"] == AWKWARD and row["session"] is None and row["slo"] == "default"
    assert row["first_token_s"] is None and row["max_tokens"] is None and row["arrival_s"] == 0.009000027


@settings(steady, max_examples=20)
@given(st.integers(1, 4))
def test_how_often_rows_are_folded_changes_nothing(limit: int) -> None:
    small, large = Recorder(MEASUREMENT), Recorder(MEASUREMENT)
    small._limit = limit
    fill(small)
    fill(large)
    same(small.close(backlog_end=0, counters={}), large.close(backlog_end=0, counters={}))


def test_a_summary_recording_has_no_logs_and_says_so_by_name(tmp_path: Path) -> None:
    full, brief = Recorder(MEASUREMENT), RunWriter(tmp_path, MEASUREMENT, record="summary")
    fill(full)
    fill(brief)
    expected, tables = full.close(backlog_end=0, counters={}), brief.close(backlog_end=0, counters={})
    assert tables.summary == expected.summary and tables.digest == expected.digest
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "vllm_bench.json"}
    for found in (tables, read_run(tmp_path)):
        with pytest.raises(ConfigError, match="no decisions, the run was recorded with record=summary"):
            _ = found.decisions


def test_memory_is_flat(tmp_path: Path) -> None:
    """A hundred bytes a request and nothing a step, beyond what is buffered."""
    writer = RunWriter(tmp_path, MEASUREMENT)

    def grow(first: int, n: int) -> None:
        for i in range(first, first + n):
            writer.step(StepRow(i, 1, i, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, None, None))
            writer.decision(i, i, [], [("x", 5)], "all", 1, [], None)
            writer.gap(1000 * (i % 100), 1)
            writer.request(ended(i))
        writer.flush()

    grow(0, 2_000)
    tracemalloc.start()
    grow(2_000, 10_000)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10_000 * 130 + 200_000


KILLED = """
import sys
sys.path.insert(0, {tests!r})
from test_record import MEASUREMENT, RunWriter, fill
writer = RunWriter({directory!r}, MEASUREMENT)
while True:
    fill(writer, 500)
    writer.flush()
    print("flushed", flush=True)
"""


def test_a_killed_run_leaves_a_readable_prefix(tmp_path: Path) -> None:
    script = KILLED.format(tests=str(Path(__file__).parent), directory=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "flushed\n"
        os.kill(process.pid, signal.SIGKILL)
    found = read_run(tmp_path)
    assert found.status == "interrupted" and found.digest is None
    assert tuple(found.summary) == SUMMARY_KEYS and set(found.summary.values()) == {None}
    memory = Recorder(MEASUREMENT)
    fill(memory, 500)
    expected = memory.close(backlog_end=0, counters={})
    assert found.requests["request_id"][:500] == expected.requests["request_id"]
    assert found.steps["now_ns"][:500].tolist() == expected.steps["now_ns"].tolist()
    assert found.decisions["grants"][:999] == expected.decisions["grants"][:999]


@pytest.mark.parametrize("table", ["requests", "steps", "decisions"])
@pytest.mark.parametrize("own", [None, RuntimeError("out of luck")])
def test_a_disk_that_takes_no_more_is_told_and_leaves_nothing_open(tmp_path: Path, table: str, own: Exception) -> None:
    """The other logs are ended, the result says what ended the run, and no thread stays."""

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    before = threading.active_count()
    with pytest.raises(type(own) if own else OSError), RunWriter(tmp_path, MEASUREMENT) as writer:
        text = writer._logs[table]._text
        text._file.close()
        text._file = Full()  # type: ignore[assignment]
        fill(writer, 5)  # buffered still
        if own is not None:
            raise own
        writer.close(backlog_end=0, counters={})
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed" and (str(own) if own else "No space left") in result["error"]
    assert threading.active_count() == before and all(log._text.closed for log in writer._logs.values())


def test_counting_the_gaps_of_long_jumps_takes_little_memory(tmp_path: Path) -> None:
    """A million steps in jumps of up to 200,000, in which each step takes a microsecond more than the one before."""
    jumps = [16_000] * 40 + [200_000] * 2
    recorder = Recorder(MEASUREMENT)
    tracemalloc.start()
    for steps in jumps:
        recorder.gaps(range(1_000_000, 1_000_000 + 1000 * steps, 1000), 1)
    recorder.flush()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert recorder._gaps.measured == Counter(1000 + i for steps in jumps for i in range(steps))
    assert peak < 50_000_000


@pytest.fixture(params=packed.CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> packed.Codec:
    """Each compression in turn, as that of new files."""
    if request.param is packed.ZSTD:
        pytest.importorskip("zstandard")
    monkeypatch.setattr(packed, "codec", lambda: request.param)
    return cast(packed.Codec, request.param)


def test_a_run_that_is_repeated_elsewhere_leaves_one_log_of_each_table(tmp_path: Path, codec: packed.Codec) -> None:
    for other in packed.CODECS:
        for table in SCHEMAS:
            (tmp_path / f"{table}.jsonl{other.suffix}").write_bytes(b"of an earlier run")
            (tmp_path / f"{table}.jsonl{other.suffix}.partial").write_bytes(b"of an earlier run")
    writer = RunWriter(tmp_path, MEASUREMENT)
    fill(writer)
    tables = writer.close(backlog_end=0, counters={})
    assert {path.name for path in tmp_path.glob("*.jsonl*")} == {f"{table}.jsonl{codec.suffix}" for table in SCHEMAS}
    same(tables, read_run(tmp_path))


def test_two_logs_of_one_table_are_an_error(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, MEASUREMENT)
    fill(writer)
    writer.close(backlog_end=0, counters={})
    for each in packed.CODECS:
        (tmp_path / f"steps.jsonl{each.suffix}").touch()
    with pytest.raises(ConfigError, match=r"expected one of steps\.jsonl\.zst and steps\.jsonl\.gz, found both"):
        _ = read_run(tmp_path).steps


def test_files_of_several_streams_are_read_and_torn_ones_to_their_end(tmp_path: Path, codec: packed.Codec) -> None:
    pieces = []
    for text in ("one\n", "two\n" * 50_000, ""):
        stream = codec.compressor()
        pieces.append(stream.compress(text.encode()) + stream.flush(codec.finish))
    path = tmp_path / f"text{codec.suffix}"
    path.write_bytes(b"".join(pieces))
    with packed.opened(path) as file:
        assert file.read() == "one\n" + "two\n" * 50_000
    for broken in (pieces[0] + pieces[1][:-3], pieces[0] + b"rubbish", b"", pieces[0][:2]):
        path.write_bytes(broken)
        found = []
        with pytest.raises(EOFError):
            found += iter(packed.unpacked(path))
        assert b"".join(found).startswith(b"one\n") or len(broken) < 3


def test_a_log_torn_anywhere_gives_its_whole_rows(tmp_path: Path, codec: packed.Codec) -> None:
    writer = RunWriter(tmp_path, MEASUREMENT)
    fill(writer, 40)
    writer.flush()
    fill(writer, 40)
    writer.fail("out of luck")
    whole = read_run(tmp_path)
    assert whole.status == "failed" and whole.result["error"] == "out of luck" and len(whole.steps["index"]) == 80
    path = tmp_path / f"steps.jsonl{codec.suffix}.partial"
    data = path.read_bytes()
    lengths = []
    for cut in range(0, len(data), 37):
        path.write_bytes(data[:cut])
        torn = read_run(tmp_path).steps
        lengths.append(len(torn["index"]))
        assert torn["now_ns"].tolist() == whole.steps["now_ns"][: lengths[-1]].tolist()
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] >= 40


def test_a_damaged_log_of_a_finished_run_is_an_error(tmp_path: Path, codec: packed.Codec) -> None:
    writer = RunWriter(tmp_path, MEASUREMENT)
    fill(writer)
    writer.close(backlog_end=0, counters={})
    path = tmp_path / f"steps.jsonl{codec.suffix}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match="ends early"):
        _ = read_run(tmp_path).steps
    path.unlink()
    with pytest.raises(ConfigError, match="steps of the run are missing"):
        _ = read_run(tmp_path).steps


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [(ValueError("bad row"), "failed", "bad row"), (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt")],
)
def test_an_exception_ends_the_run_by_name(tmp_path: Path, error: BaseException, status: str, text: str) -> None:
    with pytest.raises(type(error)), RunWriter(tmp_path, MEASUREMENT) as writer:
        fill(writer, 5)
        raise error
    found = read_run(tmp_path)
    assert (found.status, found.result["error"]) == (status, text)
    assert len(found.requests["request_id"]) == 5


def test_a_second_run_in_a_directory_never_shows_the_first_ones_rows(tmp_path: Path) -> None:
    first = RunWriter(tmp_path, MEASUREMENT)
    fill(first)
    first.close(backlog_end=0, counters={})
    second = RunWriter(tmp_path, MEASUREMENT)
    assert read_run(tmp_path).status == "interrupted"
    assert not (tmp_path / "vllm_bench.json").exists()
    second.fail("stop")
    assert len(read_run(tmp_path).requests["request_id"]) == 0


def _not_a_run(path: Path) -> None:
    read_run(path)


def _broken_result(path: Path) -> None:
    (path / "result.json").write_text("{")
    read_run(path)


def _unknown_record(path: Path) -> None:
    RunWriter(path, MEASUREMENT, record="some")


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (_not_a_run, "not a run directory, there is no result.json"),
        (_broken_result, "result.json: not JSON"),
        (_unknown_record, "record=some: expected one of full, summary"),
    ],
)
def test_misuse_is_one_clear_line(tmp_path: Path, use: Callable[[Path], None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        use(tmp_path)
