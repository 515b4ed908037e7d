"""The comparison table, from run directories with made-up rows."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import made_up
import pytest

from schedlab.experiments.analysis.agreement import agreement, first_difference
from schedlab.experiments.analysis.metrics import check_metric
from schedlab.experiments.analysis.table import (
    FIGURES,
    UNKNOWN,
    Comparison,
    Run,
    chain_notes,
    figures_of,
    predictor_line,
    predictor_notes,
)
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter

LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "num_blocks": 64, "block_size": 16, "max_model_len": 512}


def make(directory: Path, policy: str, *, ttft_ms: int = 100, tokens: dict | None = None, **changes) -> Path:
    """A finished run as `schedlab run` leaves it; `changes` to its manifest."""
    made_up.run(directory, ttft_ms=ttft_ms)
    manifest = {
        "labels": {"policy": policy, "workload": "sample", "engine": "cpu", "seed": 0},
        "overrides": {},
        "engine": LIMITS,
        "workload": {"sha256": "abc"},
        "config": {"workload": {"path": "x"}, "model": {"seed": 0}},
    }
    (directory / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    if tokens is not None:
        with gzip.open(directory / "outputs.jsonl.gz", "wt") as file:
            for request_id, ids in tokens.items():
                file.write(json.dumps({"request_id": request_id, "status": "finished", "token_ids": ids}) + "\n")
    return directory


def fail(directory: Path, error: str) -> None:
    RunWriter(directory, made_up.MEASUREMENT).fail(error)


def notes(*directories: Path) -> str:
    return "\n".join(Comparison.read(directories).notes)


def test_every_figure_is_a_key_of_the_summary():
    known = {*SUMMARY_KEYS, "pressure/queue", "pressure/split_prompts"}
    assert {figure.key for figure in FIGURES} <= known
    for figure in figures_of(["class/urgent/slo_attainment"]):
        if figure.key not in known:
            check_metric(figure.key, "--gate")


def test_latencies_are_shown_in_ms(tmp_path):
    make(tmp_path / "a", "fcfs", ttft_ms=1234)
    header, rows = Comparison.read([tmp_path]).laid_out()
    assert header == ["", "fcfs"]
    assert dict(rows)["TTFT p99 ms"] == "1,234.0" and dict(rows)["TPOT mean ms"] == "20.0"
    assert dict(rows)["steps with a queue"] == "100.0%"


def test_runs_are_named_by_what_differs(tmp_path):
    for job, chunk in enumerate([64, 128]):
        make(tmp_path / str(job), "chunked_prefill", overrides={"policy.chunk_size": str(chunk), "seed": "0"})
    assert Comparison.read([tmp_path]).names == [
        "chunked_prefill policy.chunk_size=64",
        "chunked_prefill policy.chunk_size=128",
    ]


def test_runs_that_nothing_tells_apart_are_named_by_their_directory(tmp_path):
    make(tmp_path / "a", "fcfs")
    make(tmp_path / "b", "fcfs")
    assert Comparison.read([tmp_path]).names == [f"fcfs ({tmp_path / 'a'})", f"fcfs ({tmp_path / 'b'})"]


def test_jobs_are_in_the_order_of_their_numbers(tmp_path):
    for job in (10, 9, 2):
        make(tmp_path / str(job), f"p{job}")
    assert Comparison.read([tmp_path]).names == ["p2", "p9", "p10"]


def test_many_runs_are_rows(tmp_path):
    for job in range(7):
        make(tmp_path / str(job), f"p{job}")
    header, rows = Comparison.read([tmp_path]).laid_out()
    assert header[1] == "TTFT mean ms" and [row[0] for row in rows] == [f"p{job}" for job in range(7)]


def test_a_failed_run_keeps_its_place(tmp_path):
    make(tmp_path / "0", "fcfs")
    fail(tmp_path / "1", "no such luck")
    comparison = Comparison.read([tmp_path])
    assert list(comparison.failed) == ["1"]
    assert "failed: 1: no such luck" in comparison.notes
    assert all(row[2] == UNKNOWN for row in comparison.rows())
    assert comparison.as_json()["runs"][1]["error"] == "no such luck"


def test_only_failed_runs_make_a_table_too(tmp_path):
    fail(tmp_path / "0", "no")
    comparison = Comparison.read([tmp_path])
    comparison.write(tmp_path)
    assert "failed: 0: no" in (tmp_path / "comparison.md").read_text()


def test_limits_are_compared(tmp_path):
    a = make(tmp_path / "a", "fcfs")
    assert "limits: max_num_batched_tokens 2048" in notes(a)
    b = make(tmp_path / "b", "other")
    assert "equal limits: max_num_batched_tokens 2048" in notes(a, b)
    c = make(tmp_path / "c", "third", engine={**LIMITS, "num_blocks": 65, "max_num_seqs": 9})
    assert "limits differ: num_blocks is 64 or 65" in notes(a, b, c)
    assert "limits differ: max_num_seqs is 8 or 9" in notes(a, b, c)


@pytest.mark.parametrize("runs", [2, 8])
def test_a_name_that_would_be_broken_is_a_number_told_in_full(tmp_path, capsys, runs):
    rule = "schedlab.policies.victims." + "least_computed_" * 8
    for number in range(runs):
        overrides = {"policy.victim._target_": f"{rule}{number}", "policy.chunk_size": number}
        make(tmp_path / str(number), "chunked_prefill", overrides=overrides)
    comparison = Comparison.read([tmp_path])
    comparison.show()
    lines = capsys.readouterr().out.splitlines()
    for number, name in enumerate(comparison.names, 1):
        assert f"#{number}  {name}" in lines and f"{rule}{number - 1}" in name
    assert sum(line.startswith("#") for line in lines) == (runs if runs == 2 else 2 * runs)


def test_names_that_fit_stand_in_the_table(tmp_path, capsys):
    make(tmp_path / "a", "fcfs"), make(tmp_path / "b", "other")
    Comparison.read([tmp_path]).show()
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["fcfs", "other"] and "#1" not in out


def test_the_slo_class_is_named(tmp_path):
    a, b = make(tmp_path / "a", "fcfs"), make(tmp_path / "b", "other")
    assert "SLO default: TTFT ≤ 1000 ms, TPOT ≤ 100 ms" in notes(a)
    result = json.loads((b / "result.json").read_text())
    result["measurement"]["slo"][0]["ttft_s"] = 0.25
    (b / "result.json").write_text(json.dumps(result))
    assert "SLO default: TTFT ≤ 250 ms" in notes(a, b) and "SLO classes differ" in notes(a, b)


def test_other_arrivals_are_told(tmp_path):
    a = make(tmp_path / "a", "fcfs")
    same = make(tmp_path / "b", "other")
    assert "arrivals differ" not in notes(a, same)
    other = make(tmp_path / "c", "third", workload={"sha256": "xyz"})
    assert "arrivals differ: the runs were offered 2 different sets" in notes(a, same, other)


def test_equal_tokens_are_stated(tmp_path):
    outputs = {f"r{i}": [i, i + 1, i + 2] for i in range(5)}
    a = make(tmp_path / "a", "fcfs", tokens=outputs)
    b = make(tmp_path / "b", "other", tokens=dict(reversed(outputs.items())))
    c = make(tmp_path / "c", "third", tokens={name: outputs[name] for name in ("r0", "r3")})
    assert "generated tokens: identical in 2 runs, for each of the 5 requests" in notes(a, b)
    assert "generated tokens: identical in 3 runs, for each of the 2 requests" in notes(a, b, c)


def test_different_tokens_are_located(tmp_path):
    a = make(tmp_path / "a", "fcfs", tokens={"r0": [1, 2, 3], "r1": [4, 5]})
    b = make(tmp_path / "b", "other", tokens={"r0": [1, 2, 9], "r1": [4, 5]})
    assert "tokens: differ from those of fcfs: other in 1, first in request r0 from output token 2 on" in notes(a, b)


def test_tokens_of_other_models_are_not_compared(tmp_path):
    a = make(tmp_path / "a", "fcfs", tokens={"r0": [1]})
    b = make(tmp_path / "b", "other", tokens={"r0": [2]}, config={"workload": {"path": "x"}, "model": {"seed": 1}})
    assert "generated tokens" not in notes(a, b)


def test_agreement_counts_what_both_have():
    found = agreement({"a": [1, 2], "b": [3]}, [("a", [1, 2]), ("b", [4]), ("c", [5])])
    assert (found.same, found.different) == (1, 1)


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0), ([5, 6], [7, 6], 0)]
)
def test_first_difference(a, b, place):
    assert first_difference(a, b) == first_difference(b, a) == place


def test_predictors_are_named_with_their_knobs(tmp_path):
    node = {"_target_": "schedlab.framework.predictors.NoisyPredictor", "sigma": 0.5, "seed": 0}
    manifests = [
        {}, {"config": {"predictor": node}, "labels": {"predictor": "noisy"}},
        {"predictor": {"class": "mine.Guess", "knobs": {"tokens": 7}}, "config": {"predictor": None}},
    ]  # fmt: skip
    assert [*map(predictor_line, manifests)] == ["none", "noisy (sigma=0.5, seed=0)", "Guess (tokens=7)"]
    runs = [Run(tmp_path, RunTables("finished", {}, None, {}, dict, manifest)) for manifest in manifests]
    assert predictor_notes(runs[:1]) == ["predictor: none"]
    assert predictor_notes(runs[:2]) == ["predictors differ: none or noisy (sigma=0.5, seed=0)"]


def test_chained_steps_are_explained(tmp_path):
    runs = [
        Run(tmp_path, RunTables("finished", {}, None, {}, dict, {"engine": {"max_chained_steps": steps}}))
        for steps in (1, 8)
    ]
    assert chain_notes(runs[:1]) == [] and "bunches of up to 8" in chain_notes(runs)[0]


def test_markdown_and_json_hold_the_same(tmp_path):
    make(tmp_path / "a", "fcfs|x")
    comparison = Comparison.read([tmp_path])
    comparison.write(tmp_path)
    table = json.loads((tmp_path / "comparison.json").read_text())
    assert table["notes"] == comparison.notes
    assert table["runs"][0]["summary"]["ttft/p99"] == pytest.approx(0.1)
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    assert lines[0] == "|  | fcfs\\|x |" and lines[1] == "| --- | ---: |"


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run in here"):
        Comparison.read([tmp_path], required=True)
    assert Comparison.read([tmp_path]).runs == []
