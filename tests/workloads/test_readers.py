"""Formats by hand-made rows: what is read, what is assumed, and the right word for every awkward input."""

import gzip
import json

import numpy as np
import pytest
import rows

from schedlab.framework.errors import ConfigError, TraceError
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import detect, formats, read
from schedlab.workloads.readers.sharegpt import read_with

MS = 10**6


def put(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def mooncake(folder, *records, **options):
    return read(put(folder, "m.jsonl", rows.lines(*records)), "mooncake", ReadOptions(**options))


def row(timestamp=0, prompt=512, output=1, ids=(0,), **more):
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": list(ids), **more}


def burst(folder, *cells, **options):
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    return read(put(folder, "b.csv", head + "".join(f"{c}\n" for c in cells)), "burstgpt", ReadOptions(**options))


@pytest.mark.parametrize("name", rows.FILES)
def test_every_format_is_told_by_its_keys(tmp_path, name):
    path = rows.write(tmp_path, name)
    expected = name.partition("-")[0]
    assert detect(path) == expected
    trace = read(path)
    assert trace.provenance.format == expected
    assert trace.equals(read(path, expected))
    assert any("from the keys" in statement for statement in trace.provenance.assumed)


@pytest.mark.parametrize("name", rows.FILES)
def test_compression_is_told_by_content(tmp_path, name):
    path = rows.write(tmp_path, name)
    packed = tmp_path / "noname"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed, name.partition("-")[0]).equals(read(path))


def test_unknown_keys_name_the_formats(tmp_path):
    with pytest.raises(
        TraceError, match=r"key set \('a', 'b'\) is no format's own; set format to one of azure, bailian"
    ):
        read(put(tmp_path, "x.csv", "a,b\n1,2\n"))
    with pytest.raises(ConfigError, match="no trace format 'azur'; there are azure, "):
        read(rows.write(tmp_path, "azure"), "azur")


def test_lengths_without_ids_are_not_guessed_by_magnitude(tmp_path):
    path = put(tmp_path, "x.jsonl", rows.lines({"timestamp": 0, "input_length": 5, "output_length": 5}))
    with pytest.raises(TraceError, match="set format"):
        read(path)
    assert len(read(path, "mooncake")) == 1


def test_an_option_that_a_format_has_no_use_for_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="format azure has no use for block_size; it takes keep_empty, keep_failed, strict"
    ):
        read(rows.write(tmp_path, "azure"), options=ReadOptions(block_size=16))


def test_a_reader_can_be_named_by_its_module(tmp_path):
    assert len(read(rows.write(tmp_path, "azure"), "schedlab.workloads.readers.azure")) == 3
    assert "azure" in formats()


# stamps and times


def test_azure_keeps_every_digit(tmp_path):
    stamps = [f"2023-11-16 18:00:00.{ms:03d}0000" for ms in (1, 2, 9, 11)]
    trace = read(
        put(tmp_path, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{s},5,5\r\n" for s in stamps))
    )
    assert trace.arrival_ns.tolist() == [0, MS, 8 * MS, 10 * MS]
    assert trace.provenance.origin == "2023-11-16T18:00:00.001000000"


def test_azure_2024_mixes_fractions(tmp_path):
    assert read(rows.write(tmp_path, "azure-2024")).arrival_ns.tolist() == [0, 990_070_000, 1_007_405_000]


def test_stamps_with_and_without_offset_in_one_file_name_the_row(tmp_path):
    text = rows.AZURE + "2023-11-16 18:17:05+00:00,1,1\n"
    with pytest.raises(
        TraceError, match=r"a\.csv: row 3 \(line 5\): TIMESTAMP is '2023-11-16 18:17:05\+00:00', expected a stamp"
    ):
        read(put(tmp_path, "a.csv", text), "azure")


def test_offsets_that_change_between_batches_are_found(tmp_path):
    head, *body = rows.AZURE.splitlines(keepends=True)
    text = head + body[0] * 512 + "2023-11-16 18:17:05+00:00,1,1\n" * 3
    with pytest.raises(TraceError, match=r"row 512 \(line 514\)"):
        read(put(tmp_path, "a.csv", text), "azure")


def test_columns_are_found_by_name(tmp_path):
    trace = read(rows.write(tmp_path, "azure-2025"))
    assert trace.prompt_tokens.tolist() == [1000, 20] and "ignored: NumImages" in trace.provenance.assumed


def test_a_missing_column_is_one_error_before_any_row(tmp_path):
    text = "TIMESTAMP,Context,GeneratedTokens\nnonsense,1,1\n"
    with pytest.raises(TraceError, match=r"no column 'ContextTokens'; found 'TIMESTAMP', 'Context', 'GeneratedTokens'"):
        read(put(tmp_path, "a.csv", text), "azure")


def test_time_starts_at_the_first_kept_row(tmp_path):
    trace = burst(tmp_path, "7,m,0,0,0,x", "19440110,m,5,5,10,x", "19440111,m,5,5,10,x")
    assert trace.arrival_ns.tolist() == [0, 10**9]
    assert trace.provenance.origin_ns == 19_440_110 * 10**9 and trace.provenance.origin == "19440110 s"


def test_time_unit_can_be_said(tmp_path):
    trace = mooncake(tmp_path, row(0), row(3), time_unit="s")
    assert trace.arrival_ns.tolist() == [0, 3 * 10**9] and "times in s" in trace.provenance.assumed
    with pytest.raises(ConfigError, match="time_unit=h, expected one of ns, us, ms, s"):
        ReadOptions(time_unit="h")


@pytest.mark.parametrize("bad", [-1, "-1", float("nan"), float("inf"), "soon", True, 1e300, [1]])
def test_times_that_are_none_name_the_row(tmp_path, bad):
    with pytest.raises(
        TraceError, match=r"m\.jsonl: row 1 \(line 2\): timestamp is .*, expected a finite time of at least 0"
    ):
        mooncake(tmp_path, row(0), row(bad))


def test_rows_out_of_order_are_sorted_stably_and_counted(tmp_path):
    trace = mooncake(tmp_path, row(5), row(3), row("3"), row(9))
    assert trace.source_row.tolist() == [1, 2, 0, 3] and trace.provenance.counts == {"inversions": 1}
    with pytest.raises(TraceError, match="row 1 arrives before the row above it; strict forbids it"):
        mooncake(tmp_path, row(5), row(3), strict=True)


def test_equal_stamps_keep_file_order(tmp_path):
    trace = burst(tmp_path, *[f"5,m,{n},1,0,x" for n in range(1, 6)])
    assert trace.prompt_tokens.tolist() == [1, 2, 3, 4, 5]


# counts


def test_failures_are_skipped_by_name_or_kept(tmp_path):
    cells = ["1,m,10,5,15,x", "2,m,0,0,0,x", "3,m,10,0,10,x", "4,m,0,7,7,x"]
    trace = burst(tmp_path, *cells)
    assert trace.source_row.tolist() == [0] and trace.provenance.counts == {"empty_prompt": 2, "no_output": 1}
    kept = burst(tmp_path, *cells, keep_failed=True)
    assert kept.source_row.tolist() == [0, 2] and kept.failed.tolist() == [False, True]
    assert kept.provenance.counts == {"empty_prompt": 2}


def test_a_file_of_failures_only_says_so(tmp_path):
    with pytest.raises(TraceError, match=r"no row with a prompt and an output is left \(1 empty_prompt, 2 no_output\)"):
        burst(tmp_path, "2,m,0,0,0,x", "3,m,10,0,10,x", "3,m,10,0,10,x")


@pytest.mark.parametrize("bad", [-5, 12.5, True, None, "", "12x", float("nan"), 2**40])
def test_counts_that_are_none_name_the_row(tmp_path, bad):
    with pytest.raises(TraceError, match=r"row 1 \(line 2\): input_length is .*, expected a token count from 0 to"):
        mooncake(tmp_path, row(0), row(1, prompt=bad))


def test_whole_floats_and_numeric_strings_are_counts(tmp_path):
    trace = mooncake(tmp_path, row(0, prompt=12.0), row(1, prompt="13", output="1e2"))
    assert trace.prompt_tokens.tolist() == [12, 13] and trace.output_tokens.tolist() == [1, 100]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("[1, 2]\n", "is one JSON array, expected one object a line"),
        ("{}\n", r"key set \(none\)"),
    ],
)
def test_files_of_nothing(tmp_path, text, said):
    with pytest.raises(TraceError, match=said):
        read(put(tmp_path, "x", text))


def test_csv_with_rows_of_other_widths_names_the_line(tmp_path):
    with pytest.raises(TraceError, match=r"row 1 \(line 4\): 2 cells, expected 3"):
        read(put(tmp_path, "a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0,1,1\n\n1,1\n"))


@pytest.mark.parametrize("name", rows.FILES)
def test_a_byte_order_mark_is_nothing(tmp_path, name):
    path = rows.write(tmp_path, name)
    marked = path.with_name(f"marked-{path.name}")
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert detect(marked) == detect(path) and read(marked).equals(read(path))


def test_blank_lines_are_nothing(tmp_path):
    text = rows.MOONCAKE.replace("\n", "\n\n") + "  \n"
    assert read(put(tmp_path, "m.jsonl", text)).equals(read(rows.write(tmp_path, "mooncake")))


def test_damaged_files_are_one_line(tmp_path):
    whole = gzip.compress(rows.MOONCAKE.encode() * 50)
    path = tmp_path / "flipped"
    path.write_bytes(whole[:40] + bytes([whole[40] ^ 255]) + whole[41:])
    with pytest.raises(TraceError, match=r"flipped: (damaged or truncated compressed file|row)"):
        read(path, "mooncake")
    path = tmp_path / "latin"
    path.write_bytes("Timestamp,Modèle\n".encode("latin-1"))
    with pytest.raises(TraceError, match="latin: not UTF-8 text"):
        read(path, "burstgpt")
    with pytest.raises(TraceError, match="is a directory, expected a file"):
        read(tmp_path, "mooncake")
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none", "mooncake")


# block ids


def test_a_count_of_ids_that_does_not_fit_names_what_would(tmp_path):
    fault = "2 block ids for a prompt of 20 tokens, expected 1 of 512 tokens; block sizes 10 to 19 would fit"
    said = rf"row 1 \(line 2\): {fault}"
    with pytest.raises(TraceError, match=said):
        mooncake(tmp_path, row(0), row(1, prompt=20, ids=[1, 2]))
    trace = mooncake(tmp_path, row(0, prompt=20, ids=[1, 2]), block_size=16)
    assert trace.ids.width == 16 and "block ids stand for 16 tokens" in trace.provenance.assumed


def test_a_bailian_file_read_as_mooncake_is_refused(tmp_path):
    with pytest.raises(TraceError, match="expected 1 of 512 tokens; block sizes 10 to 19 would fit"):
        read(rows.write(tmp_path, "bailian"), "mooncake")


def test_ids_of_any_type_keep_prefixes_apart(tmp_path):
    big = 2**40
    trace = mooncake(
        tmp_path, row(0, ids=[1]), row(1, ids=[1 + 2**32]), row(2, ids=["00ff"]), row(3, ids=["ff"]), row(4, ids=["1"]),
        row(5, ids=[big]), row(6, ids=[2**70]), row(7, ids=[-1]), row(8, ids=[1]),
    )  # fmt: skip
    values = trace.ids.values.tolist()
    assert values[0] == values[-1] and len(set(values)) == 8


@pytest.mark.parametrize("bad", [[True], [None], [1.5], [[1]], {"a": 1}, 5])
def test_ids_of_no_sense_name_the_row(tmp_path, bad):
    with pytest.raises(TraceError, match=r"row 1 \(line 2\): block id"):
        mooncake(tmp_path, row(0), {**row(1), "hash_ids": bad})


def test_rows_without_ids_stand_beside_rows_with(tmp_path):
    plain = {"timestamp": 1, "input_length": 700, "output_length": 2}
    trace = mooncake(tmp_path, row(0), plain, row(2))
    assert trace.ids.counts.tolist() == [1, 0, 1]


def test_bailian_sessions_follow_their_parents(tmp_path):
    trace = read(rows.write(tmp_path, "bailian"))
    assert trace.session.tolist() == ["1", "1", "3"] and trace.turn.tolist() == [0, 1, 0]
    assert trace.arrival_ns.tolist() == [0, 750 * MS, 1500 * MS] and trace.ids.width == 16
    assert trace.kind.tolist() == ["text", "text", "search"]


def test_hash_scope_can_be_the_session(tmp_path):
    trace = mooncake(tmp_path, row(0, session_id="a"), row(1, session_id="b"), hash_scope="session")
    assert trace.scope.tolist() == ["a", "b"]


# sessions


def test_mooncake_sessions_are_tied_by_delay(tmp_path):
    trace = read(rows.write(tmp_path, "mooncake-sessions"), "mooncake")
    assert trace.source_row.tolist() == [0, 2, 1] and trace.after.tolist() == [-1, -1, 0]
    assert trace.think_ns.tolist() == [-1, -1, 250 * MS]
    assert trace.stamped.tolist() == [True, True, False]
    assert trace.arrival_ns.tolist() == [0, 2 * MS, 250 * MS]


def test_a_row_without_stamp_or_delay_is_refused(tmp_path):
    bare = {"input_length": 5, "output_length": 5}
    with pytest.raises(TraceError, match="row 1 has neither an arrival time nor a delay after a previous turn"):
        mooncake(tmp_path, row(0), bare)


def test_weka_ties_and_clocks(tmp_path):
    trace = read(rows.write(tmp_path, "weka"), options=ReadOptions(keep_failed=True))
    assert trace.session.tolist() == ["w", "w/x", "w/x", "w", "w"]
    assert trace.after.tolist() == [-1, 0, 1, 0, 3]
    # own think time, else gap less service, else 0 where the service time is not known
    # and what lies between the last end of those that a join waits for and its own beginning
    assert trace.think_ns.tolist() == [-1, 10**9, 3 * 10**9, 3 * 10**9, 0]
    assert [trace.also_after.row(row).tolist() for row in range(5)] == [[], [], [], [2], []]
    assert set(trace.program.tolist()) == {"w"} and trace.depth.tolist() == [0, 1, 2, 3, 4]
    assert (trace.arrival_ns / 1e9).tolist() == [0, 3, 7, 10, 30]
    assert set(trace.scope.tolist()) == {"w"} and trace.provenance.counts == {
        "joins": 1,
        "think_times_from_gaps": 2,
        "unknown_think_times": 1,
    }
    assert read(rows.write(tmp_path, "weka")).provenance.counts["no_output"] == 1


def test_weka_reads_folders_and_single_objects(tmp_path):
    session = json.loads(rows.WEKA)
    folder = tmp_path / "sessions"
    folder.mkdir()
    (folder / "trace_1.json").write_text(json.dumps(session, indent=1))
    (folder / "trace_2.json").write_text(json.dumps({**session, "id": "v"}))
    trace = read(folder, "weka")
    assert len(trace) == 8 and set(trace.scope.names) == {"w", "v"}


def test_ragpulse_segments_in_their_order(tmp_path):
    trace = read(rows.write(tmp_path, "ragpulse"))
    assert [trace.ids.row(i).tolist() for i in range(2)] == [[1, 10, 11, 20, 30], [1, 11, 10, 20, 31]]
    assert trace.ids.row_widths(0).tolist() == [50, 20, 20, 10, 12]
    (tmp_path / "2_passages.jsonl").unlink()
    with pytest.raises(TraceError, match=r"no 2_passages\.jsonl beside the trace"):
        read(tmp_path / "ragpulse.jsonl")


def test_ragpulse_segments_longer_than_the_prompt_are_refused(tmp_path):
    path = rows.write(tmp_path, "ragpulse", rows.RAGPULSE.replace('"input_length": 120', '"input_length": 100', 1))
    with pytest.raises(TraceError, match=r"row 0 \(line 1\): segments of 112 tokens in a prompt of 100"):
        read(path)


def test_token_ids_are_the_prompt(tmp_path):
    trace = read(rows.write(tmp_path, "llmservingsim"))
    assert trace.ids is None and [trace.tokens.row(i).tolist() for i in range(2)] == [[1, 2, 3], [1, 2]]
    path = rows.write(tmp_path, "llmservingsim", rows.LLMSERVINGSIM.replace("[1, 2, 3]", "[1, 2]"))
    with pytest.raises(TraceError, match=r"row 0 \(line 1\): 2 input_tok_ids for a prompt of 3 tokens"):
        read(path)


def test_tracelab_rounds_think_from_the_last_event(tmp_path):
    trace = read(rows.write(tmp_path, "tracelab_rounds"))
    assert trace.think_ns.tolist() == [-1, 19_291 * MS] and trace.grows.tolist() == [False, True]


def test_sharegpt_counts_what_was_said_before(tmp_path):
    talk = [{"id": "c", "conversations": [
        {"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"},
        {"from": "human", "value": "six"}, {"from": "gpt", "value": "seven eight nine"}]}]  # fmt: skip
    path = put(tmp_path, "s.json", json.dumps(talk))
    trace = read_with(path, lambda text: len(text.split()), ReadOptions())
    assert trace.prompt_tokens.tolist() == [3, 6] and trace.output_tokens.tolist() == [2, 3]
    assert trace.grows.tolist() == [False, True] and trace.think_ns.tolist() == [-1, 0]
    with pytest.raises(ConfigError, match="set tokenizer"):
        read(path, "sharegpt")


# turns that begin before the one before has ended


OVERLAPPING = {
    "burstgpt-3": (rows.BURSTGPT_3.splitlines()[0] + "\n5,s,9,ChatGPT,10,3,13,x\n9,s,2,ChatGPT,10,3,13,x\n", "row 1"),
    "weka": (rows.WEKA.replace('"t": 3.0', '"t": 1.5'), "session 0 .*: call 1"),
    "tracelab_rounds": (rows.ROUNDS.replace("05:40:50.938", "05:40:30.938"), "row 1"),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_turns_that_overlap_wait_and_are_counted_or_refused(tmp_path, name):
    text, where = OVERLAPPING[name]
    path = rows.write(tmp_path, name, text)
    trace = read(path)
    assert trace.think_ns[1] == 0 and trace.after[1] == 0
    assert trace.provenance.counts["overlapping_turns"] == 1
    assert "overlapping_turns" not in read(rows.write(tmp_path, name)).provenance.counts
    with pytest.raises(TraceError, match=f"{where} begins before the (turn|call) before has ended; strict forbids it"):
        read(rows.write(tmp_path, name, text), options=ReadOptions(strict=True))


# plain tables


def test_tables_by_column_mapping(tmp_path):
    text = "when,in,out,who,rank\n0.5,10,2,a,-1\n0.25,20,3,b,\n"
    columns = {"arrival": "when", "prompt_tokens": "in", "output_tokens": "out", "client": "who", "priority": "rank"}
    trace = read(put(tmp_path, "t.csv", text), "table", ReadOptions(time_unit="s", columns=columns))
    assert trace.prompt_tokens.tolist() == [20, 10] and trace.client.tolist() == ["b", "a"]
    assert trace.priority.tolist() == [0, -1] and trace.arrival_ns.tolist() == [0, 250 * MS]


def test_tables_of_three_kinds_are_equal(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    data = {
        "arrival": [0, 5],
        "prompt_tokens": [3, 4],
        "output_tokens": [1, 2],
        "session": ["a", "a"],
        "think": [None, 2],
    }
    as_rows = [dict(zip(data, cells, strict=True)) for cells in zip(*data.values(), strict=True)]
    text = (
        ",".join(data)
        + "\n"
        + "".join(",".join("" if v is None else str(v) for v in r.values()) + "\n" for r in as_rows)
    )
    paths = [put(tmp_path, "t.csv", text), put(tmp_path, "t.jsonl", rows.lines(*as_rows)), tmp_path / "t.parquet"]
    parquet.write_table(pyarrow.table(data), paths[2])
    traces = [read(path, "table", ReadOptions(time_unit="ms")) for path in paths]
    assert traces[0].equals(traces[1]) and traces[0].equals(traces[2])
    assert traces[0].think_ns.tolist() == [-1, 2 * MS]


def test_tables_say_what_they_lack(tmp_path):
    path = put(tmp_path, "t.csv", "arrival,prompt_tokens,output_tokens\n5,3,1\n")
    with pytest.raises(TraceError, match="numbers need time_unit"):
        read(path, "table")
    with pytest.raises(ConfigError, match="columns names when, expected some of"):
        read(path, "table", ReadOptions(columns={"when": "arrival"}))
    with pytest.raises(TraceError, match="no column 'tokens'"):
        read(path, "table", ReadOptions(time_unit="s", columns={"prompt_tokens": "tokens"}))
    ids = put(tmp_path, "i.jsonl", rows.lines({"prompt_tokens": 3, "output_tokens": 1, "ids": [1]}))
    with pytest.raises(ConfigError, match=r"block ids \(ids\) need block_size"):
        read(ids, "table")


def test_lengths_alone_are_marked(tmp_path):
    trace = read(put(tmp_path, "v.csv", "num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n"))
    assert not trace.stamped.any() and np.array_equal(trace.arrival_ns, [0, 0])


def test_sharegpt_with_a_tokenizer_from_a_folder(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["[UNK]", "one", "two", "three"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "tokenizer")
    talk = {"id": "c", "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "two"}]}
    path = put(tmp_path, "s.jsonl", rows.lines(talk))
    trace = read(path, "sharegpt", ReadOptions(tokenizer=str(tmp_path / "tokenizer")))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([3], [1])
    with pytest.raises(ConfigError, match=r"tokenizer=.*none cannot be loaded"):
        read(path, "sharegpt", ReadOptions(tokenizer=str(tmp_path / "none")))


def test_zstd_is_read_or_says_what_to_install(tmp_path):
    try:
        import zstandard
    except ImportError:
        path = tmp_path / "m.zst"
        path.write_bytes(b"\x28\xb5\x2f\xfd" + b"rest")
        with pytest.raises(TraceError, match="is zstd-compressed; install the package zstandard to read it"):
            read(path, "mooncake")
        return
    packed = tmp_path / "packed"
    packed.write_bytes(zstandard.compress(rows.MOONCAKE.encode()))
    assert read(packed).equals(read(rows.write(tmp_path, "mooncake")))
    packed.write_bytes(packed.read_bytes()[:-5])
    with pytest.raises(TraceError):
        read(packed, "mooncake")


# priorities, deadlines and aborts of tables


def cells(folder, head, *lines, name="t.csv", **options):
    head = "arrival,prompt_tokens,output_tokens," + head
    text = "".join(f"{line}\n" for line in (head, *lines))
    return read(put(folder, name, text), "table", ReadOptions(**({"time_unit": "s"} | options)))


def test_the_direction_of_priorities_can_be_said(tmp_path):
    """vLLM serves the smaller number first, a policy here the larger."""
    lines = ("0,5,5,0", "1,5,5,7", "2,5,5,")
    assert cells(tmp_path, "priority", *lines).priority.tolist() == [0, 7, 0]
    assert cells(tmp_path, "priority", *lines, priority_order="smaller_first").priority.tolist() == [0, -7, 0]
    with pytest.raises(ConfigError, match="priority_order=up, expected larger_first or smaller_first"):
        ReadOptions(priority_order="up")
    with pytest.raises(ConfigError, match="format azure has no use for priority_order"):
        read(rows.write(tmp_path, "azure"), options=ReadOptions(priority_order="smaller_first"))


@pytest.mark.parametrize("name", ["deadline", "abort"])
def test_spans_from_the_arrival_and_times_on_the_clock(tmp_path, name):
    of = lambda trace: getattr(trace, f"{name}_ns").tolist()  # noqa: E731
    assert of(cells(tmp_path, name, "10,5,5,2.5", "11,5,5,")) == [2_500 * MS, -1]
    assert of(cells(tmp_path, f"{name}_at", "10,5,5,12.5", "11,5,5,")) == [2_500 * MS, -1]
    day = "2024-05-10 00:00:0"
    assert of(cells(tmp_path, f"{name}_at", f"{day}1,5,5,{day}3.5", time_unit=None)) == [2_500 * MS]
    with pytest.raises(TraceError, match=rf"row 1 \(line 3\): {name}_at lies before the arrival; columns.{name}"):
        cells(tmp_path, f"{name}_at", "10,5,5,12", "11,5,5,10.5")
    with pytest.raises(ConfigError, match=f"has {name} and {name}_at; expected one of the two"):
        cells(tmp_path, f"{name},{name}_at", "10,5,5,1,12")


def test_a_span_of_more_than_a_day_is_taken_for_a_time_on_the_clock(tmp_path):
    said = r"row 0 \(line 2\): deadline is 1\.7e\+09 s after the arrival, above max_span_s=86400; columns\.deadline_at"
    with pytest.raises(TraceError, match=said):
        cells(tmp_path, "deadline", "1700000000,5,5,1700000009")
    assert cells(tmp_path, "deadline", "0,5,5,90000", max_span_s=1e5).deadline_ns.tolist() == [90_000_000 * MS]
    renamed = cells(tmp_path, "due", "1700000000,5,5,1700000009", columns={"deadline_at": "due"})
    assert renamed.deadline_ns.tolist() == [9_000 * MS]


def test_parquet_with_timestamps_zones_and_durations(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    stamps = np.array(["2026-01-01T00:00:01.000000001", "2026-01-01T00:00:03"], dtype="datetime64[ns]").astype(np.int64)
    path = tmp_path / "t.parquet"
    for zone in (None, "UTC", "Europe/Berlin"):
        columns = {
            "arrival": pyarrow.array(stamps.tolist(), pyarrow.timestamp("ns", zone)),
            "prompt_tokens": [5, 5],
            "output_tokens": [3, 3],
            "session": ["a", "a"],
            "think": pyarrow.array([None, 1500], pyarrow.duration("ms")),
            "deadline": pyarrow.array([250, None], pyarrow.duration("us")),
        }
        parquet.write_table(pyarrow.table(columns), path)
        for unit in (None, "s"):
            trace = read(path, "table", ReadOptions(time_unit=unit))
            assert trace.arrival_ns.tolist() == [0, 2 * 10**9 - 1] and trace.provenance.origin_ns == stamps[0]
            assert trace.think_ns.tolist() == [-1, 1500 * MS] and trace.deadline_ns.tolist() == [250_000, -1]
            assert trace.provenance.wall_clock
    parquet.write_table(
        pyarrow.table({"arrival": pyarrow.array([1], pyarrow.date32()), "prompt_tokens": [5], "output_tokens": [3]}),
        path,
    )
    with pytest.raises(TraceError, match=r"column arrival is of type date32\[day\], expected timestamps"):
        read(path, "table")


# files that end early, and files that are something else


def cut_short(path, format=None, **options):
    with pytest.warns(UserWarning, match=f"{path.name}: .*read up to") as caught:
        trace = read(path, format, ReadOptions(**options))
    assert trace.provenance.counts["cut_short_at_the_end"] == len(caught) == 1
    return trace


@pytest.mark.parametrize("name", rows.FILES)
def test_a_half_written_last_line_is_left_out_and_counted(tmp_path, name):
    path = rows.write(tmp_path, name)
    text = path.read_text()
    whole = read(path)
    path.write_text(text + text.splitlines()[-1][: -len(text.splitlines()[-1].rpartition(",")[2]) - 1])
    trace = cut_short(path)
    assert trace.equals(whole)
    with pytest.raises(TraceError, match="strict forbids it"):
        read(path, options=ReadOptions(strict=True))


def test_a_cut_at_the_edge_of_a_batch(tmp_path):
    text = rows.lines(*[row(i, prompt=5) for i in range(512)])
    path = put(tmp_path, "m.jsonl", text[:-9])
    assert len(cut_short(path)) == 511
    path.write_text(text + text[:20])
    assert len(cut_short(path)) == 512
    csv_text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00,5,5\n" * 511
    assert len(cut_short(put(tmp_path, "a.csv", csv_text + '"2024'))) == 511
    assert len(read(put(tmp_path, "a.csv", csv_text.rstrip("\n")))) == 511, "a last line may lack its end"


def test_a_compressed_file_that_ends_early_is_read_to_its_last_whole_line(tmp_path):
    body = rows.lines(*[row(i, prompt=5, output=i % 7 + 1) for i in range(2000)]).encode()
    packed = gzip.compress(body)
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    trace = cut_short(path, "mooncake")
    assert 100 < len(trace) < 2000 and trace.output_tokens.tolist() == [i % 7 + 1 for i in range(len(trace))]


def test_one_bad_line_in_the_middle_or_alone_is_no_cut(tmp_path):
    for text in (rows.MOONCAKE + '{"timestamp": \n' + rows.MOONCAKE, '{"timestamp": '):
        with pytest.raises(TraceError, match="not JSON"):
            read(put(tmp_path, "m.jsonl", text), "mooncake")
    with pytest.raises(TraceError, match="2 cells, expected 3"):
        read(put(tmp_path, "a.csv", rows.AZURE + "2024-05-10 00:00:00,5\n"))


def test_blank_lines_of_a_csv(tmp_path):
    blank = "\n  \n" + rows.AZURE.replace("\n", "\n   \n\n")
    path = put(tmp_path, "a.csv", blank)
    assert detect(path) == "azure" and read(path).equals(read(put(tmp_path, "b.csv", rows.AZURE)))
    with pytest.raises(TraceError, match=r"row 0 \(line 6\): ContextTokens is 'x'"):
        read(put(tmp_path, "c.csv", blank.replace("4808", "x")), "azure")


@pytest.mark.parametrize(
    "data, what",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "is a Git LFS pointer in place of the"),
        (b"PK\x03\x04rest", "is a zip archive; unpack it"),
        (b"BZh91AY", "is compressed by bzip2"),
        (b'[{"prompt_tokens": 5, "output_tokens": 5}]', "is one JSON array, expected one object a line"),
        (b'\n[\n {"prompt_tokens": 5, "output_tokens": 5}]', "is one JSON array, expected one object a line"),
    ],
)
@pytest.mark.parametrize("format", [None, "table"])
def test_files_that_are_something_else_are_named(tmp_path, data, what, format):
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=what):
        read(path, format)


def test_parquet_under_another_format_names_the_one_that_reads_it(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"PAR1rest")
    with pytest.raises(TraceError, match="is parquet, which format=table reads"):
        read(path)


def test_a_folder_is_that_of_a_run_or_of_sessions(tmp_path):
    offered = rows.write(tmp_path, "offered").rename(tmp_path / "workload.jsonl.gz")
    assert read(tmp_path).equals(read(offered)) and len(read(tmp_path, "offered")) == 3
    offered.unlink()
    with pytest.raises(TraceError, match=r"is a folder, expected a file, a run's folder with workload\.jsonl\.zst or"):
        read(tmp_path)


def test_the_width_of_ids_that_we_write_is_read(tmp_path):
    narrow = row(0, prompt=20, ids=[1, 2], block_size=16)
    assert mooncake(tmp_path, narrow, {**narrow, "timestamp": 5}).ids.width == 16
    assert mooncake(tmp_path, narrow, block_size=16).ids.width == 16
    with pytest.raises(TraceError, match=r"row 0 \(line 1\): block_size is 16, expected 64 as"):
        mooncake(tmp_path, narrow, block_size=64)
    with pytest.raises(TraceError, match=r"row 1 \(line 2\): block_size is 8, expected 16 as"):
        mooncake(tmp_path, narrow, {**narrow, "block_size": 8})
