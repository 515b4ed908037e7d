"""A table of runs reads what was worked out before, and notices when it no longer holds."""

from __future__ import annotations

import json
import os

import pytest

import schedlab
from schedlab.experiments.analysis import bounds
from schedlab.experiments.analysis.compare import compare
from schedlab.experiments.analysis.derived import DERIVED, derived
from schedlab.experiments.analysis.pressure import pressure
from schedlab.experiments.analysis.table import Comparison
from schedlab.framework.results import tables
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.workloads.populations import CommonWork


@pytest.fixture
def run(tmp_path):
    engine = schedlab.engines.virtual("llama3.1-8b", "h100", num_blocks=300, max_model_len=2048, max_num_seqs=8)
    schedlab.run(ChunkedPrefill(64), CommonWork(num_requests=30, rate=40.0), engine, out=tmp_path / "run")
    return tmp_path / "run"


def test_pressure_is_in_the_result_and_that_of_the_logs(run):
    found = read_run(run)
    told = pressure(found)
    assert found.result["pressure"]["queue"] == told["pressure/queue"] > 0 and told["pressure/split_prompts"] > 0
    del found.result["pressure"]
    assert pressure(found) == told


def test_a_table_reads_no_log_twice(run, monkeypatch, capsys):
    words = {"form": "terminal", "out": None, "wandb_mode": None, "bounds": True, "options": {}}
    compare([run], **words)
    first = capsys.readouterr().out
    assert "no schedule gives" in first

    def refuse(self):
        raise AssertionError("a log is read")

    for name in ("requests", "steps", "decisions"):
        monkeypatch.setattr(tables.RunTables, name, property(refuse))
    monkeypatch.setattr(bounds, "read", refuse)
    compare([run], **words)
    assert capsys.readouterr().out == first


def test_what_is_kept_is_of_the_files_as_they_are(run):
    assert derived(run, "x", lambda: 1) == derived(run, "x", lambda: 2) == 1
    path = run / "result.json"
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert derived(run, "x", lambda: 3) == 3 and derived(run, "y", lambda: [4]) == [4] and derived(run, "x", int) == 3
    (run / DERIVED).write_text("{")
    assert derived(run, "x", lambda: 5) == 5
    assert json.loads((run / DERIVED).read_text())["x"] == 5


def test_a_folder_that_cannot_be_written_is_compared_all_the_same(run, monkeypatch):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr("schedlab.experiments.analysis.derived.write_whole", full)
    assert derived(run, "x", lambda: 1) == 1 and not (run / DERIVED).exists()
    assert Comparison.read([run]).rows()
