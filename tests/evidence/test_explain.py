"""`schedlab explain` on runs with a planted cause: it names the cause first, and its suggestion does what it says."""

from __future__ import annotations

import json
import re

import pytest
from planted import PLANTED, balanced, run_planted

from schedlab.experiments.analysis.causes import Cause, Suggestion
from schedlab.experiments.analysis.explain import ERROR, Explanation, Named, TriedChange, cause_lines, explain, lines
from schedlab.experiments.analysis.rerun import Changes, rerun
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.reader import read_run

DRAWS = 20
FEW = 2
"""Draws of each kind that are not marked `full`."""


def draws(first: int, last: int):
    return [(name, seed) for name in PLANTED for seed in range(first, last)]


def named_first(explanation: Explanation) -> str | None:
    return explanation.named[0].cause.name if explanation.named else None


def check(name: str, seed: int, directory) -> None:
    found = explain(run_planted(PLANTED[name], seed, directory))
    first = found.named[0]
    assert first.cause.name == name
    assert first.as_predicted, (first.trial, first.suggestion)
    assert first.trial.after < (1 - ERROR) * first.trial.before


@pytest.mark.parametrize(("name", "seed"), draws(0, FEW))
def test_the_planted_cause_is_named_first_and_its_suggestion_does_what_it_says(name, seed, tmp_path):
    check(name, seed, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", list(PLANTED))
def test_of_20_draws_18_and_more_are_explained(name, tmp_path):
    explained = 0
    for seed in range(DRAWS):
        try:
            check(name, seed, tmp_path / str(seed))
            explained += 1
        except AssertionError as error:
            print(seed, error)
    assert explained >= 18


@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(s, marks=pytest.mark.full) for s in range(FEW, DRAWS))])
def test_a_balanced_run_has_no_cause(seed, tmp_path):
    found = explain(run_planted(balanced, seed, tmp_path))
    assert found.named == []
    assert "No cause stands out" in lines(found)[-1]


def test_a_run_repeats_itself_from_its_folder(tmp_path):
    run = read_run(run_planted(PLANTED["preemption"], 1, tmp_path))
    again = rerun(tmp_path, run.manifest)
    assert again.digest == run.digest
    assert again.summary == run.summary
    half = rerun(tmp_path, run.manifest, Changes(replicas=2))
    assert half.summary["requests/offered"] == -(-run.summary["requests/offered"] // 2)


def test_conversations_as_a_client_sees_them_repeat_too(tmp_path):
    """Turns that wait for the one before, hits, measured stages; of two replicas each session has one."""

    def conversations(draw):
        return {"observed_at.preparation.constant_s": 0.02, "observed_at.delivery.jitter_s": 0.01}

    words = ("workload=conversations", "workload.num_sessions=40", "policy=prefix_reuse", "observed_at=client")
    run = read_run(run_planted(conversations, 0, tmp_path, *words))
    again = rerun(tmp_path, run.manifest)
    assert run.summary["prefix/hit_rate"] > 0 and again.digest == run.digest and again.summary == run.summary
    half = rerun(tmp_path, run.manifest, Changes(replicas=2)).requests
    sessions = [set(half["session"]), set(run.requests["session"])]
    assert sessions[0] < sessions[1] and abs(2 * len(sessions[0]) - len(sessions[1])) <= 1


def test_words_and_json_say_the_same(tmp_path):
    found = explain(run_planted(PLANTED["prefill interference"], 0, tmp_path), tried=False)
    said, data = "\n".join(lines(found)), json.loads(json.dumps(found.as_json()))
    summary = read_run(tmp_path).summary
    assert sum(data["ttft_s"].values()) == pytest.approx(summary["ttft/mean"])
    assert sum(data["tpot_s"].values()) == pytest.approx(summary["tpot/mean"])
    for metric in ("ttft", "tpot"):
        assert re.search(rf"together +{summary[f'{metric}/mean'] * 1e3:,.2f} ms  100.0%", said)
        assert sum(data[f"slowest_{metric}_s"].values()) >= summary[f"{metric}/p99"] * (1 - 1e-9)
    assert data["causes"][0]["trial"] is None and "Predicted: itl/p99" in said


def test_a_measured_window_is_that_of_the_summary(tmp_path):
    def windowed(draw):
        return {"measure.start_s": 2.0, "measure.stop_s": 6.0, "workload.num_requests": 80}

    found = explain(run_planted(windowed, 0, tmp_path), tried=False)
    summary = read_run(tmp_path).summary
    assert sum(found.ttft.values()) == pytest.approx(summary["ttft/mean"])
    assert sum(found.tpot.values()) == pytest.approx(summary["tpot/mean"])


def test_a_run_without_logs_is_refused_by_name(tmp_path):
    import made_up

    made_up.run(tmp_path, record="summary")
    with pytest.raises(ConfigError, match="recorded with record=summary"):
        explain(tmp_path)
    made_up.run(tmp_path, requests=0)
    with pytest.raises(ConfigError, match="nothing to explain"):
        explain(tmp_path)


def test_a_run_from_python_is_explained_but_not_repeated(tmp_path):
    import schedlab
    from schedlab.policies.fcfs import FCFS
    from schedlab.workloads.populations import CommonWork

    engine = schedlab.engines.virtual("llama3.1-8b", "h100", max_model_len=4096)
    schedlab.run(FCFS(), CommonWork(num_requests=20), engine, out=tmp_path)
    found = explain(tmp_path)
    assert named_first(found) == "weight movement" and found.named[0].trial is None
    assert found.as_json()["note"] == lines(found)[-1] and "made from Python" in lines(found)[-1]
    with pytest.raises(ConfigError, match="does not say how to build it"):
        rerun(tmp_path, read_run(tmp_path).manifest)


def test_the_time_of_the_steps_is_what_their_parts_take(tmp_path):
    """Overhead counts in every step, not only in those that it takes most of: against the host's time of each step."""

    def work(draw):
        return {"workload.num_requests": 30, "workload.arrivals.rate": 4.0}

    shares = {}
    for name in ("true", "false"):
        run = read_run(run_planted(work, 0, tmp_path / name, f"engine.fast_forward={name}"))
        shares[name] = explain(tmp_path / name, tried=False).time
    steps, rates = run.steps, Coefficients(**run.manifest["cost"]["explained"])
    prefills, decodes = steps["prefill_requests"], steps["decode_requests"]
    tokens = steps["prefill_tokens"] + steps["decode_tokens"]
    host = rates.step_ns + rates.request_ns * (prefills + decodes) + rates.matrix_ns * (tokens > 1)
    host += (rates.prefill_step_ns + rates.prefill_ns * prefills) * (prefills > 0) + rates.decode_step_ns * (
        decodes > 0
    )
    assert shares["false"]["overhead"] == pytest.approx(host.sum() / steps["duration_ns"].sum(), abs=1e-4)
    assert shares["true"] == pytest.approx(shares["false"], abs=1e-6)
    assert run.summary["bound/overhead"] == 0 and shares["true"]["overhead"] > 0.05
    assert f"{shares['true']['overhead']:.0%} overhead" in "\n".join(lines(explain(tmp_path / "true", tried=False)))


def test_a_measured_run_on_the_cpu_is_tried_on_the_virtual_clock(tmp_path):
    def queue(draw):
        return {"workload.num_requests": 60, "workload.arrivals.rate": 400.0, "engine.max_num_seqs": 4}

    words = ("engine=cpu", "model=tiny", "workload.lengths.prompt=[8,64]", "workload.lengths.output=[4,16]")
    found = explain(run_planted(queue, 0, tmp_path, *words))
    assert named_first(found) == "queueing"
    assert all(item.trial and item.trial.after is not None for item in found.named if item.suggestion)


@pytest.mark.parametrize(
    ("before", "predicted", "after", "holds", "said"),
    [
        (0.100, 0.095, 0.095, None, "wider than the effect"),
        (0.152, 0.016, 0.028, True, "the direction, and no more"),
        (0.100, 0.060, 0.062, True, ", as predicted (60.0 ± 10.0 ms)."),
        (0.100, 0.060, 0.090, False, "not as predicted"),
    ],
)
def test_a_prediction_says_what_its_error_lets_it_say(before, predicted, after, holds, said):
    trial = TriedChange(before, after)
    suggestion = Suggestion("this", Changes(), "ttft/mean", predicted)
    cause = Cause("queueing", 0.9, 1.0, "it waits", lambda view: suggestion)
    assert trial.holds(predicted) is holds
    assert said in cause_lines(Named(cause, suggestion, trial))[-1]
