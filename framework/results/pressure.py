"""Whether capacity was short in a run: without a queue, preemptions or split prompts, policies have nothing to decide.

Counted as the rows come, so that a table of runs need not read their logs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from schedlab.framework.results.metrics import STATUSES, UNKNOWN
from schedlab.framework.results.tables import integers


class Pressure:
    """16 bytes for each row of the steps table in which a prompt was computed."""

    def __init__(self) -> None:
        self._steps = self._queued = 0
        self._prompts: list[np.ndarray] = []

    def add(self, steps: Any) -> None:
        """Rows of the steps table in order, as columns."""
        rows = np.array([integers(steps[name]) for name in _COLUMNS])
        repeat, waiting, prefills, now_ns, duration_ns = rows
        self._steps += int(repeat.sum())
        self._queued += int(repeat[waiting > 0].sum())
        self._prompts.append(np.array([now_ns, now_ns + duration_ns])[:, prefills > 0])

    def told(self, requests: np.ndarray) -> dict[str, float | int | None]:
        """`queue`: the share of steps that began with a request waiting; `split_prompts`: how many of `requests`
        (metrics.MEASURED) had a first grant that did not compute all of the prompt that the cache left.

        A grant that does emits a token when its step ends, or fails then.
        """
        now_ns, end_ns = np.concatenate([np.empty((2, 0), np.int64), *self._prompts], axis=1)
        begun = requests[requests["first_scheduled_ns"] != UNKNOWN]
        row = np.searchsorted(now_ns, begun["first_scheduled_ns"])
        known = row < len(now_ns)
        known[known] = now_ns[row[known]] == begun["first_scheduled_ns"][known]
        begun, ended_ns = begun[known], end_ns[row[known]]
        first_ns, failed = begun["first_token_ns"], begun["status"] == STATUSES.index("failed")
        emitted_ns = np.where((first_ns == UNKNOWN) & failed, begun["finished_ns"], first_ns)
        split = (emitted_ns == UNKNOWN) | (emitted_ns > ended_ns)
        return {"queue": self._queued / self._steps if self._steps else None, "split_prompts": int(split.sum())}


_COLUMNS = ("repeat", "waiting", "prefill_requests", "now_ns", "duration_ns")
