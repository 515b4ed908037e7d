"""Which runs answer one question together: replicates of a variant, paired with the baseline's by what was offered.

Runs that were offered the same requests are one replicate, whatever their seeds say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from schedlab.experiments.analysis.table import Run
from schedlab.framework.errors import ConfigError

NOT_OF_THE_VARIANT = (
    "seed", "progress", "plots", "log_format", "record", "resume", "store_text", "wandb", "hydra",
)  # fmt: skip
"""Keys, and groups of keys, that make two runs neither variants nor conditions of each other."""
OFFERS = ("workload", "slo", "measure", "observed_at")
"""What a run is asked to serve and how it is judged: never a variant, for its runs are offered something else."""
FILES = ("workload.path", "workload.format")
"""Where requests came from, which is no condition of runs that were offered the same."""
DIRECTORY = "directory"
POLICY = "policy"


# ---- variants and conditions ----

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Labelled:
    """A finished run, what was asked of it, and what it was offered."""

    run: Run
    facts: Mapping[str, str]
    offered: str


@dataclass
class Question:
    """Is `variant` better than `baseline`, under `condition`? Runs of both by what they were offered."""

    condition: str
    variant: str
    baseline: str
    variant_runs: dict[str, list[Run]] = field(default_factory=dict)
    baseline_runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def shared(self) -> list[str]:
        """What both were offered, in the order of the baseline's runs."""
        return [offered for offered in self.baseline_runs if offered in self.variant_runs]


def questions(
    roots: Sequence[Path], runs: Mapping[Path, Sequence[Run]], baseline: str | None = None
) -> tuple[list[Question], list[str]]:
    """All that the finished `runs` (by the directory they were found under) can be asked, and what cannot and why.

    Policies are contrasted under equal conditions; without two of them, whatever else differs. Directories are
    contrasted where `baseline` is one of them, or where several hold the same variants with the same arrivals.
    ConfigError where `baseline` names nothing at all.
    """
    if baseline is None and sum(run.complete for root in roots for run in runs[root]) < 2:
        return [], []
    by_place = baseline is not None and baseline in map(str, roots)
    labelled = same_files([label(run, root, by_place) for root in roots for run in runs[root] if run.complete])
    by_place = by_place or same_in_several(labelled)
    contrast = tells_apart(labelled, by_place)
    groups: dict[Facts, dict[Facts, list[Labelled]]] = {}
    for run in labelled:
        kept = [(key, value) for key, value in run.facts.items() if by_place or key != DIRECTORY]
        condition = tuple(fact for fact in kept if not contrast(fact[0]))
        variant = tuple(fact for fact in kept if contrast(fact[0]))
        groups.setdefault(condition, {}).setdefault(variant, []).append(run)
    conditions = dict(zip(groups, names_of([dict(condition) for condition in groups]), strict=True))
    variants = list(dict.fromkeys(variant for group in groups.values() for variant in group))
    names = dict(zip(variants, names_of([dict(variant) for variant in variants]), strict=True))
    asked, left_out = [], []
    for condition, group in groups.items():
        members = {names[variant]: by_offered(found) for variant, found in group.items()}
        policies = {names[variant]: dict(variant).get(POLICY, "") for variant in group}
        chosen = find_baseline(policies, baseline)
        if isinstance(chosen, Missing):
            left_out.append(f"{conditions[condition]}: --baseline {baseline} {chosen}".removeprefix(": "))
            continue
        asked += [
            Question(conditions[condition], name, chosen, found, members[chosen])
            for name, found in members.items() if name != chosen
        ]  # fmt: skip
    if left_out and not asked:
        raise ConfigError("; ".join(left_out))
    return asked, left_out


def label(run: Run, root: Path, asked_only: bool) -> Labelled:
    """`run` with its choices and overrides as text and, unless `asked_only`, the knobs and limits that they led to."""
    manifest = run.manifest
    knobs = {f"{POLICY}.{name}": value for name, value in plain_knobs(manifest).items()}
    limits = {f"engine.{name}": value for name, value in manifest.get("engine", {}).items()}
    facts = {DIRECTORY: str(root), POLICY: run.policy, **run.labels, **({} if asked_only else {**knobs, **limits})}
    kept = {key: str(value) for key, value in facts.items() if key.partition(".")[0] not in NOT_OF_THE_VARIANT}
    return Labelled(run, kept, run.offered)


def same_files(runs: Sequence[Labelled]) -> list[Labelled]:
    """`runs`, with the file of the first of those that were offered the same requests."""
    files: dict[str, dict[str, str]] = {}
    for run in runs:
        files.setdefault(run.offered, {key: run.facts[key] for key in FILES if key in run.facts})
    kept = [{key: value for key, value in run.facts.items() if key not in FILES} for run in runs]
    return [replace(run, facts={**facts, **files[run.offered]}) for run, facts in zip(runs, kept, strict=True)]


def plain_knobs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's knobs that are values; an object is named in a manifest by where it lay in memory."""
    knobs = manifest.get("policy", {}).get("knobs", {})
    return {name: value for name, value in knobs.items() if " object at 0x" not in str(value)}


def same_in_several(runs: Sequence[Labelled]) -> bool:
    """Whether directories hold equal variants that were offered the same."""
    places: dict[tuple[Any, ...], set[str]] = {}
    for run in runs:
        same = tuple((key, value) for key, value in run.facts.items() if key != DIRECTORY)
        places.setdefault((same, run.offered), set()).add(run.facts[DIRECTORY])
    return any(len(found) > 1 for found in places.values())


def tells_apart(runs: Sequence[Labelled], by_place: bool) -> Callable[[str], bool]:
    """Which keys tell variants apart; the others are the condition under which they are compared."""
    if by_place:
        return lambda key: key == DIRECTORY
    if len({run.facts[POLICY] for run in runs}) > 1:
        return lambda key: key.partition(".")[0] == POLICY
    return lambda key: key.partition(".")[0] not in OFFERS


def names_of(facts: Sequence[Mapping[str, str]]) -> list[str]:
    """Each by what tells it from the others; a policy's knobs only from others of that policy."""

    def differs(key: str, own: Mapping[str, str]) -> bool:
        peers = [other for other in facts if not key.startswith("policy.") or other.get(POLICY) == own.get(POLICY)]
        return len({other.get(key) for other in peers}) > 1

    names = []
    for own in facts:
        words = [own[POLICY]] if POLICY in own else []
        words += [
            value if key == DIRECTORY else f"{key}={value}"
            for key, value in own.items() if key != POLICY and differs(key, own)
        ]  # fmt: skip
        names.append(" ".join(words))
    return names


def by_offered(runs: Iterable[Labelled]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.offered, []).append(run.run)
    return found


class Missing(str):
    """Why a baseline was not found."""


def find_baseline(policies: Mapping[str, str], wanted: str | None) -> str | Missing:
    """The variant that `wanted` names: by its name, or as the only one of a policy; the first where nothing is asked.

    `policies` of the variants by name.
    """
    names = list(policies)
    if wanted is None or wanted in names:
        return names[0] if wanted is None else wanted
    of_policy = [name for name in names if policies[name] == wanted]
    if len(of_policy) == 1:
        return of_policy[0]
    return Missing(f"is {'any' if of_policy else 'none'} of {', '.join(of_policy or names)}")
