"""`trace info`, `convert` and `synthesize` as functions: what they print and what they write."""

import io

import pytest
import rows
from rich.console import Console

from schedlab.experiments import trace as commands
from schedlab.framework.errors import ConfigError
from schedlab.workloads.options import ReadOptions
from schedlab.workloads.readers import read
from schedlab.workloads.workload import Recorded


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=150, highlight=False)


def said(screen) -> str:
    return screen.file.getvalue()


def test_info_of_a_trace_without_ids_says_that_reuse_is_unknown(tmp_path, screen):
    commands.info(rows.write(tmp_path, "burstgpt"), console=screen)
    text = said(screen)
    assert "prefix reuse: unknown, the trace has no block ids" in text
    assert "1 rows without a prompt" in text and "1 rows at the stamp of the row before" in text
    assert "assumed: times in s" in text and "sessions: none recorded" in text
    assert "prompt of 'API log'" in text


def test_info_of_a_trace_with_ids_and_sessions(tmp_path, screen):
    plot = tmp_path / "plot.png"
    commands.info(rows.write(tmp_path, "bailian"), num_blocks=3, plot=plot, console=screen)
    text = said(screen)
    assert "prefix reuse at unlimited memory: 42.1% of prompt tokens" in text  # 16 + 16 of 76
    assert "prefix reuse with 3 blocks of 16 tokens: 42.1% of prompt tokens" in text
    assert "sessions: 2, 1 of one turn, longest 2 turns; 0 turns have a think time, 1 have none" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", rows.FILES)
def test_info_fits_one_screen_for_every_format(tmp_path, screen, name):
    commands.info(rows.write(tmp_path, name), console=screen)
    assert len(said(screen).splitlines()) < 40


def test_convert_tells_what_the_target_cannot_say(tmp_path, screen):
    source, out = rows.write(tmp_path, "bailian"), tmp_path / "v.csv"
    commands.convert(source, out, "vidur", console=screen)
    assert "3 requests, vidur" in said(screen)
    for column in ("ids", "session", "kind"):
        assert f"not in this format: {column}" in said(screen)
    assert read(out, "vidur").prompt_tokens.tolist() == [20, 40, 16]


def test_convert_chooses_and_scales(tmp_path, screen):
    source, out = rows.write(tmp_path, "azure"), tmp_path / "m.jsonl"
    commands.convert(source, out, max_requests=2, time_scale=2.0, max_length=4000, too_long="drop", console=screen)
    again = read(out, "mooncake")
    assert again.prompt_tokens.tolist() == [3180] and "1 beyond max requests" in said(screen)
    with pytest.raises(ConfigError, match="to=parquet, expected one of mooncake, vidur, offered"):
        commands.convert(source, out, "parquet", console=screen)


def test_convert_takes_a_run_directory(tmp_path, screen):
    run = tmp_path / "run"
    run.mkdir()
    rows.write(run, "offered").rename(run / "workload.jsonl.gz")
    with pytest.raises(ConfigError, match=r"the output of row 2 is not known \(1 such rows\), the request is live"):
        commands.convert(run, tmp_path / "m.jsonl", console=screen)
    commands.convert(run, tmp_path / "m.jsonl", max_requests=2, console=screen)
    again = read(tmp_path / "m.jsonl", "mooncake", ReadOptions(block_size=16))
    assert again.think_ns.tolist() == [-1, 4]


def test_synthesize_writes_a_configured_workload(tmp_path, screen):
    out = tmp_path / "s.jsonl.gz"
    commands.synthesize(out, ["workload=shared_prefix", "workload.num_requests=50"], seed=3, console=screen)
    trace = read(out, "mooncake", ReadOptions(block_size=16))
    assert len(trace) == 50 and trace.ids is not None
    first = out.read_bytes()
    commands.synthesize(out, ["workload=shared_prefix", "workload.num_requests=50"], seed=3, console=screen)
    assert out.read_bytes() == first
    commands.synthesize(tmp_path / "p.csv", ["workload.num_requests=5"], to="vidur", console=screen)
    assert len(read(tmp_path / "p.csv")) == 5


@pytest.mark.parametrize("words", [["workload=poisson"], ["workload=shared_prefix"], ["workload=conversations"]])
@pytest.mark.parametrize("to, name", [("mooncake", "m.jsonl"), ("vidur", "v.csv"), ("offered", "o.jsonl.gz")])
def test_what_we_write_is_told_by_its_keys(tmp_path, screen, words, to, name):
    """`trace info` and `workload=trace` need no word on a file of ours."""
    out = tmp_path / name
    small = {"conversations": "workload.num_sessions=6"}.get(words[0].partition("=")[2], "workload.num_requests=6")
    commands.synthesize(out, [*words, small], to=to, console=screen)
    written = read(out)
    commands.info(out, console=screen)
    loaded = Recorded(path=str(out)).load()
    assert loaded.equals(written) and len(written) >= 6
    if to == "mooncake" and written.ids is not None:
        assert written.ids.width == 16


def test_columns_by_the_words_of_the_command_line(tmp_path, screen):
    path = tmp_path / "t.csv"
    path.write_text("ts,n,prompt_tokens,priority\n1,4,8,3\n2,5,9,1\n")
    options = ReadOptions(time_unit="s", columns=commands.column_names(["arrival=ts", "output_tokens=n"]))
    commands.info(path, "table", options=options, console=screen)
    assert "2" in said(screen)
    with pytest.raises(ConfigError, match="--columns arrival: expected ours=theirs"):
        commands.column_names(["arrival"])
