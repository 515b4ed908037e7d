"""`schedlab trace`: the commands over the functions that are tested with the workloads."""

import gzip
import io
import json
import tempfile
from types import SimpleNamespace

import pytest

from schedlab.experiments import cli


def call(monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["schedlab", "trace", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_synthesize_info_and_convert(tmp_path, monkeypatch, capsys):
    made, converted = tmp_path / "made.jsonl", tmp_path / "made.csv"
    words = ("workload=poisson", "workload.num_requests=12", "workload.arrivals.rate=4")
    assert call(monkeypatch, "synthesize", made, *words, "--seed", 3) == 0
    rows = [json.loads(line) for line in made.read_text().splitlines()]
    assert len(rows) == 12 and all(250 <= row["input_length"] <= 750 for row in rows)
    assert call(monkeypatch, "info", made, "--format", "mooncake") == 0
    assert "12" in capsys.readouterr().out
    assert call(monkeypatch, "convert", made, converted, "--format", "mooncake", "--to", "vidur") == 0
    assert len(converted.read_text().splitlines()) == 13


def test_a_key_that_does_not_exist_is_one_line(tmp_path, monkeypatch, capsys):
    assert call(monkeypatch, "synthesize", tmp_path / "x.jsonl", "workload.numbers=3") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "numbers" in error


def test_a_file_that_is_no_trace_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.jsonl").write_text('{"unknown": 1}\n')
    assert call(monkeypatch, "info", tmp_path / "x.jsonl") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_standard_input_is_read_by_a_dash(tmp_path, monkeypatch, capsys):
    """Once, however packed, and nothing of it stays."""
    made, copies = tmp_path / "made.jsonl", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    words = ("workload=poisson", "workload.num_requests=12", "workload.arrivals.rate=4")
    assert call(monkeypatch, "synthesize", made, *words) == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    packed = gzip.compress(made.read_bytes())
    capsys.readouterr()
    for read in (["info", made], ["info", "-"], ["convert", made, copies[0]], ["convert", "-", copies[1]]):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
        assert call(monkeypatch, *read, "--format", "mooncake") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows[: len(rows) // 2] == rows[len(rows) // 2 :] and len(rows) > 4
    assert copies[0].read_bytes() == copies[1].read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl", "made.jsonl"]
