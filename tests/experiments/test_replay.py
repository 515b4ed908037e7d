"""Runs executed again from their own folders, as they were and otherwise; and where two of them part."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedlab
from schedlab.experiments.analysis import replay as replaying
from schedlab.experiments.analysis.decisions import batches, parting
from schedlab.experiments.analysis.diff import Walk, changes, difference
from schedlab.experiments.analysis.past_run import PastRun
from schedlab.experiments.run.offered import offered_hash
from schedlab.framework.errors import ConfigError
from schedlab.framework.results import packed
from schedlab.framework.results.reader import read_run
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.populations import CommonWork

SWAP = "policy.preempt_mode=swap"
AT_ONCE = "workload.time_scale=0.00001"  # too many for the memory on a machine of any speed
TIGHT = (
    "model=tiny", "workload.max_requests=32", "workload.time_scale=0.05", "engine.num_blocks=64",
    "engine.max_num_seqs=8", "engine.max_num_batched_tokens=256", "plots=false", "progress=false",
    "wandb.mode=disabled", "hydra.sweep.dir=sweep",
)  # fmt: skip


def runs_below(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("result.json"))


@pytest.mark.parametrize(
    ("engine", "policies", "more"),
    [
        ("virtual", "decode_priority,prefix_reuse", ("hardware=cpu",)),
        ("virtual", "fcfs,chunked_prefill", ("hardware=cpu", "engine.swap_space_gib=0.01", SWAP)),
        ("stub", "chunked_prefill,prefix_reuse", ("engine.swap_space_gib=0.0001", SWAP)),
        ("cpu", "fcfs,decode_priority", ("engine.swap_space_gib=0.01", SWAP, "clock=busy", AT_ONCE)),
        ("cpu", "prefix_reuse", ("observed_at=client", "clock=wall", AT_ONCE)),
    ],
    ids=["virtual", "virtual-swap", "stub-swap", "cpu-swap", "cpu-wall-client"],
)
def test_a_run_decides_the_same_from_its_own_folder(schedlab, workspace, engine, policies, more):
    made = schedlab("run", "-m", f"policy={policies}", f"engine={engine}", *TIGHT, *more)
    assert made.code == 0, made.err
    runs = runs_below(workspace / "sweep")
    assert len(runs) == len(policies.split(","))
    preempted = 0
    for run in runs:
        done = schedlab("replay", str(run))
        assert done.code == 0 and "the same decisions" in done.out, done.out + done.err
        assert ("every token at the same time" in done.out) == (engine != "cpu")
        preempted += sum(read_run(run).summary[key] for key in ("preemptions/recompute", "preemptions/swap"))
    assert preempted


def test_chains_of_a_measured_run_are_decided_again(schedlab, workspace):
    """A row a chain, a stamp a row: replay and diff need no cost model."""
    words = ("engine=cpu", "model=tiny", "workload=closed_loop", "workload.num_requests=12", "workload.users=3",
             "engine.max_chained_steps=2", "plots=false", "progress=false", "wandb.mode=disabled")  # fmt: skip
    for name, policy in (("a", "fcfs"), ("b", "chunked_prefill")):
        done = schedlab("run", f"policy={policy}", *words, f"hydra.run.dir={name}")
        assert done.code == 0, done.err
    assert read_run(workspace / "a").steps["repeat"].max() == 2
    done = schedlab("replay", "a")
    assert done.code == 0 and "the same decisions" in done.out, done.out + done.err
    done = schedlab("diff", "a", "b")
    assert done.code == 0, done.out + done.err


@pytest.mark.parametrize("chained", [2, 5])
def test_chains_of_a_modelled_run_from_python_are_decided_again(chained, tmp_path):
    engine = schedlab.engines.virtual("llama3.1-8b", "h100", num_blocks=700, max_chained_steps=chained)
    schedlab.run(ChunkedPrefill(), CommonWork(num_requests=20), engine, out=tmp_path)
    assert (read_run(tmp_path).steps["repeat"] > chained).any()
    assert replaying.replay(tmp_path).equal


def test_a_run_needs_nothing_but_its_folder(schedlab, workspace):
    """Neither the trace nor the place where it ran."""
    trace = workspace / "trace.csv"
    rows = [f"{0.01 * i},{200 + i},{10 + i % 7}" for i in range(30)]
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n")
    words = [word for word in TIGHT if not word.startswith("workload.")]
    done = schedlab("run", "-m", "policy=fcfs", "engine=virtual", "workload=vidur", f"workload.path={trace}", *words)
    assert done.code == 0, done.err
    trace.unlink()
    moved = workspace / "elsewhere"
    shutil.move(workspace / "sweep" / "0", moved)
    assert schedlab("replay", str(moved)).code == 0


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two policies on the same requests, run from Python."""
    for name, policy in (("a", FCFS()), ("b", ChunkedPrefill(256))):
        engine = schedlab.engines.virtual("llama3.1-8b", "h100", num_blocks=700)
        schedlab.run(policy, CommonWork(num_requests=60), engine, seed=1, out=tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def test_a_run_from_python_is_decided_again(pair):
    """Its engine is not in the files; its times are, jumps included."""
    for path in pair:
        assert (read_run(path).steps["repeat"] > 1).any()
        assert replaying.replay(path).equal


def test_other_requests_give_other_decisions(pair, schedlab):
    path = packed.find(pair[0], "workload.jsonl")
    rows = [json.loads(line) for line in packed.opened(path)]
    rows[7]["prompt_tokens"] += 1
    path.unlink()
    with gzip.open(pair[0] / "workload.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    done = replaying.replay(pair[0])
    assert not done.equal and done.first is not None
    steps = batches(read_run(pair[0]).decisions)
    logged = next(index for (_, grants, *_), index, _ in steps if any(request == "7" for request, _ in grants))
    assert done.first == logged
    told = schedlab("replay", str(pair[0]))
    assert told.code == 1 and f"other decisions from step {logged} on" in told.out


def test_another_policy_on_the_same_arrivals(schedlab, workspace):
    schedlab("run", "-m", "policy=fcfs,chunked_prefill", "engine=virtual", "hardware=cpu", *TIGHT, SWAP)
    fcfs, chunked = runs_below(workspace / "sweep")
    done = schedlab("replay", str(fcfs), "--policy", "chunked_prefill", "--out", "other", SWAP)
    assert done.code == 0 and "arrivals differ" not in done.out, done.out + done.err
    assert read_run(workspace / "other").digest == read_run(chunked).digest
    assert offered_hash(workspace / "other") == offered_hash(fcfs)
    assert schedlab("replay", str(workspace / "other")).code == 0
    smaller = schedlab("replay", str(fcfs), "--policy", "chunked_prefill", "policy.chunk_size=16")
    assert smaller.code == 0 and "chunked_prefill" in smaller.out
    assert schedlab("replay", str(fcfs), "--policy", "nobody").code == 2
    assert schedlab("replay", str(fcfs), "policy.chunk_size=16").code == 2


def test_what_cannot_be_executed_again_is_told(pair, tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        replaying.replay(tmp_path)
    with pytest.raises(ConfigError, match="run from Python"):
        replaying.counterfactual(pair[0], FCFS(), tmp_path / "c")
    (packed.find(pair[0], "workload.jsonl")).unlink()
    with pytest.raises(ConfigError, match="executed again from what it was offered"):
        replaying.replay(pair[0])


# ---- where two runs part ----

BATCHES = ("all", "x", "y", "idle")


def log(rows: list[tuple[str, int]]) -> dict:
    """A decision log of these batches, so many times each; equal decode-only neighbours are one row, as logged."""
    merged: list[tuple[str, int]] = []
    for batch, repeat in rows:
        if merged and merged[-1][0] == batch == "all":
            merged[-1] = (batch, merged[-1][1] + repeat)
        else:
            merged += [(batch, repeat)] if batch == "all" else [(batch, 1)] * repeat
    repeats = np.array([repeat for _, repeat in merged], dtype=np.int64)
    return {
        "index": np.cumsum(repeats) - repeats, "repeat": repeats, "preempted": [[] for _ in merged],
        "grants": [[[batch, 3]] if batch in "xy" else [] for batch, _ in merged],
        "decodes": ["all" if batch == "all" else [] for batch, _ in merged],
        "decodes_at": np.zeros(len(merged), dtype=np.int64), "rejected": [[] for _ in merged],
    }  # fmt: skip


def stepwise(columns: dict) -> list[tuple]:
    return [(batch, index + k) for batch, index, repeat in batches(columns) for k in range(repeat)]


rows = st.lists(st.tuples(st.sampled_from(BATCHES), st.integers(1, 3)), max_size=6)


@given(rows, rows, rows)
def test_logs_part_where_their_steps_do(common, a, b):
    one, two = log(common + a), log(common + b)
    steps = stepwise(one), stepwise(two)
    expected = None
    for at in range(max(map(len, steps))):
        x, y = (side[at] if at < len(side) else None for side in steps)
        if x is None or y is None or x[0] != y[0]:
            ends = [side[-1][1] + 1 if side else 0 for side in steps]
            expected = (ends[0] if x is None else x[1], ends[1] if y is None else y[1])
            break
    assert parting(one, two) == expected


def test_both_decisions_are_shown_as_they_were_logged(pair):
    found = difference(*pair)
    assert found.at is not None and found.same_offered
    for path, index, seen in zip(pair, found.at, found.seen, strict=True):
        logged = read_run(path).decisions
        row = int(np.searchsorted(logged["index"], index, "right")) - 1
        assert seen.index == index and seen.now_s * 1e9 == pytest.approx(logged["now_ns"][row])
        assert [list(grant) for grant in seen.grants] == logged["grants"][row]
        assert [list(refusal) for refusal in seen.refusals] == logged["refusals"][row]
        candidates = {one.request_id: one.tokens for one in (*seen.waiting, *seen.prefilling)}
        assert all(0 < tokens <= candidates[request] for request, tokens in seen.grants)
        decodes = len(seen.decoding) if seen.decodes == "all" else len(seen.decodes)
        spent = sum(tokens for _, tokens in seen.grants) + decodes
        assert seen.before.token_budget - seen.after.token_budget == spent
    assert found.seen[0].now_s == found.seen[1].now_s and found.seen[0].waiting == found.seen[1].waiting


def test_a_walk_sees_every_step_of_the_log(pair):
    """Held steps too, of which the log of a modelled run has one row for many."""
    walk, logged = Walk(PastRun(pair[1])), read_run(pair[1])
    steps = {index: batch for batch, index in stepwise(logged.decisions)}
    for index in sorted(steps)[::7]:
        seen = walk.to(index)
        preempted, grants, decodes, *_ = steps[index]
        assert [list(grant) for grant in seen.grants] == grants and len(seen.preempted) == len(preempted)
        assert (seen.decodes == "all") == (decodes == "all")
    assert walk.to(10**9) is None


def test_requests_are_worst_first(pair):
    a, b = (read_run(path).requests for path in pair)
    found = changes(a, b)
    worse = [change.worse_s for change in found]
    assert worse == sorted(worse, reverse=True) and len(found) == 60
    ended = [dict(zip(table["request_id"], table["finished_s"], strict=True)) for table in (a, b)]
    for change in found:
        assert change.worse_s == pytest.approx(ended[1][change.request_id] - ended[0][change.request_id])


def test_the_command_shows_and_walks_on(pair, schedlab, monkeypatch):
    words = iter(["", "3", "what", "q"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(words))
    done = schedlab("diff", str(pair[0]), str(pair[1]), "--step", "--requests", "2")
    assert done.code == 0 and next(words, None) is None
    at = difference(*pair).at[0]
    for step in (at, at + 1, at + 4):
        assert f"{pair[0]}: step {step} at" in done.out
    assert "expected Enter, a number of steps, or q" in done.out and "60 requests finished by both" in done.out
    told = json.loads(schedlab("diff", str(pair[0]), str(pair[1]), "--format", "json").out)
    assert told["at"][0] == at and len(told["requests"]) == 60
    same = schedlab("diff", str(pair[0]), str(pair[0]))
    assert "the runs take the same decisions" in same.out
