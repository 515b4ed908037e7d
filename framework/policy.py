"""What a policy is: one method that is called every step, one that hears what happened, and what it declares it needs.

Knows the shape of a policy; knows no policy. The verbs are in step.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from schedlab.framework.errors import ConfigError

if TYPE_CHECKING:
    from schedlab.framework.request import Request
    from schedlab.framework.step import PreemptMode, Step


@dataclass(frozen=True, slots=True)
class Arrived:
    """`request` became visible and waits."""

    request: Request


@dataclass(frozen=True, slots=True)
class Admitted:
    """`request` runs now; `cached_tokens` of it were found in the prefix cache."""

    request: Request
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """One commit: `prefills` are (request, tokens), `decodes` got one token in each of `steps` equal steps."""

    prefills: tuple[tuple[Request, int], ...]
    decodes: tuple[Request, ...]
    steps: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """`request` waits again; `mode` is what was done, not what was asked for."""

    request: Request
    mode: PreemptMode


@dataclass(frozen=True, slots=True)
class Finished:
    """`request` ended by itself: finished, length_capped or failed (see its state)."""

    request: Request


@dataclass(frozen=True, slots=True)
class Aborted:
    """`request` was withdrawn by its client."""

    request: Request


@dataclass(frozen=True, slots=True)
class Rejected:
    """`request`, which waited, was turned away by the policy."""

    request: Request


Event = Arrived | Admitted | Progressed | Preempted | Finished | Aborted | Rejected


class Policy:
    """Decides what runs in each engine iteration.

    A subclass is usually a dataclass whose fields are its knobs, and so its YAML. It may keep state of its own, reads
    time only from `step.now`, and must be deterministic: no sets in decisions, no `id()`, no global random numbers.
    """

    needs_prediction: ClassVar[bool] = False
    """Set when decisions read `predicted_output_tokens`; a run without a predictor is then refused at its start."""

    no_bound_on: ClassVar[Mapping[str, str]] = {}
    """What a steady load may put off for ever by design, each with why; the conformance kit then reports it and fails
    nobody. Keys: `waiting` (the end of a request that others overtake) and `inter_token_latency` (the next token of one
    that decodes).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "unbounded" in cls.__dict__:
            warnings.warn(f"{cls.__name__}.unbounded is called no_bound_on", DeprecationWarning, stacklevel=2)
            old: Mapping[str, str] = cls.__dict__["unbounded"]
            cls.no_bound_on = {"inter_token_latency" if key == "gap" else key: why for key, why in old.items()}

    def schedule(self, step: Step) -> None:
        """Say what this step computes by calling verbs on `step`; `step` is dead when this returns."""
        raise NotImplementedError

    def observe(self, event: Event) -> None:
        """Hear what happened since the last call; optional."""


def check_policy(policy: object) -> None:
    """ConfigError unless `policy` is an object of a class of policies that says what runs."""
    if isinstance(policy, type):
        raise ConfigError(
            f"policy: expected an object, found the class {policy.__name__}: make one, {policy.__name__}()"
        )
    if isinstance(policy, str):
        raise ConfigError(
            f"policy: expected an object of a class of policies, such as FCFS(), found the text {policy!r}"
        )
    name = type(policy).__name__
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy: {name} is not derived from schedlab.Policy: class {name}(Policy)")
    if type(policy).schedule is Policy.schedule:
        raise ConfigError(f"policy: {name} has no method schedule(self, step), which says what runs")
