"""How a policy makes room, as its users configure it: what becomes of a victim's memory, and who the victim is.

Knows what a victim has computed and what an estimator says of it; picks no order of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

from schedlab.framework.cost.estimator import Estimator
from schedlab.framework.policy import Policy
from schedlab.framework.request import Request
from schedlab.framework.step import PreemptMode, Step
from schedlab.policies.victims import Victims, newest

Mode = PreemptMode | Callable[[Request], PreemptMode]
"""What becomes of a victim's keys and values: a fixed mode, or a rule."""


def preempt(step: Step, victim: Request, mode: Mode) -> None:
    """Preempt `victim` in the mode that `mode` is or says."""
    step.preempt(victim, mode if isinstance(mode, str) else mode(victim))


def cheaper(estimator: Estimator) -> Callable[[Request], PreemptMode]:
    """Swap where copying the victim's keys and values out and in again takes less time than computing them again.

    Both are charged to all that run: copies to the steps that they travel in, a recompute as one prefill of as many
    tokens. What the prefix cache would give back is not counted: it may be gone by then.
    """

    def mode(victim: Request) -> PreemptMode:
        tokens = victim.num_computed_tokens
        return "swap" if 2 * estimator.copy_s(tokens) < estimator.step_s(tokens) else "recompute"

    return mode


@dataclass(kw_only=True)
class Preempting(Policy):
    """A policy that preempts. `preempt_mode=auto` takes what `estimator` says is cheaper for each victim."""

    preempt_mode: Literal["recompute", "swap", "auto"] = "recompute"
    estimator: Estimator | None = None

    def __post_init__(self) -> None:
        if self.preempt_mode not in ("recompute", "swap", "auto"):
            raise ValueError(f"policy.preempt_mode: expected recompute, swap or auto, found {self.preempt_mode}")
        if self.preempt_mode == "auto" and self.estimator is None:
            raise ValueError("policy.preempt_mode: auto needs policy.estimator, found none")
        if self.preempt_mode != "auto":
            self.estimator = None  # what is never asked makes no difference between two policies

    @cached_property
    def mode(self) -> Mode:
        """What the helpers of policies/common.py take."""
        if self.preempt_mode != "auto":
            return self.preempt_mode
        assert self.estimator is not None
        return cheaper(self.estimator)


@dataclass(kw_only=True)
class ChoosingVictims(Preempting):
    """A policy whose order says nothing of whom to preempt: `victim` is a rule of policies/victims.py or your own."""

    victim: Victims = newest

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.victim, partial) and not (self.victim.args or self.victim.keywords):
            self.victim = self.victim.func  # as a configuration hands over a function
