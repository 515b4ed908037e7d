"""What a run returns to a search: a figure of its summary, worse than any other where a limit is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedlab.experiments.analysis.metrics import check_metric
from schedlab.framework.errors import ConfigError

FAR = 1e9
"""Beyond every figure; how far a limit is exceeded adds to it, so that a search is led back."""
WORST = 1e15
"""Of a run that failed, or whose figures are unknown."""


@dataclass(frozen=True)
class Objective:
    """`conf/config.yaml: objective`. `at_most` are limits of summary keys; `direction` is minimize or maximize."""

    figures: str | Sequence[str] | None = None
    at_most: Mapping[str, float] | None = None
    direction: str = "minimize"

    def __post_init__(self) -> None:
        if self.direction not in ("minimize", "maximize"):
            raise ConfigError(f"objective.direction={self.direction}: expected minimize or maximize")
        for key in self._asked:
            check_metric(key, "objective.figures")
        for key, limit in (self.at_most or {}).items():
            check_metric(key, "objective.at_most")
            if not limit > 0:
                raise ConfigError(f"objective.at_most: expected a limit above 0 for {key}, found {limit}")

    @property
    def _asked(self) -> Sequence[str]:
        return [self.figures] if isinstance(self.figures, str) else self.figures or ()

    def of(self, summary: Mapping[str, Any] | None) -> float | list[float] | None:
        """One value, or one for each of several figures; None where nothing is asked for.

        A figure or a limited one that the summary does not know, and a run without a summary, count as the worst.
        """
        if self.figures is None:
            return None
        if isinstance(self.figures, str):
            return self._value(self.figures, summary)
        return [self._value(key, summary) for key in self.figures]

    def unknown(self, summary: Mapping[str, Any]) -> list[str]:
        """What is asked for and not known of a run, as where nobody finished."""
        asked = (*self._asked, *(self.at_most or ())) if self.figures is not None else ()
        return [key for key in asked if summary[key] is None]

    def excess(self, summary: Mapping[str, Any]) -> float:
        """Shares by which limits are exceeded, summed; 0 where all are kept."""
        limits = self.at_most or {}
        return float(sum(max(summary[name] / limit - 1, 0.0) for name, limit in limits.items()))

    def _value(self, key: str, summary: Mapping[str, Any] | None) -> float:
        sign = 1 if self.direction == "minimize" else -1
        if summary is None or self.unknown(summary):
            return sign * WORST
        excess = self.excess(summary)
        return sign * min(FAR * (1 + excess), WORST) if excess else float(summary[key])
