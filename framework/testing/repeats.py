"""Whether a policy decides the same again: asked at every step or not, in this process and in others.

Knows decision rows; knows no policy. Run as a module, it is the other process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from schedlab.framework.errors import PolicyError
from schedlab.framework.policy import Policy
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.executors import JumpingExecutor
from schedlab.framework.testing.harness import Outcome

WAYS: dict[str, dict[str, Any]] = {
    "stepped (engine.fast_forward=false)": {"fast_forward": False},
    "asked at every step": {"honour_holds": False},
}
UNAUDITED: dict[str, Any] = {"audit_every": 1 << 60}
SEEDS = ("1", "2")
"""Values of PYTHONHASHSEED for other processes."""
NAMES = ("q", "zz")
"""Put before every request's and client's name: another hash of each, and the same order among them."""


def holds_alike(subject: Subject, case: Case) -> int:
    """Held decisions jumped over, stepped through or asked about anew must give one run. Violation of `hold`.

    Returns how many steps were executed without asking the policy.
    """
    policy = subject.make()
    calls = _count_calls(policy)
    jumped = subject.run(case, policy=policy, executor=JumpingExecutor(slope=9173), **UNAUDITED)
    for way, keys in WAYS.items():
        other = subject.run(case, executor=JumpingExecutor(slope=9173), **UNAUDITED, **keys)
        if other.digest != jumped.digest:
            raise Violation("hold", f"decides otherwise when it is {way} than when its holds are honoured")
        if other.stamps != jumped.stamps:
            raise Violation("hold", f"its requests go otherwise when it is {way} than when its holds are honoured")
    return jumped.engine.num_steps - len(calls)


def _count_calls(policy: Policy) -> list[None]:
    calls: list[None] = []
    schedule = policy.schedule

    def counted(step: Any) -> None:
        calls.append(None)
        schedule(step)

    policy.schedule = counted  # type: ignore[method-assign]
    return calls


def decides_alike(subject: Subject, case: Case) -> None:
    """The same decisions in a second run, and under other names of the same order. Violation of `determinism`."""
    first = subject.run(case, **UNAUDITED)
    again = subject.run(case, **UNAUDITED)
    if again.digest != first.digest:
        raise Violation("determinism", "decides otherwise in a second run in the same process")
    for prefix in NAMES:
        if _rows(subject.run(renamed(case, prefix), **UNAUDITED), prefix) != _rows(first, ""):
            raise Violation("determinism", "decides by the hash of a name: the order of a set of texts, or hash()")


def renamed(case: Case, prefix: str) -> Case:
    """The same case with `prefix` before the names of requests and clients."""
    return replace(case, trace=tuple(replace(s, name=prefix + s.name, client=prefix + s.client) for s in case.trace))


def _rows(outcome: Outcome, prefix: str) -> list[tuple[object, ...]]:
    """Preemptions, grants and decodes of each step, names without `prefix`."""
    columns = outcome.tables.decisions
    cut = len(prefix)
    return [
        (
            [(name[cut:], mode) for name, mode in preempted],
            [(name[cut:], int(tokens)) for name, tokens in grants],
            decodes if isinstance(decodes, str) else [name[cut:] for name in decodes],
            int(repeat),
        )
        for preempted, grants, decodes, repeat in zip(
            *(columns[key] for key in ("preempted", "grants", "decodes", "repeat")), strict=True
        )
    ]


def digests(subject: Subject, cases: Sequence[Case]) -> list[str]:
    return [subject.run(case, **UNAUDITED).digest for case in cases]


def decides_alike_elsewhere(subject: Subject, cases: Sequence[Case]) -> str | None:
    """The same decisions in processes with other hash seeds. Violation of `determinism`.

    Returns why it could not be tried, for a policy that another process cannot import.
    """
    expected = digests(subject, cases)
    try:
        parcel = pickle.dumps((subject.make(), list(cases)))
    except Exception as error:
        return f"cannot be pickled ({type(error).__name__})"
    for seed in SEEDS:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name],
            input=parcel,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )
        if done.returncode:
            *_, reason = done.stderr.decode().strip().splitlines() or ["?"]
            return f"does not run in another process ({reason})"
        if done.stdout.decode().split() != expected:
            raise Violation("determinism", f"decides otherwise in a process with PYTHONHASHSEED={seed}")
    return None


def main() -> None:
    """Read a policy and cases from standard input; print a digest a line."""
    policy, cases = pickle.load(sys.stdin.buffer)
    parcel = pickle.dumps(policy)
    try:
        print("\n".join(digests(Subject(lambda: pickle.loads(parcel)), cases)))
    except (PolicyError, Violation) as error:
        print(error)


if __name__ == "__main__":
    main()
