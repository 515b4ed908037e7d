"""Whether capacity was short in a run: without a queue, preemptions or split prompts, policies have nothing to decide.

Knows the steps, requests and decisions of a run.
"""

from __future__ import annotations

import numpy as np

from schedlab.framework.results.tables import RunTables


def pressure(tables: RunTables) -> dict[str, float | int | None]:
    """`pressure/queue`: share of the steps that began with a request waiting; `pressure/split_prompts`: how many."""
    steps = tables.steps
    total = int(steps["repeat"].sum())
    queued = int(steps["repeat"][steps["waiting"] > 0].sum())
    return {"pressure/queue": queued / total if total else None, "pressure/split_prompts": split_prompts(tables)}


def split_prompts(tables: RunTables) -> int:
    """Requests whose first grant did not compute all of the prompt that the prefix cache left."""
    requests = tables.requests
    to_compute = requests["prompt_tokens"] - np.nan_to_num(requests["cached_tokens"])
    first: dict[str, int] = {}
    for grants in tables.decisions["grants"]:
        for request_id, tokens in grants:
            first.setdefault(request_id, tokens)
    needed = zip(requests["request_id"], to_compute.tolist(), strict=True)
    return sum(first.get(request_id, tokens) < tokens for request_id, tokens in needed)
