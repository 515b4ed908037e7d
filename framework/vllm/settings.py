"""What a vLLM engine is told about its policy: a mapping in `additional_config["schedlab"]`, or JSON in a variable.

    {"_target_": "schedlab.policies.fair.Fair", "chunk_size": 256, "predictor": {"_target_": …}, "publish": "commit"}

Everything but `predictor`, `publish` and `on_fault` is a knob of the policy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.policy import Policy
from schedlab.framework.predictors import Predictor

KEY = "schedlab"
VARIABLE = "SCHEDLAB_POLICY"
CHOICES = {"publish": ("commit", "schedule"), "on_fault": ("raise", "fallback")}


@dataclass(frozen=True, slots=True)
class Settings:
    """`publish`: when others may reuse a computed block, `commit` when its step has run, `schedule` at once, as vLLM
    does. `on_fault`: what becomes of a step in which the policy breaks a rule, `raise`, or `fallback` to vLLM's own
    scheduler for that step.
    """

    policy: Policy
    predictor: Predictor | None = None
    publish: str = "commit"
    on_fault: str = "raise"

    def __post_init__(self) -> None:
        for key, allowed in CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{KEY}.{key}: expected {' or '.join(allowed)}, found {getattr(self, key)!r}")
        if self.policy.needs_prediction and self.predictor is None:
            raise ConfigError(
                f"policy {type(self.policy).__name__} reads predicted_output_tokens: expected {KEY}.predictor, a "
                "mapping with _target_, found none"
            )


def read_settings(additional_config: Mapping[str, Any] | None) -> Settings:
    """From vLLM's `additional_config`, or from the environment variable where it says nothing."""
    told = (additional_config or {}).get(KEY)
    if told is None:
        told = _from_environment()
    if not isinstance(told, Mapping) or "_target_" not in told:
        raise ConfigError(f"{KEY}: expected a mapping with _target_, the policy's class; found {told!r}")
    keys = dict(told)
    options = {key: keys.pop(key) for key in CHOICES if key in keys}
    predictor = keys.pop("predictor", None)
    policy = build(keys, KEY)
    if not isinstance(policy, Policy):
        raise ConfigError(f"{KEY}._target_={told['_target_']}: expected a Policy, found {type(policy).__name__}")
    return Settings(policy, None if predictor is None else build(predictor, f"{KEY}.predictor"), **options)


def _from_environment() -> Any:
    text = os.environ.get(VARIABLE)
    if text is None:
        raise ConfigError(f'no policy: set additional_config["{KEY}"] or {VARIABLE} to a mapping with _target_')
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{VARIABLE}: expected JSON, found {text!r}: {error}") from None


def build(node: Any, name: str) -> Any:
    """`node` with every mapping that has a `_target_` replaced by what the target makes of the other keys."""
    if isinstance(node, list):
        return [build(inner, f"{name}[{i}]") for i, inner in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    keys = {key: build(value, f"{name}.{key}") for key, value in node.items() if key not in ("_target_", "_partial_")}
    if "_target_" not in node:
        return keys
    target = _locate(node["_target_"], name)
    if node.get("_partial_"):
        return partial(target, **keys)
    try:
        return target(**keys)
    except SchedlabError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} ({node['_target_']}): {error}") from error


def _locate(target: Any, name: str) -> Any:
    module, _, attribute = str(target).rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name}._target_={target}: {type(error).__name__}: {error}") from error
