"""Whether capacity was short in a run: without a queue, preemptions or split prompts, policies have nothing to decide."""

from __future__ import annotations

import numpy as np

from schedlab.framework.request import NS
from schedlab.framework.results.tables import RunTables


def pressure(tables: RunTables) -> dict[str, float | int | None]:
    """`pressure/queue`: share of the steps that began with a request waiting; `pressure/split_prompts`: how many."""
    steps = tables.steps
    total = int(steps["repeat"].sum())
    queued = int(steps["repeat"][steps["waiting"] > 0].sum())
    return {"pressure/queue": queued / total if total else None, "pressure/split_prompts": split_prompts(tables)}


def split_prompts(tables: RunTables) -> int:
    """Requests whose first grant did not compute all of the prompt that the prefix cache left.

    A grant that does emits a token when its step ends; one that does not leaves its request without a token then.
    """
    steps, requests = tables.steps, tables.requests
    begun = ~np.isnan(requests["first_scheduled_s"])
    first_ns, token_ns, finished_ns = (
        np.rint(requests[name][begun] * NS) for name in ("first_scheduled_s", "first_token_s", "finished_s")
    )
    row = np.searchsorted(steps["now_ns"], first_ns)
    known = (row < len(steps["now_ns"])) & (steps["now_ns"].take(row, mode="clip") == first_ns)
    end_ns = first_ns[known] + steps["duration_ns"][row[known]]
    failed = np.array([status == "failed" for status in requests["status"]], dtype=bool)[begun]
    token_ns = np.where(np.isnan(token_ns), np.where(failed, finished_ns, np.inf), token_ns)[known]
    return int((token_ns > end_ns).sum())
