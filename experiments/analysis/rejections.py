"""Why nobody was served, of a run that turned every request away."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from schedlab.framework.results.groups import TURNED_AWAY
from schedlab.framework.results.tables import RunTables


def why_nothing_was_served(tables: RunTables) -> str | None:
    """The most frequent reason, on one line; None for a run that served a request or was offered none."""
    summary = tables.summary
    offered = summary["requests/offered"]
    if not offered or summary["requests/rejected"] != offered:
        return None
    reasons = _logged(tables) if tables.result["record"] == "full" else _summarised(summary)
    reason, count = reasons.most_common(1)[0]
    return f"every request was rejected; {count:,} of {sum(reasons.values()):,}: {reason}"


def _logged(tables: RunTables) -> Counter[str]:
    """Reasons by their first wording: those that differ only in a number, as the tokens of a request, are one."""
    requests = tables.requests
    given = [
        reason or "no reason given"
        for status, reason in zip(requests["status"], requests["reason"], strict=True)
        if status == "rejected"
    ]
    wordings: dict[str, str] = {}
    return Counter(wordings.setdefault(re.sub(r"\d+", "0", reason), reason) for reason in given)


def _summarised(summary: Mapping[str, Any]) -> Counter[str]:
    """Reasons of a run without logs, whose summary counts only requests that would fit."""
    counts = Counter({reason: summary.get(f"requests/{reason}") or 0 for reason in TURNED_AWAY})
    too_large = "empty, or beyond engine.max_model_len or the KV pool (record=full tells which)"
    return counts + Counter({too_large: summary["requests/rejected"] - counts.total()})
