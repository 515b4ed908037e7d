"""`schedlab explain DIR`: where the wait of a run came from, what to change, and what the change does.

Puts attribution, causes and trials together and says them in plain words; computes no part of a latency itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schedlab.experiments.attribution import TPOT_PARTS, TTFT_PARTS
from schedlab.experiments.causes import ERROR, Cause, View, causes
from schedlab.experiments.rerun import rerun
from schedlab.experiments.table import Run
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.reader import read_run

SAID = {
    "preparation": "preparation, before the policy sees the request",
    "queue": "queue, until the first grant",
    "prefill": "own prefill",
    "interference": "others, in shared steps and between own ones",
    "recompute": "after preemptions, and computing again",
    "delivery": "delivery to the client",
    "decode": "own decode",
    "stalls": "stalls by the prompts of others",
    "preemption": "after preemptions, until decoding again",
    "left_out": "left out of decode steps, or idle",
}


@dataclass(frozen=True)
class Trial:
    """A suggestion, run again on the virtual clock: the metric before and after it, in seconds; or why not."""

    before: float | None = None
    after: float | None = None
    failed: str | None = None

    def holds(self, predicted: float | None) -> bool | None:
        """Whether the metric moved as predicted, within the stated error; None if nothing was predicted or tried."""
        if predicted is None or self.after is None or self.before is None:
            return None
        return abs(self.after - predicted) <= ERROR * self.before


@dataclass(frozen=True)
class Named:
    """A cause with the trial of its suggestion, if it was tried."""

    cause: Cause
    trial: Trial | None


@dataclass(frozen=True)
class Explanation:
    """Mean seconds of each part of TTFT and TPOT, time shares of the steps by bound, and the named causes."""

    title: str
    requests: int
    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    weights: float
    time: Mapping[str, float | None]
    named: list[Named]

    def as_json(self) -> dict[str, Any]:
        named = [
            {**asdict(item.cause), "trial": asdict(item.trial) | {"as_predicted": _holds(item)} if item.trial else None}
            for item in self.named
        ]
        head = {"title": self.title, "requests": self.requests, "ttft_s": dict(self.ttft), "tpot_s": dict(self.tpot)}
        return {**head, "weights_s": self.weights, "time": dict(self.time), "error": ERROR, "causes": named}


def explain(directory: Path, tried: bool = True) -> Explanation:
    """The explanation of the run in `directory`. ConfigError for one without logs, or without a finished request."""
    run = read_run(directory)
    if run.status != "finished":
        raise ConfigError(f"{directory}: the run is {run.status}; expected a finished one")
    view = View(run)
    if not view.parts.has_ttft.any():
        raise ConfigError(f"{directory}: no request of the run had a first token; there is nothing to explain")
    found = causes(view)
    before = _virtual(view, directory) if tried and found else None
    named = [Named(cause, _trial(cause, directory, before) if before else None) for cause in found]
    time = {bound: run.summary[f"bound/{bound}"] for bound in ("compute", "memory", "overhead")}
    requests = int(view.parts.has_ttft.sum())
    return Explanation(_title(Run(directory, run)), requests, view.ttft, view.tpot, view.weights, time, named)


def _title(run: Run) -> str:
    labels = run.labels
    return f"{run.policy} on {labels.get('workload', run.directory.name)}, engine={labels.get('engine', '?')}"


# ---- trials ----


def _virtual(view: View, directory: Path) -> Mapping[str, Any] | SchedlabError:
    """The summary that changes are compared with: the run's own, or that of its repetition on the virtual clock."""
    if (view.run.manifest or {}).get("clock") == "virtual":
        return view.run.summary
    try:
        return rerun(directory, view.run.manifest).summary
    except SchedlabError as error:
        return error


def _trial(cause: Cause, directory: Path, before: Mapping[str, Any] | SchedlabError) -> Trial | None:
    if cause.suggestion is None:
        return None
    if isinstance(before, SchedlabError):
        return Trial(failed=str(before))
    manifest, metric = read_run(directory).manifest, cause.suggestion.metric
    try:
        after = rerun(directory, manifest, cause.suggestion.changes)
    except SchedlabError as error:
        return Trial(failed=str(error))
    return Trial(before[metric], after.summary[metric])


def _holds(item: Named) -> bool | None:
    suggestion = item.cause.suggestion
    return item.trial.holds(suggestion.predicted) if item.trial and suggestion else None


# ---- words ----


def lines(explanation: Explanation) -> list[str]:
    """The explanation as text, a paragraph a line."""
    said = [f"{explanation.title}, {explanation.requests:,} requests", ""]
    said += _parts("TTFT", explanation.ttft, TTFT_PARTS)
    said += _parts("TPOT", explanation.tpot, TPOT_PARTS)
    if explanation.weights:
        said += [f"  of own decode, moving weights{explanation.weights * 1e3:10,.2f} ms", ""]
    if None not in explanation.time.values():
        shares = ", ".join(f"{share:.0%} {_bound(bound)}" for bound, share in explanation.time.items())
        said += [f"Time of the steps: {shares}.", ""]
    if not explanation.named:
        said.append("No cause stands out: none of queue, prompts beside streams, weights and preemptions dominates.")
    for place, item in enumerate(explanation.named, start=1):
        first, *rest = cause_lines(item)
        said += [f"{place}. {first}", *(f"   {line}" for line in rest), ""]
    return said


def _parts(metric: str, parts: Mapping[str, float], names: tuple[str, ...]) -> list[str]:
    whole = sum(parts.values())
    rows = [
        f"  {SAID[name]:<48}{parts[name] * 1e3:10,.2f} ms{parts[name] / whole if whole else 0:7.1%}"
        for name in names
        if parts[name]
    ]
    return [f"{metric} {whole * 1e3:,.2f} ms on average", *rows, ""]


def _bound(bound: str) -> str:
    return bound if bound == "overhead" else f"{bound}-bound"


def cause_lines(item: Named) -> list[str]:
    """A cause, its evidence, the suggestion and what it did."""
    cause, suggestion = item.cause, item.cause.suggestion
    evidence = cause.evidence[:1].upper() + cause.evidence[1:]
    said = [f"{cause.name}: {cause.lost_s:,.3f} s of a mean request. {evidence}."]
    if suggestion is None:
        return said
    said.append(f"Try {suggestion.words}. {_outcome(item)}")
    return said


def _outcome(item: Named) -> str:
    suggestion, trial = item.cause.suggestion, item.trial
    assert suggestion is not None
    predicted = suggestion.predicted
    if trial is None:
        return "" if predicted is None else f"Predicted: {suggestion.metric} {predicted * 1e3:,.1f} ms."
    if trial.before is None or trial.after is None:
        return f"It could not be tried: {trial.failed or 'the metric is unknown'}."
    moved = f"{suggestion.metric} from {trial.before * 1e3:,.1f} to {trial.after * 1e3:,.1f} ms on the virtual clock"
    if predicted is None:
        return f"Tried: {moved}."
    verdict = "as predicted" if trial.holds(predicted) else "not as predicted"
    return f"Tried: {moved}, {verdict} ({predicted * 1e3:,.1f} ± {ERROR * trial.before * 1e3:,.1f} ms)."


def show(explanation: Explanation, form: str) -> None:
    print(json.dumps(explanation.as_json(), indent=1) if form == "json" else "\n".join(lines(explanation)).rstrip())
