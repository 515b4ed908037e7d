"""The conformance kit: every property of a policy, tried on random traces and under steady load.

`check` gives a report, `assert_conforms` is the same as one line of a test, `again` shows one failure again. Knows
which property is tried how; each property's meaning is in a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hypothesis.strategies import SearchStrategy

from schedlab.framework.engine import Engine
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy, check_policy
from schedlab.framework.testing.behaviour import behave
from schedlab.framework.testing.cache_changes import sees_changes
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.decision_cost import decision_costs
from schedlab.framework.testing.guard import reads_only_what_it_may
from schedlab.framework.testing.harness import close
from schedlab.framework.testing.memory import COUNT, forgets
from schedlab.framework.testing.repeats import decides_alike, decides_alike_elsewhere, holds_alike
from schedlab.framework.testing.report import PROPERTIES, Report, Status, Verdict
from schedlab.framework.testing.reproduction import program
from schedlab.framework.testing.search import Effort, Search
from schedlab.framework.testing.steady import Wait, gaps, waits
from schedlab.framework.testing.strategies import cases, crowds, squeezes

Make = Callable[[], Policy]
BEHAVIOUR = ("rules", "stalls", "audit", "streams", "livelock", "churn")
CHECKS: Mapping[str, Callable[[Subject, Case], object]] = {
    **dict.fromkeys(BEHAVIOUR, behave),
    "hold": holds_alike,
    "determinism": decides_alike,
    "inputs": reads_only_what_it_may,
}
"""How a property is tried on one case."""
TRIES = 3
GREEN = f"not reproduced in {TRIES} tries"
CASES_PER_S = 40
"""About as many as a second of CPU time allows; a bound on machines that are faster."""


def check(
    make: Make,
    *,
    against: Mapping[str, Make] | None = None,
    seconds: float = 25.0,
    seed: int = 0,
    only: Collection[str] = tuple(PROPERTIES),
    source: str | None = None,
) -> Report:
    """Try every property, or `only` some, on the policies that `make` gives, for about `seconds` of CPU time.

    `make` is the class or a function without arguments; a fresh policy is made for each run. `against`: policies whose
    requests must get the same tokens. `seed` draws other traces. `source`: Python text that defines a function `make`,
    for the programs that reproduce failures; worked out from the class if left out.
    """
    if not seconds > 0:
        raise ConfigError(f"check.seconds: expected more than 0 of CPU time, found {seconds:g}")
    check_policy(make())
    subject = Subject(make, source)
    effort = Effort(seconds, max(1, round(seconds * CASES_PER_S)), seed, shrink_s=min(max(seconds / 4, 1.0), 10.0))
    trial = Trial(subject, effort, frozenset(only))
    trial.behaves(against or {})
    trial.repeats()
    trial.endures()
    trial.forgets()
    trial.costs()
    return Report(subject.name, tuple(trial.verdicts[name] for name in PROPERTIES if name in trial.verdicts))


def assert_conforms(
    make: Make,
    *,
    against: Mapping[str, Make] | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    only: Collection[str] = tuple(PROPERTIES),
) -> Report:
    """`check` as a test: AssertionError with the report and a program that shows the first failure again."""
    report = check(make, against=against, seconds=seconds, seed=seed, only=only)
    if not report.passed:
        programs = [verdict.program for verdict in report.failures if verdict.program]
        raise AssertionError("\n\n".join([str(report), *(f"to see it again:\n\n{text}" for text in programs[:1])]))
    return report


def again(name: str, make: Make, case: Case | None = None) -> None:
    """Try property `name` on one case, or on the kit's own loads; print what was decided, raise what is violated."""
    subject = Subject(make)
    if case is None:
        for violation in _endurance(subject):
            if violation.name == name:
                raise violation
        return
    engines: list[Engine] = []
    try:
        if name in BEHAVIOUR:
            behave(subject, case, on_step=engines.append)
        else:
            CHECKS[name](subject, case)
    finally:
        if engines:
            _print_decisions(engines[-1])


def _endurance(subject: Subject) -> Iterator[Violation]:
    """What steady loads and a changing cache bring out."""
    yield from (found for found in waits(subject) if isinstance(found, Violation))
    yield from (found for found in gaps(subject) if isinstance(found, Violation))
    for tried in (sees_changes, forgets, decision_costs):
        try:
            tried(subject)
        except Violation as violation:
            yield violation


def _print_decisions(engine: Engine, last: int = 40) -> None:
    """The last boundaries before the failure, one a line."""
    rows = close(engine, []).tables.decisions
    names = ("now_ns", "preempted", "grants", "decodes", "refusals", "rejected")
    for now_ns, *told_of in list(zip(*(rows[n] for n in names), strict=True))[-last:]:
        parts = dict(zip(("preempted", "granted", "decoded", "refused", "rejected"), told_of, strict=True))
        told = "; ".join(f"{verb} {what}" for verb, what in parts.items() if len(what))
        print(f"{int(now_ns) / 1e6:9.3f} ms  {told or 'idle'}")


@dataclass
class Trial:
    """One policy, and the verdicts on it so far."""

    subject: Subject
    effort: Effort
    only: Collection[str]
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def say(self, name: str, status: Status, detail: str) -> None:
        """The verdict on a property that nothing was found against before."""
        if name in self.only:
            self.verdicts.setdefault(name, Verdict(name, status, detail))

    def accuse(self, violation: Violation, case: Case | None = None) -> None:
        """A failure of the property that the violation names, whichever was being tried: it stands over a pass that
        other traces gave before. The first failure of a property is kept.
        """
        before = self.verdicts.get(violation.name)
        if before is None or before.status != "fail":
            text = program(self.subject, case, violation)
            what = violation.what if case is None or self._again(violation, case) else f"{violation.what} ({GREEN})"
            self.verdicts[violation.name] = Verdict(violation.name, "fail", what, text)

    def _again(self, violation: Violation, case: Case) -> bool:
        """Whether the program that shows the failure again does, in one of a few tries."""
        for _ in range(TRIES):
            try:
                CHECKS[violation.name](self.subject, case)
            except Violation:
                return True
        return False

    def behaves(self, against: Mapping[str, Make]) -> None:
        """Look for a case against each of BEHAVIOUR; after a find, for one against another."""
        wanted, tried = set(BEHAVIOUR) & set(self.only), 0
        for strategy, share in ((cases(), 0.3), (crowds(), 0.1), (squeezes(), 0.3)):
            found = True
            while wanted and found:
                search = self._search(partial(behave, references=against), wanted, share, strategy)
                tried += search.tried
                found = search.violation is not None
                wanted -= {search.violation.name} if search.violation is not None else set()
        for name in BEHAVIOUR:
            self.say(name, "pass", f"{tried} traces")

    def repeats(self) -> None:
        for name, share in (("hold", 0.2), ("determinism", 0.15), ("inputs", 0.1)):
            if name not in self.only:
                continue
            search = self._search(CHECKS[name], {name}, share)
            if name != "determinism":
                self.say(name, "pass", f"{search.tried} traces")
            elif name not in self.verdicts:
                self._elsewhere(search.tried, search.passed)

    def _elsewhere(self, tried: int, sample: Sequence[Case]) -> None:
        """Determinism in other processes, on traces that were found to go well in this one."""
        try:
            why_not = decides_alike_elsewhere(self.subject, sample)
        except Violation as violation:
            self.accuse(violation, sample[0])
            return
        where = f"in this process only: the policy {why_not}" if why_not else "and other processes' hash seeds"
        self.say("determinism", "pass", f"{tried} traces, {where}")

    def _search(
        self,
        check: Callable[[Subject, Case], object],
        wanted: set[str],
        share: float,
        strategy: SearchStrategy[Case] | None = None,
    ) -> Search:
        search = Search(partial(check, self.subject), self.effort.share(share), frozenset(wanted))
        search.run(cases() if strategy is None else strategy)
        if search.violation is not None and search.found is not None:
            self.accuse(search.violation, search.found)
        return search

    def endures(self) -> None:
        """Steady loads, and changes of the cache."""
        for name, found in (("waiting", waits(self.subject)), ("gap", gaps(self.subject))):
            if name in self.only:
                self._bounded(name, found)
        if "cache" not in self.only:
            return
        try:
            compared = sees_changes(self.subject)
        except Violation as violation:
            self.accuse(violation)
            self.say("cache", "untested", str(violation))
        else:
            self.say("cache", "pass" if compared else "untested", f"{compared} pairs of runs compared")

    def _bounded(self, name: str, found: Iterable[Wait | Violation]) -> None:
        declared = self.subject.make().no_bound_on.get("inter_token_latency" if name == "gap" else name)
        bounds, seen = [], []
        for result in found:
            if isinstance(result, Wait):
                bounds.append(result)
            elif result.name == name and declared is not None:
                seen.append(result.what)
            else:
                self.accuse(result)
        if seen:
            self.say(name, "declared", f"by design, {declared}; seen: {'; '.join(seen)}")
        elif bounds:
            self.say(name, "bound", _worst(max(bounds)))
        else:
            self.say(name, "untested", "no load came to its end")

    def forgets(self) -> None:
        if "memory" not in self.only:
            return
        try:
            held = forgets(self.subject)
        except Violation as violation:
            self.accuse(violation)
            self.say("memory", "untested", str(violation))
        else:
            self.say("memory", "bound", f"{held} of {COUNT} ended requests still held")

    def costs(self) -> None:
        if "cost" not in self.only:
            return
        try:
            costs = decision_costs(self.subject)
        except Violation as violation:
            self.accuse(violation)
            self.say("cost", "untested", str(violation))
            return
        if not costs:
            self.say("cost", "untested", "it rejects all that would wait")
            return
        self.say(
            "cost", "bound", "; ".join(f"{c.us:.0f} us at {c.running} running, {c.waiting} waiting" for c in costs)
        )


def _worst(wait: Wait) -> str:
    overtaken = f", {wait.overtaken} later arrivals first" if wait.overtaken else ""
    return f"at most {wait.steps} steps, {wait.seconds:.1f} s{overtaken} ({wait.load})"
