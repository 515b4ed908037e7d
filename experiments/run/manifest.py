"""What a run was made of: versions, code, machine, workload, seeds and the resolved configuration.

Imports no torch: versions come from package metadata.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from schedlab import core
from schedlab.framework.results import packed
from schedlab.framework.results.writer import write_whole
from schedlab.version import __version__
from schedlab.workloads.trace import Trace

MANIFEST = "manifest.json"
PACKAGES = ("numpy", "torch", "triton", "transformers", "safetensors", "hydra-core", "omegaconf", "wandb")
ENVIRONMENT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_CORETYPE", "PYTHONHASHSEED")
NOT_OF_THE_RESULT = (
    "wandb", "progress", "plots", "timeline", "log_format", "resume", "objective", "roofline", "calibrate", "fidelity",
    "check", "capacity", "import",
)  # fmt: skip
"""Top-level keys that change no number of a run, and so are not part of its hash."""


def config_hash(config: Mapping[str, Any]) -> str:
    """Of the resolved configuration; equal for runs that differ only in what they show or where they report."""
    kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_RESULT}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def describe_run(
    *,
    config: Mapping[str, Any],
    labels: Mapping[str, Any],
    overrides: Mapping[str, str],
    seeds: Mapping[str, int],
    policy: object,
    predictor: object | None,
    workload: Mapping[str, Any],
    engine: Mapping[str, Any],
    clock: str,
    cost: Mapping[str, Any] | None = None,
    kernels: str | None = None,
) -> dict[str, Any]:
    """The content of manifest.json. `labels` are what tables name the run by; `engine` the limits it ran under.

    `cost`: the rates of modelled durations, by which jumps in the log expand. `kernels`: which implementation ran.
    """
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "labels": dict(labels),
        "overrides": dict(overrides),
        "config": dict(config),
        "config_hash": config_hash(config),
        "seeds": dict(seeds),
        "clock": clock,
        "engine": dict(engine),
        "cost": cost,
        "kernels": kernels,
        "core": core.mode(),
        "logs": packed.codec().name,
        "policy": source_of(policy),
        "predictor": None if predictor is None else source_of(predictor),
        "workload": dict(workload),
        "versions": versions(),
        "git": git_state(core.PACKAGE.resolve().parents[1]),
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    write_whole(directory / MANIFEST, json.dumps(manifest, indent=1, default=str) + "\n")


def workload_facts(trace: Trace) -> dict[str, Any]:
    provenance = trace.provenance
    return {
        "name": trace.name,
        "requests": len(trace),
        "span_s": trace.span_s,
        "path": provenance.path,
        "format": provenance.format,
        "sha256": provenance.sha256,
        "assumed": list(provenance.assumed),
        "counts": dict(provenance.counts),
    }


def source_of(policy: object) -> dict[str, Any]:
    """Class, knobs, the distribution that brings it, and the hash of the file that defines it."""
    cls = type(policy)
    facts: dict[str, Any] = {"class": f"{cls.__module__}.{cls.__qualname__}"}
    facts["distribution"] = owners(cls.__module__.partition(".")[0])
    try:
        facts["sha256"] = hashlib.sha256(Path(inspect.getfile(cls)).read_bytes()).hexdigest()
    except (OSError, TypeError):  # defined in a notebook or at a prompt
        facts["sha256"] = None
    if hasattr(cls, "__dataclass_fields__"):
        facts["knobs"] = knobs_of(policy)
    return facts


def knobs_of(policy: Any) -> dict[str, Any]:
    """What a policy's constructor was given, as plain values; what is none by the dotted name of what it is."""
    given = {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    return {
        name: value if isinstance(value, (str, int, float, type(None))) else dotted(value)
        for name, value in given.items()
    }


def dotted(value: Any) -> str:
    """Module and name of a function or, for any other object, of its class."""
    value = value.func if isinstance(value, partial) else value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


@lru_cache
def owners(package: str) -> dict[str, str]:
    """The distributions that bring a top-level package, with their versions.

    Most are named as what they bring; only for the others is every installed file list read, which takes 0.3 s.
    """
    if (own := installed_version(package)) is not None:
        return {package: own}
    return {owner: version(owner) for owner in sorted(set(packages_distributions().get(package, [])))}


@lru_cache
def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "schedlab": __version__,
        **{name: installed_version(name) for name in PACKAGES},
    }


def installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@lru_cache
def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit of the sources and whether they were changed since; None where they are not a checkout."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None or _git(directory, "ls-files", "pyproject.toml") != "pyproject.toml":
        return None
    return {"commit": commit, "dirty": _git(directory, "status", "--porcelain", "--untracked-files=no") != ""}


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def hardware() -> dict[str, Any]:
    """The machine; GPUs are named only where a run has already loaded torch."""
    facts = {"machine": platform.machine(), "cpu": cpu_name(), "cpus": os.cpu_count(), "memory_bytes": memory_bytes()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def made_here(manifest: Mapping[str, Any] | None) -> bool:
    """Whether the manifest says that this machine and version made the run. A convenience: whoever wrote it may lie."""
    told, found = manifest or {}, hardware()
    machine, known = told.get("hardware") or {}, told.get("versions") or {}
    same = all(machine.get(name) == found[name] for name in ("machine", "cpu", "cpus", "memory_bytes"))
    return same and known.get("schedlab") == __version__


@lru_cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
