"""schedlab: a research framework for LLM-inference scheduling policies. Importing it imports no torch."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab import core
from schedlab.version import __version__

if TYPE_CHECKING:
    from schedlab.experiments import engines
    from schedlab.experiments.notebook.runs import RunResult, Runs, load, run, sweep
    from schedlab.experiments.notebook.studies import capacity, compare, explain, plot, report
    from schedlab.experiments.run.llm import LLM
    from schedlab.framework.cluster.fleet import Fleet
    from schedlab.framework.cluster.router import Router
    from schedlab.framework.cluster.view import ReplicaView
    from schedlab.framework.policy import (
        Aborted,
        Admitted,
        Arrived,
        Event,
        Finished,
        Policy,
        Preempted,
        Progressed,
        Rejected,
    )
    from schedlab.framework.request import SLO, Request, SamplingParams
    from schedlab.framework.step import Grant, Step

_NAMES = {
    "schedlab.experiments.notebook.runs": ("run", "sweep", "load", "RunResult", "Runs"),
    "schedlab.experiments.notebook.studies": ("compare", "explain", "capacity", "report", "plot"),
    "schedlab.experiments.run.llm": ("LLM",),
    "schedlab.framework.cluster.fleet": ("Fleet",),
    "schedlab.framework.cluster.router": ("Router",),
    "schedlab.framework.cluster.view": ("ReplicaView",),
    "schedlab.framework.policy": (
        "Policy", "Event", "Arrived", "Admitted", "Progressed", "Preempted", "Finished", "Aborted", "Rejected",
    ),
    "schedlab.framework.request": ("Request", "SLO", "SamplingParams"),
    "schedlab.framework.step": ("Step", "Grant"),
}  # fmt: skip
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {"engines": "schedlab.experiments.engines", "testing": "schedlab.testing"}
__all__ = [
    "LLM", "SLO", "Aborted", "Admitted", "Arrived", "Event", "Finished", "Fleet", "Grant", "Policy", "Preempted",
    "Progressed", "Rejected", "ReplicaView", "Request", "Router", "RunResult", "Runs", "SamplingParams", "Step",
    "__version__", "capacity", "compare", "engines", "explain", "load", "plot", "report", "run", "sweep",
]  # fmt: skip


def _missing_room(package: Path) -> str | None:
    """Why the rooms of `package` cannot be imported; None where they can."""
    for room in ("conf", "experiments", "framework", "kernels", "policies", "workloads"):
        if package.is_dir() and not (package / room).is_dir():
            return (
                f"{package / room} is no folder but should be a symbolic link to {package.parents[1] / room}: this copy "
                "was made without symbolic links; make one with `git clone -c core.symlinks=true` (on Windows in "
                "developer mode), or install a wheel"
            )
    return None


if (_why := _missing_room(Path(__file__).parent)) is not None:
    raise ImportError(_why)
core.install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _EXPORTS:
        raise AttributeError(f"module 'schedlab' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
