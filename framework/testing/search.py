"""Looks for the smallest case that a check objects to. Knows hypothesis; knows no property."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from schedlab.framework.testing.case import Case, Violation

KEPT = 12


class OutOfTimeError(BaseException):
    """Ends a search from within; not an Exception, which hypothesis would take for a find."""


@dataclass(frozen=True)
class Effort:
    """How long to look: seconds of CPU time or a number of cases, whichever comes first, and how long to shrink."""

    seconds: float
    cases: int
    seed: int = 0
    shrink_s: float = 5.0

    def share(self, part: float) -> Effort:
        return replace(self, seconds=self.seconds * part, cases=max(1, round(self.cases * part)))


@dataclass
class Search:
    """One search for violations of the `wanted` names; `found` and `violation` are the smallest failure so far.

    `passed` keeps the first cases that went well, for other uses.
    """

    check: Callable[[Case], object]
    effort: Effort
    wanted: Collection[str]
    tried: int = 0
    passed: list[Case] = field(default_factory=list)
    found: Case | None = None
    violation: Violation | None = None

    def run(self, cases: SearchStrategy[Case]) -> Search:
        """Draw cases until one fails, then shrink it."""
        self._known: dict[str, bool] = {}
        self._ends = time.process_time() + self.effort.seconds
        options = settings(
            max_examples=self.effort.cases,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        with contextlib.suppress(NoSuchExample, OutOfTimeError):
            find(cases, self._fails, settings=options, random=Random(self.effort.seed))
        return self

    def _fails(self, case: Case) -> bool:
        key = case.literal()
        if key not in self._known:
            if time.process_time() > self._ends:
                raise OutOfTimeError
            self._known[key] = self._try(case)
        return self._known[key]

    def _try(self, case: Case) -> bool:
        self.tried += 1
        try:
            self.check(case)
        except Violation as violation:
            return self._note(case, violation)
        if len(self.passed) < KEPT and self.violation is None:
            self.passed.append(case)
        return False

    def _note(self, case: Case, violation: Violation) -> bool:
        if violation.name not in self.wanted:
            return False
        if self.violation is None:
            self._ends = time.process_time() + self.effort.shrink_s
        elif violation.name != self.violation.name:  # shrink to one fault, not from one to another
            return False
        if self.found is None or case.size <= self.found.size:
            self.found, self.violation = case, violation
        return True
