"""Which runs of a search kept the limits of `objective.at_most`, from their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedlab.experiments.analysis.table import Run
from schedlab.experiments.run.job import Objective


def what_kept_the_limits(runs: Sequence[Run]) -> str | None:
    """One line, which without such a run tells how far the nearest one was; None where no run had limits."""
    limited = [(run, limits) for run in runs if (limits := limits_of(run))]
    if not limited:
        return None
    known = [(excess(run, limits), run, limits) for run, limits in limited if knows(run, limits)]
    kept = [run.directory.name for missed, run, _ in known if not missed]
    told = f"objective.at_most: {len(kept) or 'none'} of {len(runs)} runs kept the limits"
    if kept:
        return f"{told}: {', '.join(kept)}"
    if not known:
        return f"{told}, and no run has all of their figures"
    _, nearest, limits = min(known, key=lambda one: one[0])
    return f"{told}; the nearest is {nearest.directory.name}: {_broken(nearest.tables.summary, limits)}"


def limits_of(run: Run) -> Mapping[str, float]:
    """Empty where the run was asked for no figure."""
    objective = run.manifest.get("config", {}).get("objective") or {}
    return (objective.get("at_most") or {}) if objective.get("figures") is not None else {}


def knows(run: Run, limits: Mapping[str, float]) -> bool:
    return run.complete and all(run.tables.summary.get(key) is not None for key in limits)


def excess(run: Run, limits: Mapping[str, float]) -> float:
    return Objective(at_most=limits).excess(run.tables.summary)


def _broken(summary: Mapping[str, Any], limits: Mapping[str, float]) -> str:
    broken = {key: limit for key, limit in limits.items() if summary[key] > limit}
    return ", ".join(
        f"{key} {summary[key]:.4g}, {summary[key] / limit - 1:.2%} above {limit:g}" for key, limit in broken.items()
    )
