"""Figures of each SLO class and client, and of why requests were turned away: in the summary, tables and gates."""

import json
import shutil

import numpy as np
import pytest

import schedlab as library
from schedlab.experiments.analysis.compare import show_runs
from schedlab.experiments.analysis.metrics import check_metric
from schedlab.experiments.analysis.table import Comparison, headline
from schedlab.experiments.analysis.verdicts import better_when
from schedlab.framework.errors import ConfigError
from schedlab.framework.request import SLO
from schedlab.framework.results.groups import GROUP_FIGURES
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.priority import Priority
from schedlab.workloads.workload import Recorded

CLASSES = {"urgent": SLO("urgent", ttft_s=1.0), "patient": SLO("patient", ttft_s=0.9), "batch": SLO("batch")}


def mixture(folder, count=120):
    """Requests of three classes, all at once: more than can be served within the limits of the patient ones."""
    path = folder / "t.csv"
    rows = []
    for i in range(count):
        slo, client = (("urgent", "a"), ("patient", "a"), ("batch", "b"))[i % 3]
        rows.append(f"{i},{0},{400},{20},{slo},{client},{9 if slo == 'urgent' else 0}")
    path.write_text("request_id,arrival,prompt_tokens,output_tokens,slo,client,priority\n" + "\n".join(rows) + "\n")
    return Recorded(path=str(path), format="table", time_unit="s", slo_classes=CLASSES)


def run(folder, out=None, policy=None, **limits):
    setup = library.engines.virtual("llama3.1-8b", "h100", max_num_seqs=16, **limits)
    return library.run(policy or Priority(), mixture(folder), setup, out=out)


def test_each_class_has_its_own_share_and_the_pooled_one_stands_beside_them(tmp_path):
    summary = run(tmp_path, tmp_path / "run").summary
    shares = {name: summary[f"class/{name}/slo_attainment"] for name in CLASSES}
    assert shares["urgent"] == 1.0 and shares["patient"] < 0.5 and shares["batch"] is None
    pooled = summary["class/urgent/offered"] * shares["urgent"] + summary["class/patient/offered"] * shares["patient"]
    assert summary["slo/attainment_limited"] == pytest.approx(pooled / 80)
    assert sum(summary[f"class/{name}/service_share"] for name in CLASSES) == pytest.approx(1)
    assert sum(summary[f"client/{name}/offered"] for name in "ab") == 120
    assert summary["client/b/finished"] == 40
    shown = Comparison.read([tmp_path / "run"]).markdown()
    assert "| urgent: SLO met | 100.0% |" in shown and "| patient: SLO met |" in shown
    assert "batch: SLO met" not in shown, "what is not known of any run is not shown"


def test_figures_of_a_class_are_those_of_its_requests_alone(tmp_path):
    result = run(tmp_path, policy=ChunkedPrefill())
    requests, summary = result.requests, result.summary
    for name in CLASSES:
        mine = np.array([slo == name for slo in requests["slo"]])
        ttft = (requests["first_token_s"] - requests["arrival_s"])[mine]
        assert summary[f"class/{name}/ttft_p99"] == pytest.approx(np.percentile(ttft, 99))
        assert summary[f"class/{name}/offered"] == mine.sum() == 40


def test_a_run_of_one_class_and_one_client_has_the_usual_keys(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,8\n")
    summary = library.run(ChunkedPrefill(), Recorded(path=str(path)), library.engines.stub("tiny"), slo=SLO()).summary
    assert tuple(summary) == SUMMARY_KEYS


def test_reasons_are_counted(tmp_path):
    summary = run(tmp_path, max_num_waiting_reqs=10).summary
    assert summary["requests/queue_full"] == summary["requests/rejected"] == 110
    assert summary["shed_share"] == pytest.approx(110 / 120) and "requests/shed" not in summary


def test_such_keys_are_metrics_for_gates_and_verdicts():
    for name in GROUP_FIGURES:
        check_metric(f"class/urgent/{name}", "--gate")
        check_metric(f"client/a/b/{name}", "--gate")
    assert better_when("class/x/ttft_p99") == -1 and better_when("client/x/slo_attainment") == 1
    assert better_when("requests/shed") == better_when("shed_share") == -1 and better_when("class/x/offered") == 0
    with pytest.raises(ConfigError, match="no such metric"):
        check_metric("class/urgent/ttft", "--gate")


def test_a_class_that_starves_is_seen_beside_the_pooled_share(tmp_path, capsys):
    """299 urgent requests within their limit and 19 of 40 others are 93.8 % of all."""
    rows = [f"{i},{i},10,4,urgent" for i in range(299)]
    rows += [f"o{i},{300 + 10 * i},10,{4 if i < 19 else 400},patient" for i in range(40)]
    path = tmp_path / "t.csv"
    path.write_text("request_id,arrival,prompt_tokens,output_tokens,slo\n" + "\n".join(rows) + "\n")
    classes = {"urgent": SLO("urgent", e2e_s=0.5), "patient": SLO("patient", e2e_s=0.5)}
    workload = Recorded(path=str(path), format="table", time_unit="s", slo_classes=classes)
    setup = library.engines.virtual("llama3.1-8b", "h100")
    result = library.run(ChunkedPrefill(), workload, setup, out=tmp_path / "run")
    shown = Comparison.read([tmp_path / "run"]).markdown()
    assert "| SLO met | 93.8% |" in shown
    assert "| urgent: SLO met | 100.0% |" in shown and "| patient: SLO met | 47.5% |" in shown
    assert headline(read_run(tmp_path / "run")).endswith(
        "SLO met 93.8%, finished 339, urgent: SLO met 100.0%, patient: SLO met 47.5%"
    )
    told = {row["figure"]: row["value"] for row in result.table()}
    assert (told["SLO met"], told["urgent: SLO met"], told["patient: SLO met"]) == ("93.8%", "100.0%", "47.5%")
    for seed in range(8):
        shutil.copytree(tmp_path / "run", tmp_path / "many" / str(seed))
        manifest = tmp_path / "many" / str(seed) / "manifest.json"
        kept = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**kept, "labels": {**kept["labels"], "seed": seed}}))
    show_runs(Comparison.read([tmp_path / "many"]))
    shown = capsys.readouterr().out
    assert "mean of replicates" in shown and "patient: SLO met" in shown
