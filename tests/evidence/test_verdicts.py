"""Which runs are paired, and what is said of them: from made-up runs."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
from fake_runs import fake_run, offered, sweep

from schedlab.experiments.analysis import verdicts as judging
from schedlab.experiments.analysis.compare import compare, markdown, place_of, show, show_runs, write
from schedlab.experiments.analysis.statistics import t_quantile
from schedlab.experiments.analysis.table import Comparison
from schedlab.experiments.analysis.verdicts import Gate, Judging, Paired, better_when, compare_runs
from schedlab.experiments.run.offered import offered_hash
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import SUMMARY_KEYS

BASE = [1.0, 2.0, 4.0, 3.0, 5.0]


def times(factor: float, noise: float = 0.02) -> list[float]:
    rng = np.random.default_rng(0)
    return [value * factor * math.exp(rng.normal(0, noise)) for value in BASE]


def judge(directory: Path, **options):
    return compare_runs([directory], primary="ttft/mean", metrics=(), **options)


def only(verdicts):
    (answer,) = verdicts.answers
    return answer, answer.findings[0]


# ---- what is paired ----


def test_the_hash_is_of_what_matters(tmp_path):
    rows = offered(1)
    paths = [fake_run(tmp_path / "a", "p", rows, {})]
    renamed = [
        row | {"request_id": f"x{i}", "source_row": 9 + i, "content": {"row": 9 + i}} for i, row in enumerate(rows)
    ]
    paths.append(fake_run(tmp_path / "b", "p", renamed, {}))
    paths.append(fake_run(tmp_path / "c", "p", [row | {"slo": {"name": "other"}} for row in rows], {}))
    later = [*rows, rows[0] | {"request_id": "t", "after": "1-0", "arrival_ns": 77, "think_ns": 5}]
    paths.append(fake_run(tmp_path / "d", "p", later, {}))
    assert len({offered_hash(path) for path in paths}) == 1
    for name, change in {"e": {"arrival_ns": 2}, "f": {"prompt_tokens": 99}, "g": {"priority": 3}}.items():
        assert offered_hash(fake_run(tmp_path / name, "p", [rows[0] | change, *rows[1:]], {})) != offered_hash(paths[0])


def test_what_prompts_share_counts_and_its_names_do_not(tmp_path):
    def with_ids(name: str, *ids: list[int]) -> str:
        rows = [row | {"content": {"ids": own, "width": 16}} for row, own in zip(offered(0, 2), ids, strict=True)]
        return offered_hash(fake_run(tmp_path / name, "p", rows, {}))

    assert with_ids("a", [1, 2], [1, 3]) == with_ids("b", [7, 5], [7, 6]) != with_ids("c", [1, 2], [4, 3])


def test_replicates_are_paired_whatever_their_order(tmp_path):
    values = times(1.1)
    sweep(tmp_path, {"fcfs": BASE})
    for job, seed in enumerate([3, 0, 4, 1, 2]):
        fake_run(tmp_path / f"other{job}", "other", offered(seed), {"ttft/mean": values[seed]}, seed=99)
    answer, found = only(judge(tmp_path))
    differences = np.log(np.array(values) / np.array(BASE))
    half = t_quantile(0.975, 4) * differences.std(ddof=1) / math.sqrt(5)
    assert answer.pairs == found.pairs == 5 and found.verdict == "worse" and found.method == "t"
    assert found.change == pytest.approx(math.expm1(differences.mean()))
    assert (found.low, found.high) == pytest.approx(
        (math.expm1(differences.mean() - half), math.expm1(differences.mean() + half))
    )
    assert found.p == found.p_holm <= 0.05


def test_sixteen_pairs_are_bootstrapped(tmp_path):
    rng = np.random.default_rng(0)
    base = rng.uniform(1, 5, 16)
    sweep(tmp_path, {"fcfs": base.tolist(), "other": (base * np.exp(rng.normal(0.2, 0.1, 16))).tolist()})
    _, found = only(judge(tmp_path))
    assert found.method == "bootstrap-t" and found.verdict == "worse" and found.p < 0.01


def test_copies_are_no_replicates(tmp_path):
    for policy, value in (("fcfs", 1.0), ("other", 1.3)):
        for seed in range(5):
            fake_run(tmp_path / f"{policy}{seed}", policy, offered(0), {"ttft/mean": value}, seed=seed)
    verdicts = judge(tmp_path, gates=["ttft/mean +5%"])
    answer, found = only(verdicts)
    assert answer.refused and "copies" in answer.refused
    assert found.low is None and found.p is None and found.verdict == "not judged"
    assert not verdicts.regressed and "copies" in verdicts.gates[0].reason


def test_a_copied_directory_counts_once(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.1)})
    alone = only(judge(tmp_path))[1]
    shutil.copytree(tmp_path / "other0", tmp_path / "other0again")
    answer, found = only(judge(tmp_path))
    assert found == alone and "other: 1 replicates were run more than once" in answer.notes[0]


def test_one_pair_has_no_interval(tmp_path):
    sweep(tmp_path, {"fcfs": [1.0], "other": [2.0]})
    answer, found = only(judge(tmp_path))
    assert "one pair" in answer.refused and found.change == pytest.approx(1.0)


def test_runs_without_a_partner_are_told(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": BASE[:3]})
    answer, _ = only(judge(tmp_path))
    assert answer.pairs == 3 and answer.notes == ("fcfs: 2 replicates have no partner",)


# ---- who is compared with whom ----


def test_the_baseline_is_named_by_policy_or_variant(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(0.8)})
    assert [a.name for a in judge(tmp_path).answers] == ["other against fcfs"]
    assert [a.name for a in judge(tmp_path, baseline="other").answers] == ["fcfs against other"]
    with pytest.raises(ConfigError, match=r"--baseline nobody is none of fcfs, other"):
        judge(tmp_path, baseline="nobody")


def test_knobs_are_variants_and_rates_are_conditions(tmp_path):
    for rate in ("4", "8"):
        for chunk in ("256", "512"):
            for seed in range(3):
                overrides = {"policy.chunk_size": chunk, "workload.target_rate": rate}
                fake_run(
                    tmp_path / f"{rate}{chunk}{seed}", "chunked", offered(seed + 10 * int(rate)),
                    {"ttft/mean": 1.0 + seed}, overrides=overrides, knobs={"chunk_size": int(chunk)},
                )  # fmt: skip
    names = [a.name for a in judge(tmp_path).answers]
    assert len(names) == 2 and all("policy.chunk_size=512" in name for name in names)
    assert "workload.target_rate=4" in names[0] and "workload.target_rate=8" in names[1]


def test_an_ambiguous_baseline_is_refused(tmp_path):
    sweep(tmp_path / "a", {"fcfs": BASE})
    for chunk in (256, 512):
        sweep(tmp_path / f"b{chunk}", {"chunked": BASE}, knobs={"chunk_size": chunk})
    with pytest.raises(ConfigError, match=r"chunked is any of chunked policy\.chunk_size=256, chunked pol"):
        judge(tmp_path, baseline="chunked")
    verdicts = judge(tmp_path, baseline="chunked policy.chunk_size=256")
    assert [a.variant for a in verdicts.answers] == ["fcfs", "chunked policy.chunk_size=512"]


def test_two_directories_of_the_same_variants_are_contrasted(tmp_path):
    before = sweep(tmp_path / "before", {"fcfs": BASE, "other": BASE})
    after = sweep(tmp_path / "after", {"fcfs": BASE, "other": times(1.2)})
    verdicts = compare_runs([before, after], primary="ttft/mean", metrics=(), gates=["ttft/mean +5%"])
    assert [(a.variant, a.baseline, a.condition) for a in verdicts.answers] == [
        (str(after), str(before), "fcfs"), (str(after), str(before), "other"),
    ]  # fmt: skip
    assert [a.findings[0].verdict for a in verdicts.answers] == ["equal", "worse"]
    assert [gate.regressed for gate in verdicts.gates] == [False, True]


# ---- what is said ----


def test_directions():
    assert (
        better_when("ttft/p99") == -1 and better_when("slo/attainment") == 1 and better_when("batch/tokens_mean") == 0
    )
    assert {better_when(key) for key in SUMMARY_KEYS} == {-1, 0, 1}


@pytest.mark.parametrize(
    ("metric", "factor", "verdict"),
    [
        ("ttft/mean", 0.8, "better"), ("ttft/mean", 1.2, "worse"), ("goodput/requests_per_s", 1.2, "better"),
        ("goodput/requests_per_s", 0.8, "worse"), ("batch/tokens_mean", 1.2, "higher"), ("ttft/mean", 1.0, "equal"),
    ],
)  # fmt: skip
def test_a_verdict_follows_the_metric_s_direction(tmp_path, metric, factor, verdict):
    noise = 0.0 if factor == 1.0 else 0.02
    sweep(tmp_path, {"fcfs": BASE, "other": times(factor, noise)}, metric)
    (answer,) = compare_runs([tmp_path], primary=metric, metrics=()).answers
    assert answer.findings[0].verdict == verdict


def test_inconclusive_says_how_many_would_do(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.02, noise=0.1)})
    _, found = only(judge(tmp_path))
    assert found.verdict == "inconclusive" and found.needed is not None and found.needed > 5
    assert f"about {found.needed}" in markdown(judge(tmp_path))


def test_what_may_be_zero_is_compared_by_differences(tmp_path):
    sweep(tmp_path, {"fcfs": [0.0, 1.0, 2.0, 0.0, 1.0], "other": [3.0, 4.5, 5.0, 3.0, 4.0]}, "preemptions/recompute")
    (answer,) = compare_runs([tmp_path], primary="preemptions/recompute", metrics=()).answers
    found = answer.findings[0]
    assert found.scale == "difference" and found.change == pytest.approx(3.1) and found.verdict == "worse"


def test_the_family_is_corrected_and_the_primary_metric_is_not(tmp_path):
    rng = np.random.default_rng(5)
    metrics = ["ttft/mean", "ttft/p50", "ttft/p99", "tpot/mean", "e2e/mean"]
    for seed in range(6):
        base = dict.fromkeys(metrics, 1.0 + seed)
        fake_run(tmp_path / f"a{seed}", "fcfs", offered(seed), base, seed=seed)
        other = {metric: value * math.exp(rng.normal(0.06, 0.05)) for metric, value in base.items()}
        fake_run(tmp_path / f"b{seed}", "other", offered(seed), other, seed=seed)
    (answer,) = compare_runs([tmp_path], primary="ttft/mean", metrics=metrics).answers
    primary, *family = answer.findings
    assert primary.primary and primary.level == 0.95 and primary.p_holm == primary.p
    for found in family:
        assert found.level > 0.95 - 1e-12 and found.low <= found.low_alone and found.p_holm >= found.p
    assert max(found.level for found in family) == pytest.approx(1 - 0.05 / 4)


@pytest.mark.parametrize("pairs", [4, 8, 16])
def test_a_verdict_and_the_p_beside_it_say_the_same(pairs):
    """Families of metrics that share their noise, some without an effect, some with one of a few deviations."""
    rng = np.random.default_rng(pairs)
    metrics = [key for key in SUMMARY_KEYS if better_when(key)][:8]
    for _ in range(20):
        shared, samples = rng.normal(size=pairs), []
        for place, metric in enumerate(metrics):
            difference = 0.1 * (rng.normal(size=pairs) + shared + rng.choice([0, 0, 1, 3]) * (place % 2))
            samples.append(Paired(metric, tuple(np.exp(difference)), (1.0,) * pairs))
        for found in judging.judge(samples, Judging(metrics[0], effect=0.0)):
            assert (found.verdict in ("better", "worse")) == (found.p_holm <= 0.05) and found.p_holm >= found.p


def test_what_is_known_and_smaller_than_what_matters_is_no_verdict(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.001, noise=0.0001)})
    verdicts = judge(tmp_path, gates=["ttft/mean +0%"])
    _, found = only(verdicts)
    assert found.verdict == "small" and found.p_holm < 0.05 and not verdicts.regressed
    assert "judged at 1.0%" in verdicts.gates[0].reason
    assert "below 1.0%" in markdown(verdicts)
    asked = judge(tmp_path, gates=["ttft/mean +0%"], effect=0.0005)
    assert only(asked)[1].verdict == "worse" and asked.regressed


def test_bounds_within_what_matters_are_an_answer_too(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.0, noise=0.002)})
    _, found = only(judge(tmp_path))
    assert found.low < 0 < found.high and found.verdict == "small" and found.needed is None


def test_nothing_matters_that_the_clock_cannot_tell(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.05, noise=0.001)})
    assert only(judge(tmp_path))[1].verdict == "worse"
    for path in tmp_path.rglob("manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"cost": {"held_out_error": 0.08}}))
    answer, found = only(judge(tmp_path))
    assert found.verdict == "small" and answer.effect == 0.08 and "8.0%" in answer.notes[0]


def test_a_difference_matters_by_the_larger_side():
    sample = Paired("preemptions/recompute", (0.0, 400.0), (0.0, 404.0))
    assert sample.scale == "difference" and sample.mattering(0.01) == pytest.approx(2.02)


# ---- gates ----


def test_a_gate_fires_only_on_a_confident_regression_beyond_its_margin(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.08, noise=0.01)})
    assert judge(tmp_path, gates=["ttft/mean +5%"]).regressed
    assert not judge(tmp_path, gates=["ttft/mean +8%"]).regressed
    sweep(tmp_path / "noisy", {"fcfs": BASE, "other": times(1.3, noise=0.6)})
    assert not judge(tmp_path / "noisy", gates=["ttft/mean +5%"]).regressed


def test_a_gate_on_what_should_be_high(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(0.9, noise=0.01)}, "goodput/requests_per_s")
    assert compare_runs([tmp_path], gates=["goodput/requests_per_s -5%"]).regressed
    assert not compare_runs([tmp_path], gates=["goodput/requests_per_s -12%"]).regressed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft/p99", "expected a metric and a change"), ("ttft/p98 +5%", "no such metric"),
        ("ttft/p99 -5%", r"ttft/p99 \+5%"), ("goodput/requests_per_s +5%", "goodput/requests_per_s -5%"),
        ("batch/tokens_mean +5%", "neither"), ("goodput/requests_per_s -100%", "nothing falls by"),
    ],
)  # fmt: skip
def test_gates_that_cannot_be_meant(text, said):
    with pytest.raises(ConfigError, match=said):
        Gate.parse(text)


def test_many_gates_are_wrong_no_more_often_than_one(tmp_path):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.08)})
    levels = {gate.level for gate in judge(tmp_path, gates=["ttft/mean +5%", "tpot/mean +5%"]).gates}
    assert levels == {0.975}


# ---- how it is shown ----


def test_files_and_terminal_say_the_same(tmp_path, capsys):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.2), "third": times(0.9)})
    verdicts = judge(tmp_path, gates=["ttft/mean +5%"])
    write(verdicts, tmp_path)
    told = {**verdicts.as_json(), "bounds": {}}
    assert json.loads((tmp_path / "verdicts.json").read_text()) == json.loads(json.dumps(told))
    show(verdicts)
    said = capsys.readouterr().out
    text = (tmp_path / "verdicts.md").read_text()
    for words in (
        "other against fcfs",
        "third against fcfs",
        "changes below 1 % do not matter",
        "gate ttft/mean +5%",
    ):
        assert words in said and words in text
    assert "mean of replicates" in said  # 15 runs are too many to be shown one by one
    assert place_of([tmp_path]) == tmp_path and place_of([tmp_path / "fcfs0"]) is None


def test_what_is_no_metric_is_refused(tmp_path):
    sweep(tmp_path, {"fcfs": BASE})
    with pytest.raises(ConfigError, match="--primary latency: no such metric"):
        compare_runs([tmp_path], primary="latency")
    assert compare_runs([tmp_path]).notes == ("nothing to compare: the runs are of one variant",)


def test_the_table_of_a_sweep_averages_replicates_and_leaves_out_no_override(tmp_path, capsys):
    key = "workload.a_key_of_a_third_party_that_is_longer_than_any_column.would_be"
    for rate in ("4", "8"):
        for policy in ("fcfs", "other"):
            for seed, value in enumerate((1.0, 2.0, 3.0)):
                where = tmp_path / f"{policy}{rate}{seed}"
                fake_run(where, policy, offered(seed), {"ttft/mean": value}, overrides={key: rate}, seed=seed)
    comparison = Comparison.read([tmp_path])
    show_runs(comparison)
    said = capsys.readouterr().out
    half = t_quantile(0.975, 2) / math.sqrt(3)
    assert f"2,000.0 ±{half * 1e3:,.1f}" in said and "…" not in said and "replicates" in said
    assert "would_be=4" in said and "would_be=8" in said  # the end of a name that is broken over lines


def test_runs_as_csv(tmp_path, capsys):
    sweep(tmp_path, {"fcfs": BASE, "other": times(1.2)})
    compare([tmp_path], form="csv", out=tmp_path, wandb_mode="disabled", bounds=False, options={})
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 10 and {row["policy"] for row in rows} == {"fcfs", "other"}
    assert sorted(float(row["ttft/mean"]) for row in rows if row["policy"] == "fcfs") == sorted(BASE)
    Comparison.read([tmp_path]).write(tmp_path)
    assert (tmp_path / "comparison.csv").read_text() == Comparison.read([tmp_path]).csv()
