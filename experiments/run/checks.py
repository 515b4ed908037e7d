"""Checks values of a configuration against the type annotations of what they are passed to.

Checked are int, float, bool, str, None, collections, unions and Literal, of which knobs are made. Where a class is
expected, no plain value fits, but a mapping may be one of its kind that is still to be made. All else passes.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from schedlab.framework.errors import ConfigError

PLAIN = (bool, int, float, str, list, type(None))
"""What a configuration's values are, beside mappings."""


def check_arguments(name: str, values: Mapping[str, Any], target: Callable[..., Any]) -> None:
    """ConfigError for the first of `values` that does not fit the parameter of `target` of its name.

    `name` is the config node that holds them, empty for the top level.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected a mapping of keys to values, found {values!r}")
    hints = parameter_types(target)
    for key, value in values.items():
        hint = hints.get(key, Any)
        if not fits(value, hint):
            raise ConfigError(f"{name}.{key}: expected {spelled(hint)}, found {value!r}".lstrip("."))


def check_whole(measure: Mapping[str, Any], command: str) -> None:
    """ConfigError for a measured window, the node `measure` of the config, where `command` scales times."""
    for key, value in measure.items():
        if value is not None:
            raise ConfigError(f"measure.{key}: {command} scales the times of a whole workload; leave it null")


def check_single(config: Mapping[str, Any], command: str) -> None:
    """ConfigError for a fleet where `command` is about one engine."""
    for key in ("cluster", "router"):
        if config[key]:
            raise ConfigError(f"{key}: {command} is of a single engine; expected cluster=single and no router")


@lru_cache(maxsize=256)
def parameter_types(target: Callable[..., Any]) -> dict[str, Any]:
    """Parameter types of a class or function; none where they cannot be resolved."""
    try:
        if is_dataclass(target):  # whose fields may come from bases in other modules
            return get_type_hints(target)
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except NameError:
        return {}


def fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, choice) for choice in get_args(hint))
    if origin is tuple:
        return isinstance(value, list | tuple) and _fits_tuple(value, get_args(hint))
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(fits(item, get_args(hint)[1]) for item in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, types.NoneType):
        return isinstance(value, hint)
    return not (_is_made(hint) and isinstance(value, PLAIN))


def _fits_tuple(values: Sequence[Any], hints: tuple[Any, ...]) -> bool:
    if hints[1:] == (...,):
        return all(fits(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(fits, values, hints))


def _is_made(hint: Any) -> bool:
    """Whether only an object will do, which a configuration describes by a mapping."""
    own = inspect.isclass(hint) and hint.__module__.partition(".")[0] == "schedlab"
    return own or get_origin(hint) is Callable


def spelled(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(map(str, get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(spelled(choice) for choice in get_args(hint))
    if origin in (list, tuple, Sequence):
        return "a list"
    if origin is Mapping or _is_made(hint):
        return "a mapping"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    return words.get(hint, str(hint))
