"""Objects made from what the folder of a run says of them. The folder may be a stranger's: it is data.

What it names is made only if it is meant for its place: schedlab's own parts, and policies, predictors and parts of
these that an installed distribution with an entry point in `schedlab.conf` defines. Knobs are checked against the
parameters before anything is called; text is never interpolated. Anything else takes `trust`, which tells what it
imports.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from schedlab.experiments.run.checks import check_arguments
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.policy import Policy

PARTS: Mapping[str, tuple[str, ...]] = {
    "policy": ("schedlab.framework.vllm.own.OwnScheduler",),
    "engine": tuple(f"schedlab.experiments.engines.{name}" for name in ("cpu", "cuda", "stub", "virtual")),
    "hardware": ("schedlab.framework.cost.hardware.Hardware",),
    "slo": ("schedlab.framework.request.SLO",),
    "estimator": (
        "schedlab.experiments.estimators.ConfiguredEstimator",
        "schedlab.framework.cost.estimator.LinearEstimator",
    ),
    "admission": ("schedlab.framework.admission.TokenBucket",),
    "predictor": tuple(
        f"schedlab.framework.predictors.{name}Predictor" for name in ("Max", "Noisy", "Oracle", "Quantile")
    ),
    "victim": tuple(
        f"schedlab.policies.victims.{name}" for name in ("least_computed", "most_computed", "newest", "oldest")
    ),
}
"""What schedlab has for each place; policies are all of `schedlab.policies`, and what stands for vLLM's own."""
METHODS: Mapping[str, tuple[str, ...]] = {
    "predictor": ("predict", "observe"),
    "estimator": ("step_s", "copy_s"),
    "admission": ("refuse",),
}
"""What the class of another distribution must have to stand at a place."""
WORDS = ("_target_", "_partial_", "_convert_", "_recursive_")
"""Keys of Hydra's that a node may have; the last two change nothing for plain values."""


def rebuild(node: Mapping[str, Any], place: str, *, trust: bool = False) -> Any:
    """The object that `node` of a manifest's configuration describes. ConfigError for what is not meant for `place`."""
    target = node.get("_target_")
    found = find(target, place, trust=trust)
    if words := [key for key in node if str(key).startswith("_") and key not in WORDS]:
        raise ConfigError(f"{place}.{words[0]}: expected a knob of {target}")
    given = {str(key): _value(value, f"{place}.{key}", trust) for key, value in node.items() if key not in WORDS}
    check_knobs(found, given, place)
    if node.get("_partial_"):
        return partial(found, **given)
    if not inspect.isclass(found) and target not in PARTS["engine"] and not trust:
        raise ConfigError(f"{place}: {target} is a function, which is named and not called here")
    try:
        return found(**given)
    except SchedlabError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{place} ({target}): {type(error).__name__}: {error}") from error


def _value(value: Any, place: str, trust: bool) -> Any:
    if isinstance(value, Mapping):
        if "_target_" in value:
            return rebuild(value, place, trust=trust)
        return {key: _value(inner, f"{place}.{key}", trust) for key, inner in value.items()}
    return [_value(inner, place, trust) for inner in value] if isinstance(value, list) else value


def check_knobs(found: Any, given: Mapping[str, Any], place: str) -> None:
    """ConfigError for a knob that `found` does not take, or of another type."""
    parameters = inspect.signature(found).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if unknown := [key for key in given if key not in parameters and not takes_any]:
        raise ConfigError(f"{place}.{unknown[0]}: no such knob; {found.__name__} has {', '.join(parameters)}")
    check_arguments(place, given, found)


def find(target: Any, place: str, *, trust: bool = False) -> Any:
    """The class or function at the dotted path `target`, imported only if it is meant for `place` or trusted."""
    from schedlab.experiments.run.compose import locate

    if not isinstance(target, str):
        raise ConfigError(f"{place}: expected the dotted name of a class, found {target!r}")
    if not _may_be_imported(target, place):
        if not trust:
            raise ConfigError(
                f"{place}: {target} is neither schedlab's for this place nor of an installed package of policies; "
                "--trust imports it, and so runs what it says"
            )
        print(f"trusted: {place} imports {target}", file=sys.stderr)
        return locate(target, place)
    found = locate(target, place)
    if not trust and not _is_meant(found, target, place):
        raise ConfigError(f"{place}: {target} is no part that can stand there; --trust takes it all the same")
    return found


def _may_be_imported(target: str, place: str) -> bool:
    package = target.partition(".")[0]
    if package == "schedlab":
        return target.startswith("schedlab.policies.") or target in PARTS.get(place.rpartition(".")[2], ())
    return package in plugins()


def _is_meant(found: Any, target: str, place: str) -> bool:
    """Whether what an import gave is defined where its name says, and is of the kind that stands at `place`."""
    package = target.partition(".")[0]
    own = str(getattr(found, "__module__", "")).partition(".")[0] == package
    if not own or target in PARTS.get(place.rpartition(".")[2], ()):
        return own
    if not inspect.isclass(found):
        return False
    if place == "policy":
        return issubclass(found, Policy)
    return package != "schedlab" and all(hasattr(found, name) for name in METHODS.get(place.rpartition(".")[2], ()))


def plugins() -> set[str]:
    """Top-level packages of installed distributions that bring configurations, which every run imports anyway."""
    from hydra_plugins.schedlab_searchpath.plugin import declared_entries

    return {entry.value.partition(".")[0] for entry in declared_entries()}


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a plain configuration."""
    *path, last = key.split(".")
    for name in path:
        config = config.setdefault(name, {})
    config[last] = value


def check_literal(node: Any, place: str) -> None:
    """ConfigError where text of a folder would be worked out by OmegaConf, as `${oc.env:NAME}`, or names a part that
    is not meant for its place."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            find(node["_target_"], place)
        for key, value in node.items():
            check_literal(value, f"{place}.{key}")
    elif isinstance(node, str) and "${" in node:
        raise ConfigError(f"{place}: expected a plain value in the manifest, found {node}")
