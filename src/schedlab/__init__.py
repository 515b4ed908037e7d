"""schedlab: a research framework for LLM-inference scheduling policies. Importing it imports no torch."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedlab import core
from schedlab.version import __version__

if TYPE_CHECKING:
    from schedlab.experiments import engines
    from schedlab.experiments.run.api import RunResult, run
    from schedlab.experiments.run.llm import LLM
    from schedlab.framework.cluster.fleet import Fleet
    from schedlab.framework.cluster.router import Router
    from schedlab.framework.cluster.view import ReplicaView
    from schedlab.framework.policy import Policy
    from schedlab.framework.request import SLO, SamplingParams
    from schedlab.framework.step import Step

_EXPORTS = {
    "run": "schedlab.experiments.run.api",
    "RunResult": "schedlab.experiments.run.api",
    "LLM": "schedlab.experiments.run.llm",
    "Policy": "schedlab.framework.policy",
    "Step": "schedlab.framework.step",
    "Router": "schedlab.framework.cluster.router",
    "Fleet": "schedlab.framework.cluster.fleet",
    "ReplicaView": "schedlab.framework.cluster.view",
    "SLO": "schedlab.framework.request",
    "SamplingParams": "schedlab.framework.request",
}
_MODULES = {"engines": "schedlab.experiments.engines", "testing": "schedlab.testing"}
__all__ = [
    "LLM", "SLO", "Fleet", "Policy", "ReplicaView", "Router", "RunResult", "SamplingParams", "Step", "__version__",
    "engines", "run",
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
