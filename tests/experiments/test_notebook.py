"""Python does what the commands do: names, words and objects, the same results, shown as a notebook wants them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

import schedlab as lab
from schedlab import engines
from schedlab.experiments.analysis.curves import rows as curve_rows
from schedlab.experiments.notebook.shown import MOST_ROWS, html
from schedlab.experiments.notebook.words import written
from schedlab.experiments.run import progress
from schedlab.framework.errors import ConfigError
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork

SHORT = ("workload=poisson", "workload.num_requests=20", "engine=stub")
QUIET = ("plots=false", "progress=false", "wandb.mode=disabled", "timeline=0")
MORE = {"workload__num_requests": 20}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> lab.Runs:
    out = tmp_path_factory.mktemp("swept") / "runs"
    rates = {"workload__arrivals__rate": [20, 60]}
    return lab.sweep(["fcfs", ChunkedPrefill(64)], "poisson", "stub", seed=range(2), out=out, n_jobs=1, **rates, **MORE)


# ---- names, words, objects ----


def test_names_and_words_are_the_command_s(schedlab):
    done = schedlab(
        "run", "policy=chunked_prefill", "policy.chunk_size=64", "seed=3", *SHORT, *QUIET, "hydra.run.dir=a"
    )
    assert done.code == 0, done.err
    there = lab.load("a")
    for keys in ({"policy__chunk_size": 64, **MORE}, {}):
        words = () if keys else ("policy.chunk_size=64", "workload.num_requests=20")
        here = lab.run("chunked_prefill", "poisson", "stub", *words, seed=3, out=f"b{len(keys)}", **keys)
        assert (here.digest, here.summary) == (there.digest, there.summary)
        assert here.manifest["config_hash"] == lab.load(here.directory).manifest["config_hash"]
        assert here.manifest["labels"] == there.manifest["labels"]


def test_an_object_may_stand_for_any_part(tmp_path):
    work = CommonWork(num_requests=12)
    of_objects = lab.run(ChunkedPrefill(64), work, engines.stub(), seed=1)
    assert lab.run("chunked_prefill", work, engines.stub(), policy__chunk_size=64, seed=1).digest == of_objects.digest
    mixed = lab.run(ChunkedPrefill(64), "common_work", "stub", workload__num_requests=12, seed=1, out=tmp_path)
    named = lab.run("chunked_prefill", "common_work", "stub", "policy.chunk_size=64", workload__num_requests=12, seed=1)
    assert mixed.digest == named.digest
    assert mixed.manifest["labels"]["policy"] == mixed.manifest["config"]["policy"] == "ChunkedPrefill"
    assert lab.run(FCFS(), work, "stub", slo=lab.SLO("own", ttft_s=1e-9)).summary["slo/attainment"] == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: lab.run("fcsf", "poisson", "stub"), "policy=fcsf: no such option; did you mean fcfs"),
        (lambda: lab.run("fcfs", "poisson", "stub", workload__num_request=3), "did you mean num_requests"),
        (
            lambda: lab.run(FCFS(), "poisson", "stub", policy__chunk_size=3),
            "policy.chunk_size: policy is an object, FCFS",
        ),
        (lambda: lab.run("fcfs", "poisson", engines.stub(), model="tiny"), "model: engine is an object"),
        (lambda: lab.run("fcfs", "poisson", "stub", 3), "expected words as key=value .* found 3"),
        (lambda: lab.run("fcfs", "poisson", "stub", workload__arrivals=FCFS()), "workload.arrivals: expected a plain"),
        (lambda: lab.run("fcfs", "poisson", "stub", "wandb.mode=online"), "wandb.mode: the commands heed it"),
        (lambda: lab.run(FCFS(), "poisson", "stub", cluster="replicas"), "cluster: replicas are built from names"),
        (lambda: lab.run("slo_aware", CommonWork(num_requests=2), engines.stub()), "asks how long steps take"),
    ],
)
def test_what_names_nothing_or_would_not_be_heeded_is_refused(call, told):
    with pytest.raises(ConfigError, match=told):
        call()


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab'\\ ,=[]{}$:\"#3.é")
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("xyz"), inner), max_leaves=5
)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_a_value_arrives_as_it_was_given(value):
    def unquoted(told: Any) -> Any:
        if isinstance(told, dict):
            return {key: unquoted(inner) for key, inner in told.items()}
        return list(map(unquoted, told)) if isinstance(told, list) else getattr(told, "text", told)

    word = f"key={written('key', value)}"
    parsed = unquoted(OverridesParser.create().parse_override(word).value())
    assert parsed == value and type(parsed) is type(value)


# ---- sweeps ----


def test_a_sweep_is_the_command_s(schedlab):
    words = ("run", "-m", "policy=fcfs,chunked_prefill", "seed=0,1", *SHORT, *QUIET, "hydra.sweep.dir=theirs")
    assert schedlab(*words).code == 0
    ours = lab.sweep(["fcfs", "chunked_prefill"], "poisson", "stub", seed=[0, 1], out="ours", n_jobs=1, **MORE)
    theirs = lab.load("theirs")
    assert [run.digest for run in ours] == [run.digest for run in theirs]
    assert [run.summary for run in ours] == [run.summary for run in theirs]
    assert Path("ours/comparison.csv").exists() and len(ours) == 4 and ours.failed == {}
    with pytest.raises(ConfigError, match="ours: expected an empty folder"):
        lab.sweep("fcfs", "poisson", "stub", out="ours", **MORE)


CELL = """
from dataclasses import dataclass
import schedlab
from schedlab.policies.chunked_prefill import ChunkedPrefill

@dataclass
class Halved(ChunkedPrefill):
    chunk_size: int = 32

more = {"workload__num_requests": 9}
runs = schedlab.sweep([Halved(), Halved(16)], "poisson", "stub", out="out", n_jobs=2, **more)
assert not runs.failed, runs.failed
assert runs.names == ["Halved", "Halved(chunk_size=16)"], runs.names
alone = [schedlab.run(ChunkedPrefill(size), "poisson", "stub", **more) for size in (32, 16)]
print([run.digest for run in runs] == [run.digest for run in alone])
"""


def test_a_policy_of_a_cell_runs_in_the_pool(tmp_path):
    """Its class is in no file that another process could import; nor does that run the script again."""
    (tmp_path / "script.py").write_text(CELL)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n", done.stderr


class Breaks(FCFS):
    def schedule(self, step: lab.Step) -> None:
        raise ZeroDivisionError("on purpose")


def test_a_run_that_fails_costs_the_others_nothing(tmp_path, capsys):
    runs = lab.sweep(["fcfs", Breaks()], CommonWork(num_requests=3), "stub", out=tmp_path / "out", n_jobs=1)
    assert runs["fcfs"].status == "finished" and "on purpose" in runs.failed["Breaks"]
    assert "1: failed: policy Breaks: schedule raised ZeroDivisionError: on purpose" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="'fcsf': no such run; there are fcfs, Breaks"):
        runs["fcsf"]


@pytest.mark.parametrize(("key", "values"), [("policy", ["fcfs", "fcsf"]), ("seed", []), ("workload__nothing", [1])])
def test_a_value_that_names_nothing_costs_no_run(key, values, tmp_path):
    with pytest.raises(ConfigError):
        lab.sweep(**{"workload": "poisson", "engine": "stub", key: values}, out=tmp_path / "out")
    assert not list(tmp_path.rglob("result.json"))


# ---- the commands' findings ----


def test_verdicts_are_those_of_the_command(swept, schedlab):
    folder = str(swept.directory)
    done = schedlab("compare", folder, "--baseline", "fcfs", "--primary", "ttft/p99", "--format", "json")
    found = swept.compare(baseline="fcfs", primary="ttft/p99")
    assert json.loads(done.out) == json.loads(json.dumps(found.as_json()))
    assert {row["question"] for row in found.rows()} == {answer.name for answer in found.verdicts.answers}
    assert json.loads((lab.compare(folder, out="here") and Path("here/verdicts.json")).read_text())["answers"]


def test_curves_are_those_of_the_command(swept, schedlab):
    done = schedlab("plot", str(swept.directory), "--y", "ttft/p99", "--out", "there")
    assert done.code == 0, done.err
    found = lab.plot(swept.directory)
    with open("there/ttft_p99_by_workload.arrivals.rate.csv") as file:
        assert list(csv.reader(file)) == curve_rows(found.curves)
    told = [[row["variant"], row["ttft/p99"]] for row in found.rows()]
    assert [[name, float(f"{value:.10g}")] for name, value in told] == [
        [row[0], float(row[2])] for row in curve_rows(found.curves)[1:]
    ]
    assert [path.suffix for path in found.save("mine")] == [".png", ".svg", ".csv"]


def test_an_explanation_is_the_command_s(swept, schedlab):
    folder = str(swept.directory / "0")
    done = schedlab("explain", folder, "--no-try", "--format", "json")
    found = lab.explain(folder, tried=False)
    assert json.loads(done.out) == json.loads(json.dumps(found.as_json()))
    assert schedlab("explain", folder, "--no-try").out.rstrip() == str(found)
    parts = [row["mean_s"] for row in found.rows() if row["latency"] == "ttft"]
    assert sum(parts) == pytest.approx(swept[0].summary["ttft/mean"])


def test_a_capacity_is_the_command_s(schedlab):
    keys = ("capacity.replicates=1", "capacity.resolution=1.0", "capacity.points=0", "slo.ttft_s=0.01")
    words = (*SHORT, *keys, *QUIET[:1], "hydra.run.dir=there")
    assert schedlab("capacity", "capacity.policies=[fcfs,chunked_prefill]", *words).code == 0
    found = lab.capacity(["fcfs", ChunkedPrefill()], "poisson", "stub", *keys, out="here", **MORE)
    there, here = (json.loads(Path(folder, "capacity.json").read_text()) for folder in ("there", "here"))
    here["capacities"][1]["policy"] = "chunked_prefill"
    here["options"]["policies"] = there["options"]["policies"]
    assert {key: value for key, value in here.items() if key not in ("notes", "at_limit")} == {
        key: value for key, value in there.items() if key not in ("notes", "at_limit")
    }
    assert [row["policy"] for row in found.rows()] == ["fcfs", "ChunkedPrefill"]
    with pytest.raises(ConfigError, match="no curves"):
        found.figure()
    with pytest.raises(ConfigError, match="differ in their names"):
        lab.capacity([ChunkedPrefill(), ChunkedPrefill(64)], "poisson", "stub")


@pytest.mark.full
def test_a_report_is_written_where_the_command_writes_it(swept, tmp_path):
    found = lab.report(swept.directory, tmp_path / "report.html", tried=False)
    assert found.path.read_text().startswith("<!doctype html>") and all(path.exists() for path in found.pictures)
    assert "report.html" in found._repr_html_()


# ---- shown ----


COUNTED = {"requests", "requests in the batch", "metric"}
"""Axes that count, or name, what they say."""


def check_axes(figure: Any) -> None:
    """Every axis has a name with its unit; panels above each other share the one below."""
    assert figure.axes and figure.axes[-1].get_xlabel()
    assert all(axis.get_ylabel() or figure.get_supylabel() for axis in figure.axes)
    names = {name for axis in figure.axes for name in (axis.get_xlabel(), axis.get_ylabel())} - {""}
    assert {name for name in names if not re.search(r"\(.+\)| per second|^share of ", name)} <= COUNTED
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_every_result_is_shown_small_and_drawn(swept):
    run, found = swept[0], swept.compare(baseline="fcfs")
    told = lab.explain(run.directory, tried=False)
    for result in (run, swept, found, told, swept.plot()):
        assert 100 < len(result._repr_html_()) < 20_000
        check_axes(result.figure())
    for name in ("itl_over_time", "batch_composition", "occupancy"):
        check_axes(run.figure(name))
    with pytest.raises(ConfigError, match="figure 'ttft': expected one of latency_cdf"):
        run.figure("ttft")


def test_a_long_table_says_what_it_leaves_out():
    text = html([{"x": i, "<y>": None} for i in range(MOST_ROWS + 5)])
    assert text.count("<tr>") == MOST_ROWS + 1 and "5 more rows" in text and "&lt;y&gt;" in text


def test_requests_come_in_order_of_arrival(swept):
    run = swept["fcfs seed=1 workload.arrivals.rate=60"]
    assert np.all(np.diff(run.requests["arrival_s"]) >= 0)
    assert [row["request_id"] for row in run.rows()] == list(run.requests["request_id"])
    assert sorted(run.requests["request_id"]) == sorted(run.load("requests")["request_id"])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames_hold_what_the_rows_do(library, swept):
    pytest.importorskip(library, reason=f"{library} is an extra")
    run, to_frame = swept[0], f"to_{library}"
    for table in ("requests", "steps", "decisions"):
        frame = getattr(run, to_frame)(table)
        assert len(frame) == len(next(iter(getattr(run, table).values())))
    assert list(getattr(run, to_frame)()["request_id"]) == list(run.requests["request_id"])
    assert list(getattr(swept, to_frame)()["name"]) == swept.names
    assert len(getattr(swept.compare(), to_frame)()) == len(swept.compare().rows())


def test_a_library_that_is_not_there_is_named(swept, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match=r"pip install schedlab\[polars\]"):
        swept.to_polars()


def test_a_notebook_gets_a_bar_in_its_cell(monkeypatch):
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda bar: shown.append(bar))
    kernel, display = ModuleType("IPython"), ModuleType("IPython.display")
    kernel.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})  # type: ignore[attr-defined]
    display.HTML = str  # type: ignore[attr-defined]
    display.display = lambda bar, display_id: shown.append(bar) or handle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    lab.run(FCFS(), CommonWork(num_requests=3), engines.stub())
    tell = progress.counting("sweep", 4, None)
    tell(1)
    assert shown[0].startswith('<progress max="1" value="0"></progress> FCFS-common_work-0: ')
    assert shown[-1] == '<progress max="4" value="1"></progress> sweep: 1 of 4 runs'
    before = len(shown)
    lab.run(FCFS(), CommonWork(num_requests=3), engines.stub(), progress=False)
    assert len(shown) == before


# ---- what there is ----


def test_everything_exported_is_there_and_completed():
    assert all(getattr(lab, name) is not None for name in lab.__all__)
    assert set(lab.__all__) <= set(dir(lab))


@pytest.mark.parametrize("kind", [lab.Request, lab.Step], ids=lambda kind: kind.__name__)
def test_help_says_what_each_property_means(kind):
    members = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    assert len(members) > 15 and [name for name, member in members.items() if not member.__doc__] == []
