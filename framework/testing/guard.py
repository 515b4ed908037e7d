"""Watches what a policy reads while it decides: nothing of the engine's own, no clock, no global random numbers.

Requests and the step get guarded classes; calls of built-in clocks are seen by a profile function; the states of the
global random generators are compared. Slow, so it is put around a policy only where this is the question.
"""

from __future__ import annotations

import builtins
import gc
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from schedlab.framework.policy import Event, Policy
from schedlab.framework.request import EngineRequest, Request
from schedlab.framework.step import Step
from schedlab.framework.testing.case import OURS, Case, Subject, Violation
from schedlab.framework.testing.harness import Outcome

OF_A_REQUEST = frozenset(name for name in dir(Request) if not name.startswith("_"))
OF_A_STEP = frozenset(name for name in dir(Step) if not name.startswith("_")) - {"close"}
TRUSTED = (OURS.rstrip("."), "logging", "hydra")
"""Modules whose own reads are not the policy's; hydra has hooks that run wherever something is called."""


class Guard(Policy):
    """Hands every call on to `policy`, and raises a Violation of `inputs` for what it reads on the way."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.needs_prediction = policy.needs_prediction  # type: ignore[misc]
        self._seen: list[str] = []

    def schedule(self, step: Step) -> None:
        guarded: Any = GuardedStep(step)
        with self._watched("schedule"):
            self.policy.schedule(guarded)

    def observe(self, event: Event) -> None:
        with self._watched("observe"):
            self.policy.observe(event)

    @contextmanager
    def _watched(self, method: str) -> Iterator[None]:
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # its callbacks, which may read a clock, run wherever the policy is
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()
        if self._seen:
            raise Violation("inputs", f"{type(self.policy).__name__}.{method} {self._seen[0]}")

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (what := _forbidden(function)) and not _trusted(frame):
            self._seen.append(f"{what} (at {frame.f_code.co_filename}:{frame.f_lineno})")


def _forbidden(function: Any) -> str | None:
    """What calling the built-in `function` does that a policy may not do."""
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    if module == "time":
        return f"called time.{name}()"
    if name in ("now", "utcnow", "today") and getattr(function, "__self__", None).__class__ is type:
        return f"called {function.__qualname__}()"
    if function is builtins.id:
        return "called id(), which differs from run to run"
    if function is builtins.open:
        return "opened a file"
    if name in ("urandom", "getrandom"):
        return f"called os.{name}()"
    return None


def _random_states() -> tuple[object, bytes, int]:
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), int(state["pos"])


def _trusted(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == name or module.startswith(f"{name}.") for name in TRUSTED)


class _Depth:
    """Above 0 while a public attribute is being read, whose getter reads the engine's own."""

    value = 0


def _read(of: str, owner: object, name: str, public: frozenset[str]) -> Any:
    if name in public:
        _Depth.value += 1
        try:
            return object.__getattribute__(owner, name)
        finally:
            _Depth.value -= 1
    if not _Depth.value and not name.startswith("__") and not _trusted(sys._getframe(2)):
        raise Violation("inputs", f"read {of}.{name}, which is the engine's own")
    return object.__getattribute__(owner, name)


def _write(of: str, owner: object, name: str, value: Any) -> None:
    if not _Depth.value and not name.startswith("__") and not _trusted(sys._getframe(2)):
        raise Violation("inputs", f"set {of}.{name}")
    object.__setattr__(owner, name, value)


class GuardedKind(type):
    """The class of `GuardedRequest`: what an object hides must not be had through its class."""

    def __getattribute__(cls, name: str) -> Any:
        if (
            not _Depth.value
            and not name.startswith("__")
            and name not in OF_A_REQUEST
            and not _trusted(sys._getframe(1))
        ):
            raise Violation("inputs", f"read {name} of a request's class, which is the engine's own")
        return super().__getattribute__(name)


class GuardedRequest(EngineRequest, metaclass=GuardedKind):
    """A request whose readers outside of the engine may read what `Request` declares, and set nothing."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        return _read("request", self, name, OF_A_REQUEST)

    def __setattr__(self, name: str, value: Any) -> None:
        _write("request", self, name, value)


class GuardedStep:
    """Stands for a step; its users outside of the engine may use what design and docstrings name, and set nothing."""

    __slots__ = ("step",)

    def __init__(self, step: Step) -> None:
        object.__setattr__(self, "step", step)

    def __getattribute__(self, name: str) -> Any:
        step = object.__getattribute__(self, "step")
        if name not in OF_A_STEP and not name.startswith("__") and not _trusted(sys._getframe(1)):
            raise Violation("inputs", f"read step.{name}, which is the engine's own")
        return getattr(step, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Violation("inputs", f"set step.{name}")


def reads_only_what_it_may(subject: Subject, case: Case) -> Outcome:
    """Run the case under guard. Violation of `inputs`."""
    states, guard, threads = _random_states(), Guard(subject.make()), threading.active_count()
    outcome = subject.run(case, policy=guard, kind=GuardedRequest, audit_every=1 << 60)
    if _random_states() != states:
        raise Violation("inputs", f"{type(guard.policy).__name__} drew from a global random generator")
    if threading.active_count() > threads:
        raise Violation("inputs", f"{type(guard.policy).__name__} started a thread")
    return outcome
