"""Names that occur twice and turns that grow out of one: refused where a file is read, and where a trace is offered."""

import json

import numpy as np
import pytest
import rows
import strategies
from hypothesis import given

from schedlab.framework.errors import TraceError
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.select import grow_sessions, laps
from schedlab.workloads.soundness import check, request_names
from schedlab.workloads.source import Terms
from schedlab.workloads.trace import Labels, Trace
from schedlab.workloads.workload import make_source


def table(folder, text):
    path = folder / "t.csv"
    path.write_text(text)
    return read(path, "table", ReadOptions(time_unit="s"))


TABLE = "request_id,arrival,prompt_tokens,output_tokens\n"


def test_a_request_id_that_occurs_twice_names_both_rows(tmp_path):
    with pytest.raises(TraceError, match=r"t\.csv: rows 0 and 2 are both request 'a'$"):
        table(tmp_path, TABLE + "a,0,5,5\nb,1,5,5\na,100,5,5\n")


def test_a_row_without_an_id_collides_with_an_id_that_is_its_number(tmp_path):
    with pytest.raises(
        TraceError, match=r"rows 0 and 1 are both request '1' \(row 1 has no id and goes by its number\)"
    ):
        table(tmp_path, TABLE + "1,0,5,5\n,1,5,5\n")
    assert request_names(table(tmp_path, TABLE + "0,0,5,5\n,1,5,5\n")) == ["0", "1"]


def test_rows_that_are_skipped_collide_with_nobody(tmp_path):
    assert len(table(tmp_path, TABLE + "a,0,5,0\na,1,5,5\n")) == 1


def test_every_reader_of_ids_refuses_them(tmp_path):
    splitwise = rows.SPLITWISE.replace("\n1,2", "\n0,2")
    with pytest.raises(TraceError, match="rows 0 and 1 are both request '0'"):
        read(rows.write(tmp_path, "splitwise_sim", splitwise))


def test_a_trace_made_in_memory_is_refused_when_it_is_offered():
    trace = made(request_id=Labels(np.array([0, 1, 0]), ("a", "b")))
    with pytest.raises(TraceError, match="t: rows 0 and 2 are both request 'a'"):
        make_source(trace, Terms())


def made(**columns) -> Trace:
    n = 3
    return Trace("t", np.arange(n), np.arange(n), np.full(n, 10), np.full(n, 2), **columns)


@given(strategies.traces())
def test_our_traces_and_their_laps_are_sound(trace):
    check(trace)
    check(laps(trace, 3))


def test_laps_of_an_id_that_looks_like_a_lap_are_refused():
    trace = made(request_id=Labels(np.arange(3), ("a", "a#1", "b")))
    with pytest.raises(TraceError, match="are both request 'a#1'"):
        make_source(laps(trace, 2), Terms())


def turns(*rows):
    """Offered rows of one session: (request, followed, grows)."""
    return [
        {"request_id": name, "source_row": i, "arrival_ns": i, "prompt_tokens": 10 + i, "output_tokens": 2,
         "session": "s", "turn": i, "content": {"session": "s", "grows": grows, "seed": 0},
         **({} if after is None else {"after": after, "think_ns": 1})}
        for i, (name, after, grows) in enumerate(rows)
    ]  # fmt: skip


def offered(folder, records):
    path = folder / "w.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read(path, "offered")


def test_two_turns_that_grow_out_of_one_are_refused(tmp_path):
    fork = turns(("a", None, False), ("b", "a", True), ("c", "a", True))
    with pytest.raises(TraceError, match=r"w\.jsonl: rows 1 and 2 both grow out of row 0; expected one turn"):
        offered(tmp_path, fork)
    line = turns(("a", None, False), ("b", "a", True), ("c", "b", True))
    assert offered(tmp_path, line).after.tolist() == [-1, 0, 1]
    begun_anew = turns(("a", None, False), ("b", "a", True), ("c", "a", False))
    assert offered(tmp_path, begun_anew).grows.tolist() == [False, True, False]


def test_two_turns_that_begin_the_same_content_are_refused(tmp_path):
    same = turns(("a", None, False), ("b", None, False))
    same[1]["turn"] = 0
    with pytest.raises(TraceError, match="rows 0 and 1 both begin session content 's'"):
        offered(tmp_path, same)


def test_a_turn_cannot_grow_out_of_a_prompt_of_ids(tmp_path):
    mixed = turns(("a", None, False), ("b", "a", True))
    mixed[0]["content"] = {"ids": [1], "width": 16, "scope": "", "seed": 0}
    with pytest.raises(TraceError, match="row 1 grows out of row 0, whose prompt is not made of a session"):
        offered(tmp_path, mixed)


def test_turns_contain_output_only_within_their_session():
    sessions = Labels(np.array([0, 1, 0]), ("s", "s::agent"))
    tied = {"after": np.array([-1, 0, 0]), "think_ns": np.array([-1, 0, 0])}
    trace = grow_sessions(made(session=sessions, **tied).with_columns(prompt_tokens=np.array([10, 20, 20])))
    assert trace.grows.tolist() == [False, False, True]
    check(trace)
