"""From a sweep to a verdict on the command line, and what Weights & Biases is told of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = (
    "engine=virtual", "model=llama3.1-8b", "hardware=h100", "workload=common_work", "workload.num_requests=40",
    "workload.rate=20", "plots=false", "progress=false",
)  # fmt: skip


def sweep(schedlab, *words: str) -> None:
    seeds = ("policy=fcfs,chunked_prefill", "seed=1,2,3")
    done = schedlab("run", "-m", *seeds, "wandb.mode=disabled", *(words or QUICK), "hydra.sweep.dir=sweep")
    assert done.code == 0, done.err


def check_wandb(schedlab, workspace):
    """One run of job type `compare` in the sweep's group, with every finding."""
    done = schedlab("compare", "sweep", "--wandb", "offline")
    assert done.code == 0 and not done.err, done.err
    (directory,) = (workspace / "sweep" / "wandb").glob("offline-run-*")

    def inspect(*options: str) -> str:
        words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(directory)]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout

    record = next(r["run"] for r in map(json.loads, inspect().splitlines()) if r["type"] == "run")
    assert record["job_type"] == "compare" and record["run_group"] == f"{workspace.name}/sweep"
    summary = json.loads(inspect("--summary"))["summary"]
    told = json.loads((workspace / "sweep" / "verdicts.json").read_text())["answers"][0]
    for found in told["findings"]:
        key = f"chunked_prefill against fcfs/{found['metric']}"
        assert summary[f"{key}/verdict"] == found["verdict"]
        assert summary[f"{key}/change"] == pytest.approx(found["change"])
    assert any(Path(workspace / "sweep" / "wandb").rglob("verdicts*"))


def test_from_a_sweep_to_a_verdict(schedlab, workspace):
    sweep(schedlab)
    done = schedlab("compare", "sweep", "--baseline", "fcfs", "--primary", "itl/p99", "--gate", "ttft/mean +1%")
    assert done.code == 1, done.out + done.err
    assert "chunked_prefill against fcfs" in done.out
    assert "no schedule gives" in done.out and "gate ttft/mean +1%: chunked_prefill against fcfs: regressed" in done.out
    told = json.loads((workspace / "sweep" / "verdicts.json").read_text())
    (answer,) = told["answers"]
    primary = answer["findings"][0]
    assert answer["pairs"] == 3 and primary["metric"] == "itl/p99" and primary["verdict"] == "better"
    assert {bound["metric"] for bound in told["bounds"]["fcfs"]} >= {"ttft/mean", "e2e/mean"}
    assert all(bound["ratio"] >= 1 for bound in told["bounds"]["fcfs"] if not bound["metric"].startswith("throughput"))
    assert "# Verdicts" in (workspace / "sweep" / "verdicts.md").read_text()
    assert not (workspace / "sweep" / "wandb").exists()

    wide = schedlab(
        "compare", "sweep", "--gate", "ttft/mean +900%", "--format", "json", "--no-bounds", "--metric", "e2e/mean"
    )
    assert wide.code == 0 and len(json.loads(wide.out)["answers"][0]["findings"]) == 2
    assert schedlab("compare", "sweep", "--gate", "ttft +5%").code == 2
    assert schedlab("compare", "sweep", "--level", "2").code == 2
    assert "expected one of terminal" in schedlab("compare", "sweep", "--format", "pdf").err
    check_wandb(schedlab, workspace)


def test_seeds_that_change_nothing_are_no_replicates(schedlab):
    """Constant arrivals of constant lengths: three seeds, one sample."""
    constant = (
        "engine=virtual", "model=llama3.1-8b", "hardware=h100", "workload=poisson", "workload.num_requests=20",
        "workload.arrivals._target_=schedlab.workloads.arrivals.Constant",
        "workload.lengths.prompt=[100,100]", "workload.lengths.output=[20,20]", "plots=false", "progress=false",
    )  # fmt: skip
    sweep(schedlab, *constant)
    done = schedlab("compare", "sweep", "--gate", "ttft/mean +1%")
    assert done.code == 0 and "no interval: the 3 replicates are copies" in done.out, done.out


def test_a_capacity_study(schedlab, workspace):
    words = ("engine=virtual", "model=llama3.1-8b", "hardware=a100", "workload=common_work", "workload.num_requests=30")
    options = ("capacity.policies=[fcfs,decode_priority]", "capacity.replicates=2", "capacity.points=2")
    done = schedlab("capacity", *words, *options, "capacity.resolution=0.1", "slo=chatbot", "hydra.run.dir=out")
    assert done.code == 0, done.err
    assert "capacity req/s" in done.out and "the highest rate at which 90% of the requests meet SLO chatbot" in done.out
    told = json.loads((workspace / "out" / "capacity.json").read_text())
    assert [one["policy"] for one in told["capacities"]] == ["fcfs", "decode_priority"]
    assert (workspace / "out" / "plots" / "capacity.png").exists()
    refused = schedlab("capacity", *words, "slo=none")
    assert refused.code == 2 and "expected an SLO class with a limit" in refused.err


def test_a_file_that_is_written_anew_offers_the_same_requests(schedlab, workspace):
    """With a mark before its first row, other line ends and under another name."""
    rows = "arrival,prompt_tokens,output_tokens\n" + "".join(f"{i / 10},{50 + i},{5 + i}\n" for i in range(8))
    Path("a.csv").write_bytes(rows.encode())
    Path("b.csv").write_bytes(b"\xef\xbb\xbf" + rows.replace("\n", "\r\n").encode())
    Path("c.csv").write_bytes(rows.replace("50,5", "51,5").encode())
    table = ("workload=trace", "workload.format=table", "workload.time_unit=s")
    quick = ("engine=stub", "wandb.mode=disabled", "plots=false", "progress=false")
    for name, policy in (("a", "fcfs"), ("b", "orca"), ("c", "fcfs")):
        words = (f"workload.path={name}.csv", f"policy={policy}", f"hydra.run.dir=runs/{name}")
        assert schedlab("run", *table, *quick, *words).code == 0
    done = schedlab("compare", "runs/a", "runs/b")
    assert done.code == 0 and "different sets" not in done.out, done.out
    assert "orca against fcfs" in done.out and "not there" not in done.out + done.err
    assert "arrivals differ" not in schedlab("diff", "runs/a", "runs/b").out
    assert "offered 2 different sets of requests" in schedlab("compare", "runs/a", "runs/b", "runs/c").out
