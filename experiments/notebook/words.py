"""From names, words and objects to an experiment: `run("fcfs", "poisson", "virtual", model="llama3.1-8b")`.

Names and words are those of the command line and mean the same. What is an object is taken as it is, and no word may
set what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from schedlab.experiments.run import compose
from schedlab.experiments.run.api import Experiment
from schedlab.experiments.run.job import FLEET_GROUPS, GROUPS, experiment_of, settings_of
from schedlab.framework.errors import ConfigError

PARTS = ("policy", "workload", "engine", "slo", "predictor", "admission", "observed_at")
"""What may be an object."""
OF_THE_ENGINE = ("engine", "model", "hardware", "serving", "profile")
"""What an engine that is an object holds."""
OF_COMMANDS = ("wandb", "plots", "progress", "timeline", "resume", "objective", "hydra")
"""What only commands do: reports, pictures, folders."""
WINDOW = ("start_s", "stop_s")
PLAIN = re.compile(r"[A-Za-z_./][\w./:@+-]*")
"""Texts that a word may hold unquoted."""
OTHERWISE_READ = ("null", "true", "false", "nan", "inf")


class NoEstimator:
    """Of a policy that was named beside an engine that is an object: nothing tells how long its steps take."""

    def step_s(self, *_: int, **__: int) -> float:
        raise ConfigError("policy: it asks how long steps take, by model= and hardware=; name the engine as well")

    def copy_s(self, tokens: int) -> float:
        return self.step_s(tokens)


def experiment(parts: Mapping[str, Any], words: Sequence[str], more: Mapping[str, Any]) -> Experiment:
    """Of `parts` by their place, each a name, an object or None; `words` of the command line; `more` keys with their
    values, two underscores for each dot. ConfigError for what names nothing, and for what an object would not heed."""
    objects = {place: part for place, part in parts.items() if part is not None and not isinstance(part, str)}
    told = told_words(parts, words, more)
    for text in told:
        refuse_ignored(text, objects)
    config, chosen = compose.composed(told)
    resolved = compose.resolve(config)
    if "engine" in objects and "estimator" in resolved["policy"]:
        resolved["policy"]["estimator"] = {"_target_": f"{__name__}.{NoEstimator.__name__}"}
    if resolved["cluster"] and (own := {"policy", "engine"} & objects.keys()):
        raise ConfigError(f"cluster: replicas are built from names; {min(own)} is an object")
    groups = FLEET_GROUPS if resolved["cluster"] else GROUPS
    made = experiment_of(resolved, settings_of(resolved), objects)
    pairs = (text.lstrip("+").partition("=") for text in told)
    return replace(
        made,
        config=described(resolved, chosen, objects) if objects else resolved,
        labels={place: chosen[place] for place in groups if place in chosen and place not in objects},
        overrides={key: value for key, _, value in pairs},
    )


def told_words(parts: Mapping[str, Any], words: Sequence[str], more: Mapping[str, Any]) -> list[str]:
    """All as the command line has it."""
    for text in words:
        if not isinstance(text, str):
            raise ConfigError(f"run: expected words as key=value after policy, workload and engine, found {text!r}")
    named = [f"{place}={part}" for place, part in parts.items() if isinstance(part, str)]
    return [*named, *words, *(f"{dotted(key)}={written(key, value)}" for key, value in more.items())]


def dotted(key: str) -> str:
    return f"measure.{key}" if key in WINDOW else key.replace("__", ".")


def written(key: str, value: Any) -> str:
    """A plain value as Hydra reads it from a word. ConfigError for any other."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in OTHERWISE_READ else quoted(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{written(key, inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(written(key, inner) for inner in value) + "]"
    raise ConfigError(f"{dotted(key)}: expected a plain value, a list or a mapping, found {value!r}")


def quoted(text: str) -> str:
    """In single quotes; a backslash before one is escaped as well."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"


def refuse_ignored(text: str, objects: Mapping[str, Any]) -> None:
    """ConfigError for a word that sets a part which is an object, or what Python leaves to its caller."""
    key = text.lstrip("+~").partition("=")[0]
    top = re.split(r"[./@]", key)[0]
    if top in OF_COMMANDS:
        raise ConfigError(f"{key}: the commands heed it; from Python it would change nothing")
    held = "engine" if top in OF_THE_ENGINE else top
    if held in objects:
        raise ConfigError(f"{key}: {held} is an object, {type(objects[held]).__name__}; what it holds is set there")


def described(resolved: Mapping[str, Any], chosen: Mapping[str, str], objects: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, objects by the names of their classes. The policy is named as well, for a run that rests on
    an object cannot be built again from its manifest."""
    named = {place: getattr(part, "name", type(part).__name__) for place, part in objects.items()}
    return {**resolved, "policy": chosen["policy"], **named}
