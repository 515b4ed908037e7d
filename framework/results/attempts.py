"""Books on what clients wanted, where they leave or try again: a request is one of these, whatever its attempts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from schedlab.framework.request import SLO, Attempt
from schedlab.framework.results.metrics import (
    Measurement,
    Summary,
    distribution,
    e2e_ns,
    meets_slo,
    per,
    served,
    ttft_ns,
)

CLIENT_FIGURES = ("logical", "attempts", "given_up")
"""What `offered/…` counts, beside the times `offered/ttft/…` and `offered/e2e/…`."""


class Attempts:
    """The last attempt at each request, and when the first arrived."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int, int]] = {}

    def add(self, logical_id: str, tried: Attempt, row: int) -> None:
        """An attempt ended, in `row` of all requests in the order of their ends."""
        self._last[logical_id] = tried.first_arrival_ns, tried.number + 1, row

    def figures(self, requests: np.ndarray, slos: Sequence[SLO], measurement: Measurement) -> Summary:
        """Of what was first asked for in the measured window; `requests` are the MEASURED rows of all attempts.

        Times count from the first arrival to what the last attempt brought; goodput is what met its limits by them.
        """
        if not self._last:
            return {}
        first, attempts, rows = np.array(list(self._last.values()), dtype=np.int64).T
        wanted = requests[rows]
        wanted["arrival_ns"] = first
        if measurement.windowed:
            inside = measurement.inside(first)
            wanted, attempts = wanted[inside], attempts[inside]
        answered, met = served(wanted), int(meets_slo(wanted, slos).sum()) if slos else None
        return {
            "offered/logical": len(wanted),
            "offered/attempts": int(attempts.sum()),
            "offered/given_up": int((~answered).sum()),
            "goodput/share": None if met is None else per(met, len(wanted)),
            **distribution("offered/ttft", ttft_ns(wanted[answered])),
            **distribution("offered/e2e", e2e_ns(wanted)),
        }
