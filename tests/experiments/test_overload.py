"""More traffic than an engine can serve: limits, rates and policies that shed, from the configuration to the replay."""

from pathlib import Path

import schedlab as library
from schedlab.experiments.run import compose
from schedlab.framework.request import SLO
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill

BUSY = (
    "engine=virtual", "hardware=cpu", "model=tiny", "workload.max_requests=40", "workload.time_scale=0.00001",
    "engine.max_num_seqs=4", "slo.ttft_s=0.03", "plots=false", "progress=false", "wandb.mode=disabled",
    "hydra.sweep.dir=sweep",
)  # fmt: skip


def reasons(run: Path) -> set[str]:
    return {reason for reason in read_run(run).requests["reason"] if reason is not None}


def test_runs_with_rejections_decide_the_same_from_their_own_folders(schedlab, workspace):
    bucket = ("admission=token_bucket", "admission.burst=30", "admission.rate=0.1")
    made = schedlab("run", "-m", "policy=shedding", "engine.max_num_waiting_reqs=20", *bucket, *BUSY)
    assert made.code == 0, made.err
    run = workspace / "sweep" / "0"
    assert reasons(run) == {"shed:late", "queue_full"} | {"rate_limited"}
    done = schedlab("replay", str(run))
    assert done.code == 0 and "the same decisions" in done.out and "every token at the same time" in done.out
    words = ("policy=slo_aware", "policy.reject_after_s=0.03", *bucket, *BUSY, "hydra.sweep.dir=other")
    assert schedlab("run", "-m", *words).code == 0
    other = workspace / "other" / "0"
    assert reasons(other) == {"shed:waited too long", "rate_limited"}
    done = schedlab("replay", str(other))
    assert done.code == 0 and "the same decisions" in done.out, done.out + done.err
    parted = schedlab("diff", str(run), str(other))
    assert parted.code in (0, 1) and "decided:" in parted.out, parted.out + parted.err


RETRY = "workload.patience={first_token_s: 0.05, retries: 2, backoff_s: 0.02, jitter: 0.5}"


def retried(schedlab, policies, *words):
    made = schedlab("run", "-m", policies, "engine.max_num_waiting_reqs=4", "observed_at=client", RETRY, *BUSY, *words)
    assert made.code == 0, made.err


def test_runs_with_retries_are_told_and_decide_the_same_from_their_own_folders(schedlab, workspace):
    retried(schedlab, "policy=fcfs,shedding")
    runs = [workspace / "sweep" / name for name in "01"]
    for run in runs:
        summary = read_run(run).summary
        assert summary["offered/logical"] == 40 < summary["offered/attempts"]
        done = schedlab("replay", str(run))
        assert done.code == 0 and "every token at the same time" in done.out, done.out + done.err
    told = schedlab("compare", *map(str, runs))
    assert told.code == 0 and "given up" in told.out, told.out + told.err
    assert "not offered the same" not in told.out + told.err, "retries are no part of what was offered"
    assert schedlab("diff", *map(str, runs)).code == schedlab("explain", str(runs[0])).code == 0
    other = schedlab("replay", str(runs[0]), "--policy", "chunked_prefill", "--out", "other")
    assert other.code == 0, other.out + other.err
    assert read_run(workspace / "other").summary["offered/logical"] == 40
    assert schedlab("replay", "other").code == 0


def test_a_measured_run_with_retries_is_decided_again(schedlab, workspace):
    retried(schedlab, "policy=fcfs", "engine=cpu", "clock=busy", "engine.max_num_seqs=2", "workload.max_requests=16")
    run = workspace / "sweep" / "0"
    assert read_run(run).summary["offered/attempts"] > read_run(run).summary["offered/logical"] == 16
    done = schedlab("replay", str(run))
    assert done.code == 0 and "the same decisions" in done.out, done.out + done.err


def test_clients_of_a_fleet_try_elsewhere(schedlab, workspace):
    words = ("cluster=replicas", "cluster.replicas=2", "router=round_robin", "engine.max_num_waiting_reqs=2")
    made = schedlab("run", *words, RETRY, "workload.sessions=recorded", *BUSY[:-1], "hydra.run.dir=out")
    assert made.code == 0, made.out + made.err
    summary = read_run(workspace / "out").summary
    assert summary["offered/logical"] == 40 < summary["offered/attempts"]
    for name in ("r0", "r1"):
        folder = workspace / "out" / "replicas" / name
        assert "offered/logical" not in read_run(folder).summary
        again = schedlab("replay", str(folder))
        assert again.code == 0 and "every token at the same time" in again.out, again.out + again.err


def test_a_wrong_limit_is_one_line(schedlab, workspace):
    done = schedlab("run", "engine.max_num_waiting_reqs=0", *BUSY[:-1])
    assert done.code != 0
    assert "engine.max_num_waiting_reqs: expected null or a number of at least 1, found 0" in done.err + done.out


def test_a_short_queue_keeps_what_it_takes_in_time():
    """60 requests a second, far more than the modelled H100 can serve: without a limit almost all come too late."""
    words = ["workload=poisson", "workload.num_requests=2000", "workload.arrivals.rate=60"]
    workload = compose.build(compose.compose(words).workload, "workload")
    setup = library.engines.virtual("llama3.1-8b", "h100", max_num_waiting_reqs=20)
    summary = library.run(ChunkedPrefill(), workload, setup, slo=SLO("second", ttft_s=1.0)).summary
    assert abs(summary["slo/attainment"] - 0.73) <= 0.01 and summary["ttft/p99"] < 0.7
    assert summary["requests/finished"] + summary["requests/rejected"] == 2000
