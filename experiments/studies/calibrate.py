"""`schedlab calibrate`: measures an engine's own steps over a designed grid and fits the cost profile of this machine;
of an engine in a process of its own, as vLLM's, the steps of a run.

How the steps are run is in measuring.py, which steps in grid.py, the fit in framework/cost/fit.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from schedlab.experiments.analysis.history import histories
from schedlab.experiments.analysis.step_work import works
from schedlab.experiments.engines import EngineSetup, hardware_preset, roofline_of
from schedlab.experiments.studies.grid import Extent
from schedlab.experiments.studies.measuring import MeasuredStep, run_grid
from schedlab.framework.cost.coefficients import Coefficients
from schedlab.framework.cost.fit import (
    FOLDS,
    FitError,
    Point,
    Profile,
    check_points,
    fit,
    identity_of,
    predict_ns,
    repeat_difference,
)
from schedlab.framework.cost.hardware import Hardware
from schedlab.framework.cost.roofline import Roofline, Work
from schedlab.framework.cost.routing import DENSE, Routing
from schedlab.framework.cost.windows import Window
from schedlab.framework.errors import ConfigError
from schedlab.framework.results.tables import RunTables

if TYPE_CHECKING:
    from omegaconf import DictConfig

TOLERATED, TOLERATED_REPEATS = 0.05, 1.5
"""Held-out steps should be modelled within 5 % on average, or within so many times what repeats of one step differ."""
MOST_DISTURBED = 4.0
"""A step that took more than so many times as long as it should counts as that: one in a grid is no average."""


# ---- fitting ----


def fitted(points: Sequence[Point], routing: Routing = DENSE) -> Coefficients:
    """Rates after each kind's average step, then all of them raised or lowered together to what steps took on average.

    The fit counts little of what disturbed a few steps very much, but a run's clock adds it up.
    """
    rates = fit(points, routing)
    return at_level(rates, level(rates, points))


def level(rates: Coefficients, points: Sequence[Point]) -> float:
    """How long steps took on average, of what `rates` say."""
    return float(np.minimum(_taken(rates, points), MOST_DISTURBED).mean())


def num_disturbed(rates: Coefficients, points: Sequence[Point]) -> int:
    """How many of the steps count as MOST_DISTURBED times what `rates` say, as they took longer."""
    return int((_taken(rates, points) > MOST_DISTURBED).sum()) if points else 0


def _taken(rates: Coefficients, points: Sequence[Point]) -> np.ndarray:
    """float64 [points]: how long each step took, of what `rates` say."""
    taken: np.ndarray = np.array([point.duration_ns for point in points], dtype=float) / predict_ns(rates, points)
    return taken


def at_level(rates: Coefficients, factor: float) -> Coefficients:
    """`rates` with all times multiplied."""
    return replace(rates, **{f.name: getattr(rates, f.name) * factor for f in fields(rates) if f.name.endswith("_ns")})


def held_out_errors(measured: Sequence[MeasuredStep], routing: Routing = DENSE) -> np.ndarray:
    """float64 [steps]: |modelled / measured - 1|, by a fit that has seen no step of the same fifth of the cells."""
    folds = np.array([step.cell % FOLDS for step in measured])
    points = [step.point for step in measured]
    errors = np.empty(len(points))
    for fold in range(FOLDS):
        seen = [point for point, f in zip(points, folds, strict=True) if f != fold]
        held = [point for point, f in zip(points, folds, strict=True) if f == fold]
        truth = np.array([point.duration_ns for point in held], dtype=float)
        errors[folds == fold] = np.abs(predict_ns(fitted(seen, routing), held) / truth - 1)
    return errors


def make_profile(
    measured: Sequence[MeasuredStep], errors: np.ndarray, roofline: Roofline, hardware: Hardware, facts: dict[str, Any]
) -> Profile:
    """The profile of what was measured; `facts` on how and where become part of its identity."""
    points = tuple(step.point for step in measured)
    check_points(points, roofline.routing)
    repeats, works = repeat_difference(points), len({point.work for point in points})
    error = FitError(float(errors.mean()), float(np.quantile(errors, 0.9)), repeats, len(points), works)
    copies = any(point.work.copied_bytes for point in points)
    identity = {**identity_of(roofline, hardware), "measured": facts}
    return Profile(identity, fitted(points, roofline.routing), copies, error, points)


def tolerated(error: FitError) -> float:
    """How large the held-out error may be."""
    return max(TOLERATED, TOLERATED_REPEATS * (error.repeat_difference or 0.0))


# ---- the command ----


@dataclass(frozen=True)
class CalibrationOptions:
    """The keys of `calibrate`."""

    passes: int
    budget_s: float
    max_batch: int
    max_context: int
    max_prefill: int
    max_cell_tokens: int
    out: str | None

    @property
    def extent(self) -> Extent:
        return Extent(self.max_batch, self.max_context, self.max_prefill, self.max_cell_tokens)


def calibrate_job(config: DictConfig) -> Path:
    """Measure, fit, show, and write the profile; its path."""
    from schedlab.experiments.run import compose
    from schedlab.experiments.run.checks import check_arguments, check_single
    from schedlab.experiments.run.job import experiment_of, settings_of
    from schedlab.experiments.run.messages import short
    from schedlab.experiments.run.offered import offered

    keys = compose.resolve(config.calibrate)
    check_arguments("calibrate", keys, CalibrationOptions)
    options = CalibrationOptions(**keys)
    check_single(config, "calibrate")
    setup = compose.build(config.engine, "engine")
    roofline, hardware = modelled(config, setup, "calibrate")
    if setup.python is not None:
        experiment = experiment_of(resolved := compose.resolve(config), settings_of(resolved))
        print(f"{setup.name}: the steps of {offered(experiment.trace)}, under {experiment.labels['policy']}")
        measured = steps_of(experiment.run(), roofline.window)
        about: dict[str, Any] = {"workload": experiment.workload.name}
    else:
        print(f"{setup.name} by the {setup.clock_name(config.clock)} clock, to {described(options.extent)}")
        measured = run_grid(setup, options.extent, passes=options.passes, budget_s=options.budget_s, clock=config.clock)
        about = {"extent": asdict(options.extent)}
    errors = held_out_errors(measured, roofline.routing)
    profile = make_profile(measured, errors, roofline, hardware, facts(setup, config.clock, about))
    path = Path(options.out) if options.out else compose.output_directory() / "profile.json"
    profile.save(path)
    render(profile, measured, errors, roofline)
    model = compose.choices(["model"]).get("model", "NAME")
    print(f"in {short(path)}; schedlab run engine=virtual model={model} hardware={hardware.name} "
          f"engine.weight_dtype={roofline.weight_dtype} profile={short(path)}")  # fmt: skip
    return path


def modelled(config: DictConfig, setup: EngineSetup, command: str) -> tuple[Roofline, Hardware]:
    """What the cost model knows of the model and the machine that a real engine runs.

    A CPU, which vLLM is taken to run on too, is `hardware=cpu` unless another name was given on the command line.
    """
    from schedlab.experiments.run import compose

    if setup.name not in ("cpu", "cuda", "vllm"):
        raise ConfigError(f"{command}: expected engine=cpu, cuda or vllm, which run a model, found {setup.name}")
    named = "hardware" in compose.overrides() or any(key.startswith("hardware.") for key in compose.overrides())
    hardware = compose.build(config.hardware, "hardware") if named or setup.name == "cuda" else hardware_preset("cpu")
    return roofline_of(compose.resolve(config.model), config.engine.dtype), hardware


def steps_of(run: RunTables, window: Window) -> list[MeasuredStep]:
    """The steps of a run that an engine measured which cannot be led through a grid. Equal works share a cell."""
    cells: dict[Work, int] = {}
    measured = []
    for work, duration_ns in zip(works(run, histories(run), window), run.steps["duration_ns"].tolist(), strict=True):
        if work.tokens:
            kind = "mixed" if work.prefills and work.decodes else "prefill" if work.prefills else "decode"
            measured.append(MeasuredStep(cells.setdefault(work, len(cells)), kind, Point(work, duration_ns)))
    return measured


def facts(setup: EngineSetup, clock: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """On what and how a profile was measured; `about` says which steps."""
    from schedlab.experiments.run.manifest import hardware, versions

    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": setup.name,
        "clock": setup.clock_name(clock),
        "block_size": setup.config.block_size,
        **about,
        "machine": hardware(),
        "versions": versions(),
    }


def described(extent: Extent) -> str:
    return (
        f"{extent.max_batch} sequences, contexts of {extent.max_context:,}, {extent.max_prefill:,} prompt tokens a step"
    )


def render(profile: Profile, measured: Sequence[MeasuredStep], errors: np.ndarray, roofline: Roofline) -> None:
    """Print held-out errors by kind of step beside what repeats differ by, and what the machine reached."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(highlight=False, soft_wrap=True), Table("cells", box=None, pad_edge=False)
    for heading in ("steps", "mean ms", "held-out error", "p90", "repeats differ"):
        table.add_column(heading, justify="right")
    names = np.array([step.name for step in measured])
    for name in dict.fromkeys(sorted(names.tolist())):
        table.add_row(name, *_row([step.point for step in measured if step.name == name], errors[names == name]))
    table.add_row("all", *_row(profile.points, errors), style="bold")
    console.print(table)
    error = profile.error
    verdict = "met" if error.held_out_mean <= tolerated(error) else "NOT met"
    console.print(
        f"mean held-out error {error.held_out_mean:.1%}; expected at most max({TOLERATED:.0%}, {TOLERATED_REPEATS:g} × "
        f"the difference of repeats) = {tolerated(error):.1%}: {verdict}"
    )
    if disturbed := num_disturbed(profile.coefficients, profile.points):
        console.print(f"{disturbed} steps took more than {MOST_DISTURBED:g} times as long and count as that")
    reached = (f"{name.replace('_', ' ')} {value:.3g}" for name, value in profile.achieved(roofline).items())
    console.print(f"reached: {', '.join(reached)}")


def _row(points: Sequence[Point], errors: np.ndarray) -> list[str]:
    mean_ms = float(np.mean([point.duration_ns for point in points])) / 1e6
    differ = repeat_difference(points)
    shares = (f"{errors.mean():.1%}", f"{np.quantile(errors, 0.9):.1%}", "–" if differ is None else f"{differ:.1%}")
    return [f"{len(points):,}", f"{mean_ms:,.2f}", *shares]
