"""Whether runs of the same requests on the same model generated the same tokens, request by request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from schedlab.experiments.run.offered import read_outputs


@dataclass
class Agreement:
    """How one run's outputs agree with a reference's, over the requests that both finished."""

    same: int = 0
    different: int = 0
    first: str | None = None


def agreement(reference: Mapping[str, Sequence[int]], other: Iterable[tuple[str, Sequence[int]]]) -> Agreement:
    found = Agreement()
    for request_id, tokens in other:
        expected = reference.get(request_id)
        if expected is None:
            continue
        if tokens == expected:
            found.same += 1
            continue
        found.different += 1
        found.first = found.first or f"request {request_id} from output token {first_difference(expected, tokens)} on"
    return found


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length if one begins with the other."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def describe_agreement(runs: Mapping[str, Path]) -> str | None:
    """One line on the run directories in `runs`, by name; None where the first made no tokens."""
    (first, *others) = runs
    reference = dict(read_outputs(runs[first]))
    if not reference:
        return None
    found = {name: agreement(reference, read_outputs(runs[name])) for name in others}
    parted = [f"{name} in {a.different}, first in {a.first}" for name, a in found.items() if a.different]
    if parted:
        return f"generated tokens: differ from those of {first}: {'; '.join(parted)}"
    shared = min((a.same for a in found.values()), default=len(reference))
    return f"generated tokens: identical in {len(runs)} runs, for each of the {shared} requests that they all finished"
