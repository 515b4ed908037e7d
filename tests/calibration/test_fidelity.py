"""What a study runs, compares and states; its parts on planted figures, and all of it on a small real engine."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests
from conftest import SMALL

from schedlab.experiments import engines
from schedlab.experiments.analysis.decisions import DecidedAgain
from schedlab.experiments.studies import fidelity_result, measuring
from schedlab.experiments.studies.calibrate import CalibrationOptions as Calibration
from schedlab.experiments.studies.fidelity import Scaled, Setting, capacities, outcome, study
from schedlab.experiments.studies.fidelity_result import METRICS, Compared, FidelityStudy, PolicyOutcome
from schedlab.experiments.studies.measuring import Between
from schedlab.framework.admission import TokenBucket
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import FitError, Profile
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline
from schedlab.framework.errors import ConfigError
from schedlab.framework.model.config import ModelConfig
from schedlab.policies.chunked_prefill import ChunkedPrefill
from schedlab.policies.fcfs import FCFS
from schedlab.workloads.arrivals import Poisson
from schedlab.workloads.lengths import Uniform
from schedlab.workloads.populations import Synthetic

GRID = Calibration(
    passes=2, budget_s=20.0, max_batch=4, max_context=96, max_prefill=64, max_cell_tokens=256, out=None
)  # fmt: skip
AGREED = DecidedAgain("a", "a", None)
WORK = Synthetic(num_requests=12, arrivals=Poisson(20.0), lengths=Uniform(prompt=(20, 90), output=(3, 10)))


@pytest.fixture(scope="module")
def setting(shape: ModelConfig, cpu: Hardware) -> Setting:
    return Setting(
        policies={"fcfs": FCFS, "chunked": lambda: ChunkedPrefill(32)},
        workload=WORK,
        make_engine=lambda: engines.cpu(SMALL, num_blocks=128, max_model_len=512, max_num_batched_tokens=256),
        roofline=Roofline(shape, "fp32"),
        hardware=cpu,
    )


@pytest.fixture(scope="module")
def found(setting: Setting) -> FidelityStudy:
    return study(setting, (0.5, 2.0), 2, GRID, say=lambda line: None)


def test_every_policy_at_every_load(found: FidelityStudy) -> None:
    assert [(o.load, o.policy) for o in found.outcomes] == [
        (0.5, "fcfs"), (0.5, "chunked"), (2.0, "fcfs"), (2.0, "chunked"),
    ]  # fmt: skip
    for case in found.outcomes:
        assert len(case.real) == len(case.agreements) == 2
        assert all(summary["requests/finished"] == 12 for summary in (*case.real, case.virtual))
        assert [*case.compared] == [*METRICS]
        assert all(agreement.equal for agreement in case.agreements)


def test_loads_are_shares_of_the_capacity(found: FidelityStudy) -> None:
    """At the time scale of load 2 half of what is asked for can be served; at 0.5 nearly all of the time is left."""
    low, high = found.outcomes[0], found.outcomes[2]
    assert low.time_scale == pytest.approx(4 * high.time_scale)
    capacity = np.median([*found.capacity_s.values()])
    assert low.time_scale * 0.5 * found.span_s == pytest.approx(capacity)
    assert high.virtual["ttft/mean"] > low.virtual["ttft/mean"]


def test_the_profile_is_of_steps_from_between_those_of_the_real_runs(found: FidelityStudy) -> None:
    """Two passes before, and cells for half of the time of each real run."""
    error = found.profile.error
    assert error.repeat_difference is not None and 0 < error.held_out_mean < 5
    measured_ns = sum(point.duration_ns for point in found.profile.points)
    ran_s = sum(summary["makespan_s"] for case in found.outcomes if case.load == 2 for summary in case.real)
    assert measured_ns / 1e9 > 0.25 * ran_s
    assert all(0.2 < case.level < 5 and case.level != 1 for case in found.outcomes)


def test_a_case_is_modelled_on_the_machine_of_its_time(setting: Setting, found: FidelityStudy) -> None:
    first = found.outcomes[0]
    limits = setting.make_engine().config
    slow = outcome(setting, (first.load, "fcfs"), first.time_scale, limits, found.profile, 3.0, [({}, AGREED)])
    assert slow.virtual["tpot/mean"] > 2.5 * first.virtual["tpot/mean"] / first.level


class Cells:
    """A bench whose every cell takes 100 ns of a thread's time, which the test makes pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        monkeypatch.setattr(measuring.time, "thread_time_ns", lambda: self.now)

    def run_cell(self) -> list[Any]:
        self.now += 100
        return [self.now]


def test_between_the_steps_of_a_run_cells_take_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    cells, measured, counts = Cells(monkeypatch), [], []
    between = Between(cells, 0.5, measured)  # type: ignore[arg-type]
    for step_ns in (1000, 100, 100, 100, 150):
        cells.now += step_ns
        between(None)  # type: ignore[arg-type]
        counts.append(len(measured))
    assert counts == [5, 6, 6, 7, 8], "500, then 50 and 50 at a time, each cell paid for before the next"


def test_what_is_shown_and_written(found: FidelityStudy, tmp_path: Path) -> None:
    text = io.StringIO()
    fidelity_result.show(found, Console(file=text, width=160))
    shown = text.getvalue()
    for expected in ("load 0.5, time_scale", "load 2, time_scale", "ttft/p99", "equal digests in 4 of 4 real runs"):
        assert expected in shown.replace("8 of 8", "4 of 4")
    fidelity_result.write(found, tmp_path, plots=True)
    content = json.loads((tmp_path / "fidelity.json").read_text())
    first = content["outcomes"][0]
    assert first["compared"]["ttft/mean"].keys() == {"error", "repeat_difference", "limit", "within"}
    assert first["virtual"]["ttft/mean"] > 0 and len(first["real"]) == 2
    assert Profile.load(tmp_path / "profile.json") == found.profile
    written = (tmp_path / "fidelity.md").read_text()
    assert written.count("\n| ttft/p99 | ") == 2 and "equal digests in 8 of 8 real runs" in written
    assert (tmp_path / "plots" / "fidelity.png").stat().st_size > 10_000


def test_with_a_profile_at_hand_nothing_is_measured(setting: Setting, found: FidelityStudy) -> None:
    alone = replace(setting, policies={"fcfs": FCFS})
    lines: list[str] = []
    again = study(alone, (1.0,), 1, GRID, found.profile, say=lines.append)
    assert again.profile is found.profile and not any("pass" in line for line in lines)


# ---- parts ----


def test_who_is_refused_is_refused_again(setting: Setting, found: FidelityStudy) -> None:
    limited = replace(setting, make_admission=lambda: TokenBucket(rate=0.001, burst=5))
    engine = limited.make_engine()
    run = limited.run("fcfs", 1.0, engine, "busy")
    assert run.summary["requests/rejected"] == 7
    assert limited.decide_again(run, "fcfs", 1.0, engine.config).equal
    assert limited.virtual("fcfs", 1.0, engine.config, found.profile)["requests/rejected"] == 7
    assert capacities(limited, engine.config, found.profile) == capacities(setting, engine.config, found.profile)


def test_errors_are_judged_by_the_limit_or_by_what_repeats_differ() -> None:
    assert Compared((1.0, 1.0), 1.04, 0.05).within
    assert not Compared((1.0, 1.0), 1.06, 0.05).within
    noisy = Compared((0.9, 1.1), 1.15, 0.05)
    assert noisy.error == pytest.approx(0.15) and noisy.repeat_difference == pytest.approx(0.2) and noisy.within
    assert not Compared((0.9, 1.1), 0.75, 0.05).within


def test_decisions_that_part_are_stated() -> None:
    summary = dict.fromkeys(METRICS, 1.0)
    virtual, agreement = {**summary, "ttft/mean": 1.5}, DecidedAgain("a", "b", 17)
    parted = PolicyOutcome("fcfs", 0.5, 1.0, 1.0, (summary, summary), virtual, (agreement,))
    profile = Profile({}, Coefficients(), False, FitError(0.01, 0.02, 0.03, 9, 9), ())
    lines = fidelity_result.verdicts(FidelityStudy(profile, {"fcfs": 1.0}, 1.0, (parted,)))
    assert f"{len(METRICS) - 1} of {len(METRICS)} figures within" in lines
    assert lines[-1] == "fcfs at load 0.5: decisions part at step 17"
    assert any("equal digests in 0 of 1 real runs" in line for line in lines)
    assert fidelity_result.cell(parted.compared["ttft/mean"]) == "+50.0% (0.0%)!"


def test_a_scaled_workload_is_the_same_at_other_times() -> None:
    slow = Scaled(WORK, 3.0)
    trace, original = slow.load(1), WORK.load(1)
    assert np.array_equal(trace.arrival_ns, np.rint(original.arrival_ns * 3.0).astype(np.int64))
    assert np.array_equal(trace.prompt_tokens, original.prompt_tokens)
    assert slow.source(512, seed=1).peek() == trace.arrival_ns[0]


def test_what_cannot_be_compared(setting: Setting) -> None:
    class Live(Synthetic):
        def load(self, seed: int = 0):  # type: ignore[no-untyped-def]
            return super().load(seed).with_columns(output_tokens=np.full(12, -1))

    work = {"num_requests": 12, "arrivals": WORK.arrivals, "lengths": WORK.lengths}
    with pytest.raises(ConfigError, match="fidelity: synthetic: row 0 has no recorded output length"):
        study(replace(setting, workload=Live(**work)), (0.5,), 1, GRID)
    with pytest.raises(ConfigError, match="fidelity: synthetic arrives all at once"):
        study(replace(setting, workload=replace(WORK, num_requests=1)), (0.5,), 1, GRID)


# ---- the commands ----

COMMAND = (
    "workload.max_requests=4", "fidelity.policies=[fcfs]", "fidelity.repeats=1", "fidelity.loads=[2.0]",
    "calibrate.max_batch=2", "calibrate.max_context=64", "calibrate.max_prefill=64", "calibrate.budget_s=1",
)  # fmt: skip


def test_the_command(schedlab: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = schedlab("fidelity", *COMMAND)
    assert code == 0, err
    assert "load 2: time_scale" in out and "fcfs at load 2" in out and "equal digests in 1 of 1 real runs" in out
    (written,) = Path().glob("outputs/*/*/fidelity.json")
    identity = json.loads(written.read_text())["profile"]["identity"]
    assert identity["hardware"] == "cpu" and identity["weight_dtype"] == "fp32"


def test_calibrate_then_run_on_its_profile(schedlab: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = schedlab("calibrate", *COMMAND[4:], "calibrate.out=profile.json")
    assert code == 0, err
    assert "mean held-out error" in out and "profile=profile.json" in out
    profile = json.loads(Path("profile.json").read_text())
    assert profile["identity"]["measured"]["engine"] == "cpu" and profile["identity"]["measured"]["clock"] == "busy"
    assert profile["identity"]["measured"]["versions"]["torch"] and profile["points"]["duration_ns"]
    words = out.split("schedlab ")[-1].split()
    code, _, err = schedlab(*words, "workload.max_requests=10", "wandb.mode=disabled", "plots=false")
    assert code == 0, err
    code, _, err = schedlab(*words[:2], "model=tiny", "hardware=cpu", "profile=profile.json", "wandb.mode=disabled")
    assert code == 2 and err == "error: profile: measured with weight_dtype = fp32, this run has bf16\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "engine=virtual"), "calibrate: expected engine=cpu, cuda or vllm, which run a model, found"),
        (("fidelity", "engine=stub"), "fidelity: expected engine=cpu, cuda or vllm, which run a model, found stub"),
        (("calibrate", "engine.dtype=float64"), "engine.dtype=float64: expected one of float32, bfloat16, float16"),
        (("calibrate", "engine.dtype=fp32"), "engine.dtype: expected one of float64, float32, bfloat16, float16"),
        (("roofline", "hardware=cpu", "engine.dtype=float64"), "engine.dtype=float64: expected one of float32, "),
        (("calibrate", "calibrate.passes=many"), "calibrate.passes: expected an integer, found 'many'"),
        (("calibrate", "calibrate.max_batch=0"), "calibrate.max_batch: expected at least 1, found 0"),
        (("fidelity", "fidelity.loads=[0]"), "fidelity.loads: expected shares of the capacity above 0, found [0]"),
        (("fidelity", "fidelity.repeats=0"), "fidelity.repeats: expected at least 1, found 0"),
        (("fidelity", "fidelity.policies=[fcsf]"), "fidelity.policies: policy=fcsf: no such option; did you"),
        (("fidelity", "profile=nowhere.json"), "profile nowhere.json: expected a readable file, found: No such file"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    schedlab: Callable[..., tuple[int, str, str]], words: tuple[str, ...], message: str
) -> None:
    code, _, err = schedlab(*words)
    assert code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1, err


def test_roofline_measures_the_machine_that_runs(schedlab: Callable[..., tuple[int, str, str]]) -> None:
    sizes = ("roofline.prompt_tokens=128", "roofline.context_tokens=32", "roofline.batch_size=3")
    code, out, err = schedlab("roofline", "hardware=cpu", *sizes)
    assert code == 0, err
    assert "measured" in out and "large decode batch: 3 × decode at 32" in out
    code, out, err = schedlab("roofline", "model=smollm2-135m", "hardware=h100")
    assert code == 0 and "measured" not in out and "weights 0.25 GiB in bf16" in out
