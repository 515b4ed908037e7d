"""`schedlab explain DIR`: where the wait of a run came from, what to change, and what the change does.

Puts attribution, causes and trials together and says them in plain words; computes no part of a latency itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.attribution import TPOT_PARTS, TTFT_PARTS
from schedlab.experiments.analysis.causes import ERROR, Cause, Suggestion, View, causes
from schedlab.experiments.analysis.rerun import rerun
from schedlab.experiments.analysis.step_work import machine_of, time_shares
from schedlab.experiments.analysis.table import Run
from schedlab.experiments.run.manifest import made_here
from schedlab.framework.errors import ConfigError, SchedlabError
from schedlab.framework.results.reader import read_run

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

SPENT = {"compute": "computing", "memory": "moving memory", "overhead": "overhead"}

FROM_PYTHON = (
    "The run was made from Python, and its manifest does not say how to build its policy, model and engine: what "
    "depends on them is not suggested, and nothing can be tried. For runs of `schedlab run` it is."
)

NOT_TRIED = "Nothing was tried: --try does; the default is to try where this machine and version made the run."


@dataclass(frozen=True)
class TriedChange:
    """A suggestion, run again on the virtual clock: the metric before and after it, in seconds; or why not.

    A prediction has an error of ERROR times the metric before.
    """

    before: float | None = None
    after: float | None = None
    failed: str | None = None

    def holds(self, predicted: float | None) -> bool | None:
        """Whether the metric moved as predicted, within the stated error; None if nothing was predicted or tried, and
        where the error is as large as the effect."""
        if predicted is None or self.after is None or self.before is None:
            return None
        error = ERROR * self.before
        return None if abs(self.before - predicted) <= error else abs(self.after - predicted) <= error


@dataclass(frozen=True)
class Named:
    """A cause, what it suggests, and the trial of that, if it was tried."""

    cause: Cause
    suggestion: Suggestion | None
    trial: TriedChange | None = None

    @property
    def as_predicted(self) -> bool | None:
        return self.trial.holds(self.suggestion.predicted) if self.trial and self.suggestion else None

    def as_json(self) -> dict[str, Any]:
        cause = {name: getattr(self.cause, name) for name in ("name", "share", "lost_s", "evidence")}
        suggestion = asdict(self.suggestion) if self.suggestion else None
        trial = asdict(self.trial) | {"as_predicted": self.as_predicted} if self.trial else None
        return {**cause, "suggestion": suggestion, "trial": trial}


@dataclass(frozen=True)
class Explanation:
    """Seconds of each part of TTFT and TPOT, how the time of the steps was spent, and the named causes.

    The parts are means over all requests, and over the hundredth of them that has most of the latency.
    """

    title: str
    requests: int
    ttft: Mapping[str, float]
    tpot: Mapping[str, float]
    slowest_ttft: Mapping[str, float]
    slowest_tpot: Mapping[str, float]
    weights: float
    time: Mapping[str, float]
    named: list[Named]
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        named = [item.as_json() for item in self.named]
        head = {"title": self.title, "requests": self.requests, "ttft_s": dict(self.ttft), "tpot_s": dict(self.tpot)}
        tail = {"slowest_ttft_s": dict(self.slowest_ttft), "slowest_tpot_s": dict(self.slowest_tpot)}
        rest = {"weights_s": self.weights, "time": dict(self.time), "error": ERROR, "causes": named, "note": self.note}
        return {**head, **tail, **rest}


def explain(directory: Path, tried: bool | None = None, trust: bool = False) -> Explanation:
    """The explanation of the run in `directory`. ConfigError for one without logs, or without a finished request.

    Suggestions are tried if `tried` or, where it is left out, if the run was made by this machine and version; parts
    that are not schedlab's or a plug-in's are made again only with `trust`.
    """
    run = read_run(directory)
    if run.status != "finished":
        raise ConfigError(f"{directory}: the run is {run.status}; expected a finished one")
    view = View(run)
    if not view.parts.has_ttft.any():
        raise ConfigError(f"{directory}: no request of the run had a first token; there is nothing to explain")
    tried = made_here(run.manifest) if tried is None else tried
    named = _tried(directory, view, trust) if tried else [Named(cause, cause.suggest(view)) for cause in causes(view)]
    machine = machine_of(run.manifest or {})
    time = time_shares(run, view.past, machine[0].window if machine else None)
    requests = int(view.parts.has_ttft.sum())
    title, tails = _title(Run(directory, run)), view.slowest()
    note = FROM_PYTHON if not view.config else None if tried else NOT_TRIED
    return Explanation(title, requests, view.ttft, view.tpot, *tails, view.weights, time, named, note)


def _title(run: Run) -> str:
    labels = run.labels
    return f"{run.policy} on {labels.get('workload', run.directory.name)}, engine={labels.get('engine', '?')}"


# ---- trials ----


def _tried(directory: Path, view: View, trust: bool) -> list[Named]:
    """The causes of a run with their trials. What a real engine ran is first repeated on the virtual clock: suggestions
    and predictions are for that run."""
    found = causes(view)
    if not found:
        return []
    manifest = view.run.manifest
    try:
        before = view if (manifest or {}).get("clock") == "virtual" else View(rerun(directory, manifest, trust=trust))
    except SchedlabError as error:
        return [Named(cause, cause.suggest(view), TriedChange(failed=str(error))) for cause in found]
    suggested = [(cause, cause.suggest(before)) for cause in found]
    return [Named(cause, suggestion, _trial(directory, before, suggestion, trust)) for cause, suggestion in suggested]


def _trial(directory: Path, before: View, suggestion: Suggestion | None, trust: bool) -> TriedChange | None:
    if suggestion is None:
        return None
    try:
        after = rerun(directory, before.run.manifest, suggestion.changes, trust=trust)
    except SchedlabError as error:
        return TriedChange(failed=str(error))
    return TriedChange(before.run.summary[suggestion.metric], after.summary[suggestion.metric])


# ---- words ----


def lines(explanation: Explanation) -> list[str]:
    """The explanation as text, a paragraph a line."""
    said = [f"{explanation.title}, {explanation.requests:,} requests", ""]
    said += _parts("TTFT", explanation.ttft, explanation.slowest_ttft, TTFT_PARTS)
    said += _parts("TPOT", explanation.tpot, explanation.slowest_tpot, TPOT_PARTS)
    if explanation.weights:
        said += [f"  of own decode, moving weights{explanation.weights * 1e3:10,.2f} ms", ""]
    if explanation.time:
        shares = ", ".join(f"{share:.0%} {SPENT[part]}" for part, share in explanation.time.items())
        said += [f"Time of the steps: {shares}.", ""]
    if not explanation.named:
        said.append("No cause stands out: none of queue, prompts beside streams, weights and preemptions dominates.")
    for place, item in enumerate(explanation.named, start=1):
        first, *rest = cause_lines(item)
        said += [f"{place}. {first}", *(f"   {line}" for line in rest), ""]
    return said if explanation.note is None else [*said, explanation.note]


def _parts(metric: str, parts: Mapping[str, float], slowest: Mapping[str, float], names: tuple[str, ...]) -> list[str]:
    """A table: each part on average, and among the slowest."""
    rows = [(SAID[name], parts[name], slowest[name]) for name in names if parts[name] or slowest[name]]
    whole, tail = sum(parts.values()), sum(slowest.values())
    said = [f"{metric:<46}{'mean':>13}{'slowest 1 %':>24}"]
    said += [f"  {words:<44}{_cell(mean, whole)}  {_cell(part, tail)}" for words, mean, part in rows]
    return [*said, f"  {'together':<44}{_cell(whole, whole)}  {_cell(tail, tail)}", ""]


def _cell(seconds: float, whole: float) -> str:
    return f"{seconds * 1e3:10,.2f} ms {seconds / whole if whole else 0:7.1%}"


def cause_lines(item: Named) -> list[str]:
    """A cause, its evidence, the suggestion and what it did."""
    cause, suggestion = item.cause, item.suggestion
    evidence = cause.evidence[:1].upper() + cause.evidence[1:]
    said = [f"{cause.name}: {cause.lost_s:,.3f} s of a mean request. {evidence}."]
    if suggestion is None:
        return said
    said.append(f"Try {suggestion.words}. {_outcome(item)}")
    return said


def _outcome(item: Named) -> str:
    suggestion, trial = item.suggestion, item.trial
    assert suggestion is not None
    predicted = suggestion.predicted
    if trial is None:
        return "" if predicted is None else f"Predicted: {suggestion.metric} {predicted * 1e3:,.1f} ms."
    if trial.before is None or trial.after is None:
        return f"It could not be tried: {trial.failed or 'the metric is unknown'}."
    moved = f"{suggestion.metric} from {trial.before * 1e3:,.1f} to {trial.after * 1e3:,.1f} ms on the virtual clock"
    if predicted is None:
        return f"Tried: {moved}."
    interval = f"{predicted * 1e3:,.1f} ± {ERROR * trial.before * 1e3:,.1f} ms"
    holds = trial.holds(predicted)
    if holds is None:
        return f"Tried: {moved}; predicted were {interval}, which is wider than the effect and says nothing."
    vague = holds and ERROR * trial.before >= predicted / 2
    note = f", an error of {ERROR:.0%} of the value before: the direction, and no more" if vague else ""
    return f"Tried: {moved}, {'as predicted' if holds else 'not as predicted'} ({interval}{note})."


def show(explanation: Explanation, form: str) -> None:
    print(json.dumps(explanation.as_json(), indent=1) if form == "json" else "\n".join(lines(explanation)).rstrip())
