"""`schedlab run`: from a composed config to a run directory, a line or a table, and a W&B run.

A job that fails leaves a result that says so and costs the other jobs of a sweep nothing.
"""

from __future__ import annotations

import errno
import hashlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from omegaconf import DictConfig

from schedlab.experiments.analysis.metrics import check_metric
from schedlab.experiments.analysis.rejections import why_nothing_was_served
from schedlab.experiments.analysis.table import Comparison, Run, headline
from schedlab.experiments.run import compose
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.run.checks import check_arguments
from schedlab.experiments.run.fleet_config import fleet_of
from schedlab.experiments.run.manifest import MANIFEST, write_manifest
from schedlab.experiments.run.messages import drawing, short
from schedlab.experiments.run.progress import progress
from schedlab.experiments.run.tracking import NoTracker, Tracker, WandbConfig, start_tracker
from schedlab.experiments.sweep import resume
from schedlab.experiments.sweep.varying import words_that_vary
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.results.metrics import Measurement
from schedlab.framework.results.reader import read_run
from schedlab.framework.results.tables import RunTables
from schedlab.framework.results.writer import RunWriter, write_json

FAR = 1e9
"""Beyond every figure; how far a limit is exceeded adds to it, so that a search is led back."""
WORST = 1e15
"""Of a run that failed, or whose figures are unknown."""
MOST_DRAWN = 500_000
"""Rows of requests and steps of a run whose pictures are drawn without being asked for."""
OF_OTHER_COMMANDS = ("roofline", "calibrate", "import", "fidelity", "check", "capacity")
"""Sections of the configuration that no run reads."""
CHOSEN = ("policy", "workload", "seed", "policy._target_")
"""Told first and last."""
NOT_OF_THE_NAME = ("wandb", "plots", "progress", "timeline", "resume", "log_format", "hydra")
LONGEST_NAME = 128
"""Letters of a run's name that W&B takes."""
GROUPS = ("policy", "workload", "engine", "model", "hardware", "predictor", "slo", "observed_at")
FLEET_GROUPS = (*GROUPS, "cluster", "router")


@dataclass(frozen=True)
class Settings:
    """The top-level keys that are not groups."""

    seed: int
    clock: str
    progress: bool
    plots: bool
    timeline: int
    record: str
    log_format: str
    store_text: bool
    resume: bool


@dataclass(frozen=True)
class Objective:
    """`conf/config.yaml: objective`. `at_most` are limits of summary keys; `direction` is minimize or maximize."""

    figures: str | Sequence[str] | None = None
    at_most: Mapping[str, float] | None = None
    direction: str = "minimize"

    def __post_init__(self) -> None:
        if self.direction not in ("minimize", "maximize"):
            raise ConfigError(f"objective.direction={self.direction}: expected minimize or maximize")
        for key in self._asked:
            check_metric(key, "objective.figures")
        for key, limit in (self.at_most or {}).items():
            check_metric(key, "objective.at_most")
            if not limit > 0:
                raise ConfigError(f"objective.at_most: expected a limit above 0 for {key}, found {limit}")

    @property
    def _asked(self) -> Sequence[str]:
        return [self.figures] if isinstance(self.figures, str) else self.figures or ()

    def of(self, summary: Mapping[str, Any] | None) -> float | list[float] | None:
        """One value, or one for each of several figures; None where nothing is asked for.

        A figure or a limited one that the summary does not know, and a run without a summary, count as the worst.
        """
        if self.figures is None:
            return None
        if isinstance(self.figures, str):
            return self._value(self.figures, summary)
        return [self._value(key, summary) for key in self.figures]

    def unknown(self, summary: Mapping[str, Any]) -> list[str]:
        """What is asked for and not known of a run, as where nobody finished."""
        asked = (*self._asked, *(self.at_most or ())) if self.figures is not None else ()
        return [key for key in asked if summary[key] is None]

    def excess(self, summary: Mapping[str, Any]) -> float:
        """Shares by which limits are exceeded, summed; 0 where all are kept."""
        limits = self.at_most or {}
        return float(sum(max(summary[name] / limit - 1, 0.0) for name, limit in limits.items()))

    def _value(self, key: str, summary: Mapping[str, Any] | None) -> float:
        sign = 1 if self.direction == "minimize" else -1
        if summary is None or self.unknown(summary):
            return sign * WORST
        excess = self.excess(summary)
        return sign * min(FAR * (1 + excess), WORST) if excess else float(summary[key])


def run_job(config: DictConfig) -> float | list[float] | None:
    """One run of a composed config, in Hydra's output directory; with `resume`, if it was not made before.

    Returns what `objective` asks for.
    """
    own, sweep = compose.output_directory(), compose.sweep_directory()
    try:
        directory, tables, verb = made(config)
    except KeyboardInterrupt:
        print(f"\ninterrupted: what was written can be read in {short(sweep or own)}", file=sys.stderr)
        raise
    except Exception as error:
        if sweep is None:
            raise
        print(f"{own.name}: failed: {compose.flat(error)}", file=sys.stderr)
        return worst_of(config)
    if sweep is None:
        Comparison([Run(directory, tables)]).show()
        print(f"in {short(directory)}")
    else:
        varying = " ".join(words_that_vary(sweep, compose.overrides()))
        print(f"{directory.name}: {verb}{headline(tables)}{varying and f' ({varying})'}")
    if why := why_nothing_was_served(tables):
        print(f"{directory.name}: {why}", file=sys.stderr)
        if sweep is None:
            raise SystemExit(1)
    objective = objective_of(compose.resolve(config.objective))
    if missing := objective.unknown(tables.summary):
        print(
            f"{directory.name}: {', '.join(missing)}: unknown in this run, so it counts as the worst", file=sys.stderr
        )
    return objective.of(tables.summary)


def worst_of(config: DictConfig) -> float | list[float] | None:
    """What a failed run returns to a search, which goes on; None if nothing is asked for, or not rightly."""
    try:
        return objective_of(compose.resolve(config.objective)).of(None)
    except compose.USER_ERRORS:
        return None


def made(config: DictConfig) -> tuple[Path, RunTables, str]:
    """This run: where it is, what it left, and a word where it was there before. What raises is in its result too."""
    directory, sweep = compose.output_directory(), compose.sweep_directory()
    identity = None
    try:
        resolved = compose.resolve(config)
        settings = settings_of(resolved)
        identity = resume.identity_of(resolved)
        with resume.place(identity, directory, sweep, settings.resume) as directory:
            if settings.resume and resume.is_done(directory, identity):
                return directory, read_run(directory), "was finished, "
            if settings.resume and (changed := resume.outdated(directory, identity)):
                print(f"{directory.name}: run again, for {changed} changed")
            resume.start_over(directory)
            tables = Plan.of(resolved, settings).execute(directory)
            resume.mark_done(directory, identity)
    except Exception as error:
        if identity is None and resume.is_sibling_s(directory, None, sweep):
            directory = directory.with_name(f"{directory.name}-job{compose.job_number()}")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            error.filename = short(directory)
        with suppress(OSError):  # a full disk; the line tells what ended the run
            record_failure(directory, error)
        raise
    return directory, tables, ""


def objective_of(keys: Mapping[str, Any]) -> Objective:
    check_arguments("objective", keys, Objective)
    return Objective(**keys)


@dataclass(frozen=True)
class Plan:
    """A composed configuration, read and built once: what is run, and what becomes of the run."""

    experiment: Experiment
    settings: Settings
    wandb: WandbConfig

    @classmethod
    def of(cls, resolved: Mapping[str, Any], settings: Settings) -> Self:
        objective_of(resolved["objective"])  # a mistake in it should cost no run
        experiment = experiment_of(resolved, settings)
        check_arguments("wandb", resolved["wandb"], WandbConfig)
        return cls(experiment, settings, WandbConfig(**resolved["wandb"]))

    def execute(self, directory: Path) -> RunTables:
        """A run and all that is made of its files, which are read once."""
        settings, tracker = self.settings, self._tracker(directory)
        try:
            self.experiment.run(directory, progress(self.experiment.name, settings.progress))
            tables = read_run(directory)
            if settings.plots and settings.record == "full":
                draw(tables, directory)
            if settings.record == "full":
                add_timeline(tables, directory, settings.timeline)
        except BaseException:
            tracker.finish(None)
            raise
        tracker.finish(tables)
        return tables

    def _tracker(self, directory: Path) -> Tracker:
        """W&B's, unless it is off: named after what the run was asked for, grouped by its sweep."""
        wandb, sweep, experiment = self.wandb, compose.sweep_directory(), self.experiment
        if wandb.mode == "disabled":
            return NoTracker()
        labels = experiment.labels
        facts = {**names_of(experiment), **flat_facts(experiment.manifest())}
        tags = [str(labels[group]) for group in ("policy", "workload", "engine", "model") if group in labels]
        named = replace(
            wandb,
            group=wandb.group or (f"{sweep.parent.name}/{sweep.name}" if sweep else None),
            name=wandb.name or shown_name(facts, experiment.overrides),
            tags=[*wandb.tags, *tags],
        )
        config = {key: value for key, value in experiment.config.items() if key not in OF_OTHER_COMMANDS}
        return start_tracker(named, {**config, **facts}, directory, in_sweep=sweep is not None)


def settings_of(resolved: Mapping[str, Any]) -> Settings:
    keys = {name: resolved[name] for name in Settings.__dataclass_fields__}
    check_arguments("", keys, Settings)
    if keys["timeline"] < 0:
        raise ConfigError(f"timeline: expected 0 steps or more, found {keys['timeline']}")
    return Settings(**keys)


def experiment_of(
    resolved: Mapping[str, Any], settings: Settings, given: Mapping[str, Any] | None = None
) -> Experiment:
    """Build every part that a resolved configuration names, but for those that are `given` as objects."""
    check_arguments("measure", resolved["measure"], Experiment)
    parts = dict(given or {})
    for name in ("policy", "workload", "engine", "slo", "predictor", "admission", "observed_at"):
        if name not in parts:
            build = compose.build if name in ("policy", "workload", "engine") else compose.build_optional
            parts[name] = build(resolved[name], name)
    return Experiment(
        **parts,
        seed=settings.seed,
        fleet=fleet_of(resolved) if resolved["cluster"] or resolved["router"] else None,
        clock=settings.clock,
        **resolved["measure"],
        store_text=settings.store_text,
        record=settings.record,
        log_format=settings.log_format,
        config=resolved,
        labels={**compose.choices(GROUPS if not resolved["cluster"] else FLEET_GROUPS), "seed": settings.seed},
        overrides=compose.overrides(),
    )


def names_of(experiment: Experiment) -> dict[str, Any]:
    """Flat keys by which runs are told apart; a policy that is given by its class has the name of that."""
    labels, workload = experiment.labels, experiment.config["workload"]
    own = type(experiment.policy).__name__ if labels["policy"] == "custom" else labels["policy"]
    arrivals = workload.get("arrivals")
    return {
        "policy_name": own,
        **{f"{group}_name": labels[group] for group in ("workload", "engine", "model") if group in labels},
        "rate": arrivals.get("rate") if isinstance(arrivals, Mapping) else workload.get("rate"),
        "seed": experiment.seed,
    }


def shown_name(facts: Mapping[str, Any], overrides: Mapping[str, str]) -> str:
    """`fcfs · bursty · rate=20 · s0`: every override that decides what is computed, by the end of its key where that
    is of one alone. One that is longer than W&B takes ends in a hash of the whole."""
    told = {
        key: value for key, value in overrides.items()
        if key not in CHOSEN and key.partition(".")[0] not in NOT_OF_THE_NAME
    }  # fmt: skip
    ends = [key.rpartition(".")[2] for key in told]
    words = [f"{end if ends.count(end) == 1 else key}={told[key]}" for key, end in zip(told, ends, strict=True)]
    name = " · ".join([facts["policy_name"], facts["workload_name"], *words, f"s{facts['seed']}"])
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 11]} · {digest}"


def flat_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What W&B shows beside the configuration."""
    return {
        "git_sha": (manifest["git"] or {}).get("commit"),
        "git_dirty": (manifest["git"] or {}).get("dirty"),
        "schedlab_version": manifest["versions"]["schedlab"],
        "versions": manifest["versions"],
        "core": manifest["core"],
        "policy_class": manifest["policy"]["class"],
        "policy_distribution": manifest["policy"]["distribution"],
        "trace_sha256": manifest["workload"]["sha256"],
        "config_hash": manifest["config_hash"],
        "clock_used": manifest["clock"],
        "machine": manifest["hardware"].get("gpu") or manifest["hardware"]["cpu"],
    }


def draw(run: RunTables, directory: Path) -> None:
    """The pictures of a run whose logs are read in a few seconds and a gigabyte at most; else a line says why not.

    A fleet has none: its steps are its replicas', whose folders `schedlab report` draws.
    """
    if "replicas" in run.result:
        return
    if not run.result["rows"]["steps"]:
        offered, rejected = (run.summary[f"requests/{which}"] for which in ("offered", "rejected"))
        told = f"no step was executed; {rejected:,} of {offered:,} requests were rejected"
        print(f"no plots in {short(directory)}: {told}", file=sys.stderr)
        return
    if (rows := sum(run.result["rows"].values())) > MOST_DRAWN:
        print(f"no plots in {short(directory)}: {rows:,} rows of logs; `schedlab report` draws them", file=sys.stderr)
        return
    from schedlab.experiments.analysis.plots import save_all

    with drawing(directory):
        save_all(run, directory / "plots")


def add_timeline(run: RunTables, directory: Path, max_rows: int) -> None:
    """timeline.json of a run of moderate length: at most `max_rows` logged steps."""
    from schedlab.experiments.analysis.timeline import TIMELINE, write_timeline

    if "replicas" not in run.result and 0 < run.result["rows"]["steps"] <= max_rows:
        write_timeline(run, directory / TIMELINE)


def record_failure(directory: Path, error: Exception) -> None:
    """Leave a result that says `failed` and why, with the traceback beside it where some code raised."""
    path = directory / "result.json"
    if not path.exists() or read_run(directory).status != "failed":
        RunWriter(directory, Measurement(1, 1), record="summary").fail(error)
    write_json(path, {**read_run(directory).result, "error": compose.flat(error)})
    if not (directory / MANIFEST).exists():
        write_manifest(directory, {"labels": compose.choices(GROUPS), "overrides": compose.overrides()})
    if not isinstance(error, SchedlabError) or error.__cause__ is not None:
        (directory / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
