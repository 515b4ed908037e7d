"""What a reader of a report asks first: which policy, by how much, how sure; and which requests are behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedlab.experiments.analysis.table import FIGURES
from schedlab.framework.results.tables import RunTables

MANYFOLD = 9.0
"""Relative change from which on a factor is clearer than per cent."""
SLOWEST = 8
"""Requests of each variant that are shown."""
UNITS = (" ms", " req/s", " tok/s")
STAMPS = ("arrival_s", "first_scheduled_s", "first_token_s", "finished_s", "delivery_s")
ORDER = ("better", "worse", "inconclusive")
ONE_PAIR = "one pair judges nothing, replicates would (seed=range(8))"


def written_change(finding: Mapping[str, Any], value: float) -> str:
    """A change as verdicts.json has it: relative where its scale is a ratio."""
    if finding["scale"] != "ratio":
        return f"{value:+.4g}"
    return f"{value:+.1%}" if value < MANYFOLD else f"{1 + value:,.1f}×"


# ---- which policy ----


def sentences(verdicts: Mapping[str, Any] | None) -> list[str]:
    """An answer to each question of verdicts.json by its primary metric, what is decided first."""
    answers = [(answer, primary_of(answer)) for answer in (verdicts or {}).get("answers", ())]
    told = [(found["verdict"], sentence(answer, found)) for answer, found in answers if found is not None]
    return [text for _, text in sorted(told, key=lambda one: (*ORDER, one[0]).index(one[0]))]


def primary_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: list[Mapping[str, Any]] = [finding for finding in answer["findings"] if finding["primary"]]
    return found[0] if found else None


def sentence(answer: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    ours, other, verdict, pairs = answer["variant"], answer["baseline"], found["verdict"], answer["pairs"]
    change = words_of(found["metric"])
    if found["change"] is not None:
        change += f" {written_change(found, found['change'])}"
    if found["low"] is not None:
        low, high = (written_change(found, found[end]) for end in ("low", "high"))
        change += f", between {low} and {high} with {found['level']:.0%} confidence"
    if verdict in ("better", "worse"):
        told = f"{ours} is {verdict} than {other}: {change} ({pairs} pairs)."
    elif verdict == "inconclusive":
        enough = f"about {found['needed']:,}" if found["needed"] else "more than 10,000"
        told = f"It is open whether {ours} or {other} is better: {change}; {pairs} pairs, {enough} would decide."
    elif verdict in ("small", "equal"):
        told = f"{ours} and {other} do not differ by what matters: {change} ({pairs} pairs)."
    else:
        told = f"{ours} against {other} is not judged: {change}; {answer['refused'] or ONE_PAIR}."
    return f"{answer['condition']}: {told}" if answer["condition"] else told


def words_of(metric: str) -> str:
    """`TTFT p99` of ttft/p99."""
    heading = next((figure.heading for figure in FIGURES if figure.key == metric), metric)
    for unit in UNITS:
        heading = heading.removesuffix(unit)
    return heading


def place_of(variant: str, condition: str, names: Sequence[str]) -> int | None:
    """Which of `names` a question's variant is, from 1 on: that of the same words, in whatever order."""
    words = set(f"{variant} {condition}".split())
    return next((place for place, name in enumerate(names, 1) if set(name.split()) == words), None)


# ---- which requests ----


@dataclass(frozen=True)
class SlowRequest:
    """Seconds, from its intended arrival on; `tpot` is None where there was one token."""

    request_id: str
    arrival: float
    prompt_tokens: int
    output_tokens: int
    queue: float
    prefill: float
    decode: float
    preemptions: int

    @property
    def ttft(self) -> float:
        return self.queue + self.prefill

    @property
    def tpot(self) -> float | None:
        return self.decode / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def whole(self) -> float:
        return self.ttft + self.decode


def slowest(tables: RunTables, most: int = SLOWEST) -> list[SlowRequest]:
    """The requests that waited longest for their first token, those first; equals in order of arrival."""
    rows = tables.requests
    ttft = rows["first_token_s"] - rows["arrival_s"] + rows["delivery_s"]
    order = sorted(np.flatnonzero(~np.isnan(ttft)).tolist(), key=lambda row: (-ttft[row], rows["arrival_s"][row]))
    return [_slow(rows, row) for row in order[:most]]


def _slow(rows: Mapping[str, Any], row: int) -> SlowRequest:
    arrival, scheduled, first, finished, delivery = (float(rows[name][row]) for name in STAMPS)
    return SlowRequest(
        request_id=str(rows["request_id"][row]),
        arrival=arrival,
        prompt_tokens=int(rows["prompt_tokens"][row]),
        output_tokens=int(rows["output_tokens"][row]),
        queue=scheduled - arrival,
        prefill=first - scheduled + delivery,
        decode=0.0 if np.isnan(finished) else finished - first,
        preemptions=int(rows["preemptions"][row]),
    )
