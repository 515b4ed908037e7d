"""The command line: what a run prints, and that every mistake of the user is one line and exit 2."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from children import takes_ctrl_c

from schedlab.framework.results import packed
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.reader import read_run

ALL_LOGS = ("requests", "steps", "decisions", "workload", "outputs")
QUICK = ("engine=stub", "wandb.mode=disabled", "plots=false", "workload.max_requests=12")
MINE = """
import time
from schedlab import Policy
from schedlab.policies.fcfs import FCFS

class Mine(FCFS):
    pass

class Slow(FCFS):
    def schedule(self, step):
        time.sleep(0.02)
        super().schedule(step)

class Idle(Policy):
    def schedule(self, step):
        pass

class Faulty(FCFS):
    def schedule(self, step):
        step.no_such_member
"""


@pytest.fixture
def mine(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module with policies in the current folder."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (workspace / "mine.py").write_text(MINE)
    return workspace / "mine.py"


def only(pattern: str) -> Path:
    (found,) = Path().glob(pattern)
    return found


# ---- runs ----


def test_a_run_prints_its_figures_and_leaves_a_directory(schedlab):
    done = schedlab("run", *QUICK)
    assert done.code == 0, done.err
    assert "TTFT p99 ms" in done.out and "SLO default: TTFT" in done.out
    directory = only("outputs/*/*")
    assert str(directory) in done.out
    files = {path.name for path in directory.iterdir()}
    assert {"result.json", "manifest.json", *(f"{name}.jsonl{packed.codec().suffix}" for name in ALL_LOGS)} <= files
    assert "vllm_bench.json" in files
    assert read_run(directory).summary["requests/finished"] == 12


def test_the_manifest_says_what_a_run_was_made_of(schedlab):
    schedlab("run", *QUICK, "policy=chunked_prefill", "policy.chunk_size=64", "seed=0")
    manifest = json.loads((only("outputs/*/*") / "manifest.json").read_text())
    assert manifest["labels"]["policy"] == "chunked_prefill"
    assert manifest["overrides"]["policy.chunk_size"] == "64"
    assert manifest["policy"]["knobs"]["chunk_size"] == 64
    assert manifest["policy"]["class"] == "schedlab.policies.chunked_prefill.ChunkedPrefill"
    assert manifest["config"]["policy"]["chunk_size"] == 64
    assert manifest["engine"]["max_num_batched_tokens"] == 2048
    assert manifest["clock"] == "virtual" and manifest["seeds"]["seed"] == 0
    assert len(manifest["workload"]["sha256"]) == 64
    assert manifest["versions"]["python"] and manifest["versions"]["numpy"]
    assert manifest["hardware"]["cpus"] >= 1
    assert manifest["config_hash"] == read_run(only("outputs/*/*")).result["config_hash"]


def test_the_config_hash_ignores_what_changes_no_number(schedlab):
    schedlab("run", *QUICK)
    schedlab("run", *QUICK, "progress=false", "wandb.project=other")
    schedlab("run", *QUICK, "engine.block_size=32")
    hashes = [read_run(path).result["config_hash"] for path in sorted(Path().glob("outputs/*/*"))]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_policy_in_the_current_folder_needs_no_package(schedlab, mine):
    done = schedlab("run", *QUICK, "policy=custom", "policy._target_=mine.Mine")
    assert done.code == 0, done.err
    manifest = json.loads((only("outputs/*/*") / "manifest.json").read_text())
    assert manifest["policy"]["class"] == "mine.Mine" and manifest["policy"]["sha256"]


def test_a_yaml_in_the_current_folder_is_an_option(schedlab, mine):
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/mine.yaml").write_text("_target_: mine.Mine\npreempt_mode: swap\n")
    done = schedlab("run", *QUICK, "policy=mine")
    assert done.code == 0, done.err
    assert json.loads((only("outputs/*/*") / "manifest.json").read_text())["policy"]["knobs"] == {
        "preempt_mode": "swap", "estimator": None, "victim": "schedlab.policies.victims.newest",
        "reserve_decode_block": False,
    }  # fmt: skip


def test_a_yaml_here_that_schedlab_has_too_is_told(schedlab):
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/fcfs.yaml").write_text("_target_: mine.Mine\n")
    done = schedlab("run", "--cfg", "job", "-p", "policy")
    assert "schedlab.policies.fcfs.FCFS" in done.out
    assert done.err.startswith("warning: config ./conf: its policy/fcfs is hidden by that of schedlab")


def test_experiments_overlay_everything(schedlab, workspace):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/tight.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /policy: chunked_prefill\nengine:\n  num_blocks: 77\n"
    )
    done = schedlab("run", "experiment=tight", "--cfg", "job")
    assert "num_blocks: 77" in done.out and "ChunkedPrefill" in done.out


@pytest.mark.parametrize(
    "words", [("--help",), ("run", "--help"), ("run", "--info", "searchpath"), ("compare", "--help")]
)
def test_help_is_no_error(schedlab, words):
    done = schedlab(*words)
    assert done.code == 0 and done.out


def test_help_of_run_lists_the_groups(schedlab):
    groups = schedlab("run", "--help").out
    assert "policy: chunked_prefill, custom, decode_priority, edf, fair, fastserve, fcfs, hrrn" in groups


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("roofline", "  batch_size: null"),
        ("calibrate", "  budget_s: 60 # seconds"),
        ("capacity", "  attainment: 0.9 # share of the requests"),
        ("fidelity", "  repeats: 2 # real runs of each"),
        ("policy check", "  seconds: 25 # of CPU time"),
        ("profile import", "  backend: vllm # trtllm"),
        ("generate", "chat: false # put the prompt"),
        ("generate", "  temperature: 0.0 # 0 takes the likeliest token"),
    ],
)
def test_help_of_a_command_shows_its_own_keys_with_their_comments(schedlab, command, told):
    done = schedlab(*command.split(), "--help")
    assert done.code == 0 and told in done.out
    assert schedlab(*command.split(), "-h") == done
    assert done.out.startswith(f"schedlab {command} ") and "clock:" not in done.out and "hydra" not in done.out


# ---- mistakes ----


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("engine.max_model_len=2",), "12 of 12: needs 68 tokens, max_model_len is 2"),
        (("engine.num_blocks=1",), "12 of 12: needs 67 tokens of KV cache, the pool holds 16"),
        (("engine.max_model_len=2", "record=summary"), "12 of 12: empty, or beyond engine.max_model_len"),
    ],
)
def test_a_run_that_rejects_every_request_says_why(schedlab, words, why):
    done = schedlab("run", *QUICK, *words, "hydra.run.dir=r")
    assert done.code == 1 and f"r: every request was rejected; {why}" in done.err
    assert read_run(Path("r")).status == "finished"


def test_a_sweep_ends_with_1_where_no_run_serves_a_request(schedlab):
    limits = "engine.max_model_len=2,3"
    done = schedlab("run", "-m", *QUICK, limits, "hydra.sweep.dir=s")
    assert done.code == 1 and "0: every request was rejected" in done.err and "1: every request" in done.err
    served = schedlab("run", "-m", *QUICK, f"{limits},4096", "hydra.sweep.dir=t")
    assert served.code == 0 and "2: every request" not in served.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["polcy=fcfs"], ["polcy", "did you mean policy?"]),
        (["policy=fcsf"], ["policy=fcsf", "did you mean fcfs?", "decode_priority"]),
        (["engine.num_block=3"], ["engine.num_block", "did you mean num_blocks?", "block_size"]),
        (["experiment=nope"], ["experiment=nope", "no such option"]),
        (["-m", "policy=chunked_prefill,fcfs", "policy.chunk_size=9"], ["policy.chunk_size", "preempt_mode"]),
        (["-m", "policy=fcfs,nope"], ["policy=nope"]),
        (["seed=abc"], ["seed: expected an integer, found 'abc'"]),
        (["seed=["], ["seed=["]),
        (["engine.max_num_seqs=4.5"], ["engine.max_num_seqs: expected an integer, found 4.5"]),
        (["engine.block_size=0"], ["engine.block_size", "found 0"]),
        (["policy.preempt_mode=x"], ["policy.preempt_mode: expected recompute or swap or auto, found 'x'"]),
        (["policy=chunked_prefill", "policy.chunk_size=0"], ["policy.chunk_size", "at least 1"]),
        (["policy=custom"], ["policy._target_ has no default"]),
        (["policy=custom", "policy._target_=no.Such"], ["policy._target_=no.Such", "No module named 'no'"]),
        (["policy=custom", "policy._target_=mine.Nope"], ["policy._target_=mine.Nope", "has no attribute 'Nope'"]),
        (["policy=custom", "policy._target_=mine.Mine", "+policy.x=1"], ["policy (mine.Mine)", "'x'"]),
        (["policy=custom", "policy._target_=mine.Idle", "progress=false"], ["policy Idle: granted nothing"]),
        (["workload=azure_conv"], ["workload.path", "obtain"]),
        (["workload=azure_conv", "workload.path=/none.csv"], ["/none.csv", "no such file"]),
        (["clock=wall"], ["clock=wall", "clock=virtual"]),
        (["clock=sundial"], ["clock=sundial"]),
        (["wandb.mode=sometimes"], ["wandb.mode=sometimes", "offline"]),
        (["record=most"], ["record=most"]),
        (["measure.start_s=3", "measure.stop_s=2"], ["measure: expected start_s < stop_s, found 3 and 2"]),
        (["wandb=null"], ["wandb=null: expected the name of an option of wandb"]),
        (["workload=3"], ["workload=3: expected the name of an option of workload"]),
        (["policy=[fcfs]"], ["policy: expected one option, found none"]),
        (["-m", "policy=fcfs,null"], ["policy=fcfs,null: expected the name of an option of policy"]),
        (["slo={ttft_s: 1}", "workload=azure_conv", "workload.path=/none.csv"], ["/none.csv", "no such file"]),
        (["~slo"], ["slo: expected one option, found none"]),
        (["~seed"], ["seed: expected in the config, found nothing"]),
        (["--wat"], ["--wat", "no such option"]),
        (["engine=cpu", "model.path=/none"], ["/none"]),
    ],
)
def test_a_mistake_is_one_line(schedlab, mine, words, told):
    done = schedlab("run", "engine=stub", "wandb.mode=disabled", "plots=false", "workload.max_requests=2", *words)
    assert done.code == 2
    assert done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert not done.out
    for text in told:
        assert text in done.err


def test_a_run_that_rejects_everything_says_why_it_has_no_plots(schedlab):
    words = ("engine=stub", "engine.max_model_len=2", "workload.max_requests=4", "wandb.mode=disabled")
    done = schedlab("run", *words, "progress=false", "hydra.run.dir=r")
    assert done.code == 1 and not Path("r/plots").exists()
    assert "no plots in r: no step was executed; 4 of 4 requests were rejected\n" in done.err


@pytest.mark.parametrize("words", [["comapre"], ["compare"], ["compare", "nowhere"]])
def test_a_mistaken_command_is_one_line(schedlab, words):
    done = schedlab(*words)
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1


def test_every_metric_is_listed_with_its_meaning(schedlab):
    done = schedlab("metrics")
    assert done.code == 0 and [line.split()[0] for line in done.out.splitlines()] == list(SUMMARY_KEYS)
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in done.out.splitlines())


def test_a_metric_that_is_none_is_answered_with_close_ones_and_the_list(schedlab):
    done = schedlab("compare", ".", "--primary", "ttft_p99")
    assert done.code == 2 and done.err.count("\n") == 1 and len(done.err) < 200
    assert "ttft_p99: no such metric; did you mean ttft/p99" in done.err and "schedlab metrics lists all" in done.err


def test_a_traceback_is_shown_on_request(schedlab, monkeypatch):
    monkeypatch.setenv("SCHEDLAB_TRACEBACK", "1")
    done = schedlab("run", "policy=nope")
    assert "Traceback" in done.err and done.err.splitlines()[-1].startswith("error: policy=nope")


def test_a_failed_run_leaves_a_result_that_says_why(schedlab, mine):
    schedlab("run", *QUICK, "policy=custom", "policy._target_=mine.Idle")
    run = read_run(only("outputs/*/*"))
    assert run.status == "failed" and "granted nothing" in run.result["error"]


# ---- sweeps ----


def test_a_failing_job_costs_the_others_nothing(schedlab, mine):
    Path("conf/policy").mkdir(parents=True)
    Path("conf/policy/faulty.yaml").write_text("_target_: mine.Faulty\n")
    done = schedlab("run", "-m", *QUICK, "policy=fcfs,faulty,prefix_reuse")
    assert done.code == 1
    sweep = only("multirun/*/*")
    assert [read_run(sweep / str(job)).status for job in range(3)] == ["finished", "failed", "finished"]
    assert "no_such_member" in (sweep / "1/error.txt").read_text()
    assert "failed: faulty: policy Faulty: schedule raised AttributeError" in done.out and "TTFT p99 ms" in done.out
    table = json.loads((sweep / "comparison.json").read_text())
    assert [run["status"] for run in table["runs"]] == ["finished", "failed", "finished"]
    assert "| TTFT p99 ms |" in (sweep / "comparison.md").read_text()


def test_a_sweep_says_what_may_be_compared(schedlab):
    done = schedlab("run", *QUICK, "-m", "policy=fcfs,chunked_prefill", "engine.num_blocks=64,128")
    assert done.code == 0, done.err
    assert "limits differ: num_blocks is 64 or 128" in done.out
    assert "SLO default" in done.out
    assert "generated tokens: identical in 4 runs" in done.out
    assert "fcfs engine.num_blocks=64" in done.out
    both = [(policy, blocks) for policy in ("fcfs", "chunked_prefill") for blocks in (64, 128)]
    for number, (policy, blocks) in enumerate(both):
        words = f"policy={policy} engine.num_blocks={blocks}"
        assert re.search(rf"^{number}: TTFT .* \({words}\)$", done.out, re.MULTILINE)


def test_launchers_give_the_same_table(schedlab):
    words = ("run", "-m", *QUICK, "policy=fcfs,chunked_prefill", "engine.num_blocks=64,128")
    for launcher in ("basic", "joblib"):
        done = schedlab(*words, f"hydra/launcher={launcher}", f"hydra.sweep.dir={launcher}")
        assert done.code == 0, done.err
    assert Path("basic/comparison.md").read_text() == Path("joblib/comparison.md").read_text()


def test_compare_reads_any_folder(schedlab):
    schedlab("run", *QUICK, "hydra.run.dir=a")
    schedlab("run", *QUICK, "policy=chunked_prefill", "hydra.run.dir=b")
    done = schedlab("compare", "a", "b")
    assert done.code == 0
    assert "fcfs" in done.out and "chunked_prefill" in done.out and "identical in 2 runs" in done.out


# ---- processes of their own ----


def test_the_module_is_the_command(workspace):
    words = [sys.executable, "-m", "schedlab", "run", *QUICK, "engine=virtual", "model=llama3.1-8b"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "TTFT p99 ms" in done.stdout, done.stderr


def test_ctrl_c_is_one_line_and_leaves_a_readable_run(workspace, mine):
    words = [sys.executable, "-m", "schedlab", "run", "engine=stub", "wandb.mode=disabled", "plots=false"]
    process = subprocess.Popen(
        [*words, "policy=custom", "policy._target_=mine.Slow", "hydra.run.dir=cut"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=takes_ctrl_c,
    )
    for _ in range(600):
        if list(Path("cut").glob("steps.jsonl.*.partial")) and len(read_run(Path("cut")).steps["index"]) > 20:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    offered, *lines = [line for line in err.splitlines() if line]
    assert "254 requests" in offered and lines == ["interrupted: what was written can be read in cut"]
    run = read_run(Path("cut"))
    assert run.status == "interrupted" and len(run.steps["index"]) > 20


def test_a_run_says_first_what_it_is_offered(schedlab):
    done = schedlab("run", "engine=stub", "wandb.mode=disabled", "plots=false", "workload.max_requests=3")
    run = read_run(next(Path().rglob("result.json")).parent)
    span = max(run.requests["arrival_s"]) - min(run.requests["arrival_s"])
    assert done.err == f"fcfs-sample-0: 3 requests over {span:.4g} s, {2 / span:.4g} requests/s\n"
    assert {"arrival_lag_mean_us", "arrival_lag_max_us"} <= set(run.result["counters"])
