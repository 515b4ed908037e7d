"""Changes one comparison or one number of a policy at a time and asks whether any test objects.

`python -m schedlab.experiments.bench.mutate_policies fcfs common`; all of them without names. Tests that speak of the
policy object first, those that killed most so far before all others, then the conformance kit. What nothing kills must
have a reason in `policy_mutants.yaml`, or the program ends with 1; what has one is tried with `--explained` only. Needs
the repository's tests. Each mutant runs in a process of its own, forked when the tests are collected.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings
from omegaconf import OmegaConf

from schedlab.experiments.bench.mutants import Mutant, install, is_of, mutants
from schedlab.experiments.policy import maker, options
from schedlab.experiments.run.compose import compose
from schedlab.framework.policy import Policy
from schedlab.framework.testing.conformance import BEHAVIOUR, check

HELPERS = ("common", "preemption", "ranking", "victims")
"""Modules of policies that define none; the kit tries them through these policies."""
THROUGH = ("chunked_prefill", "priority")
NOT_TRIED = ("fastserve", "sarathi", "sglang_lpm", "srpt", "vllm_v1")
"""Policies that follow another project's scheduler: held to its decisions and to single cases, which leave some of
their mutants alive. Tried where they are named."""
KNOBS = {
    "chunked_prefill": ["policy.chunk_size=12"],
    "decode_priority": ["policy.stall_tokens=5", "policy.max_prefill_streak=2", "policy.watermark_blocks=2"],
    "prefix_reuse": ["policy.chunk_size=12"],
    "static_batching": ["policy.batch_size=3"],
}
"""Knobs that bite on the kit's tiny engines, where those of the YAML would not."""
PROPERTIES = (*BEHAVIOUR, "hold", "gap", "cache", "waiting")
KIT_S, PATIENCE = 60.0, 10.0
"""Seconds that the kit may take, and that a test may take beyond ten times what it takes on the original."""
ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/framework/test_*_polic*.py", "tests/framework/test_policies.py", "tests/framework/test_policy_helpers.py",
    "tests/framework/test_kv_decisions.py", "tests/framework/test_rejections.py",
    "tests/framework/test_long_prompts.py", "tests/framework/test_renamed.py",
    "tests/conformance/test_engine_cases_for_all.py", "tests/baselines/test_*.py",
)  # fmt: skip
FIRST = "test_reference_policies"
"""Tried before other tests that have killed as many."""
DECISIONS = (
    "test_reference_policies.py", "test_policy_helpers.py", "test_kv_decisions.py", "test_reserving_policies.py",
    "test_long_prompts.py", "test_more_policies.py", "test_renamed.py",
)  # fmt: skip
"""What helpers are tried on."""
REASONS = Path(__file__).with_name("policy_mutants.yaml")
RESULTS = Path(__file__).parent / "results/policy_mutants.md"


@dataclass(frozen=True)
class Fate:
    """`killed` says by what; None for a survivor."""

    mutant: Mutant
    killed: str | None


# ---- what objects ----


class Survey:
    """A plugin of pytest that tries mutants on the collected tests instead of running these."""

    def __init__(self, names: Sequence[str], show: Callable[[Fate], object], passed_over: Collection[str]) -> None:
        self.names = names
        self.passed_over = passed_over
        self.fates: list[Fate] = []
        self._show = show
        self._kills: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """No search for the smallest example: the first one kills."""
        settings.register_profile("mutants", settings.default, phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for module in modules(self.names):
            items, makes = _pointed(session.items, module), policies_of(module.__name__)
            self._time([item for item in items if item.nodeid not in self._seconds])
            for mutant in mutants(module):
                known = mutant.key in self.passed_over
                self.fates.append(Fate(mutant, None if known else self._objection(mutant, items, makes)))
                self._show(self.fates[-1])
        return True

    def _time(self, items: Sequence[pytest.Item]) -> None:
        """How long each test takes on the original, which must pass."""
        for name, failed, seconds in _elsewhere(lambda: _tests(items), lambda _: 600.0):
            if failed:
                raise pytest.UsageError(f"mutate_policies: {name} fails on the original")
            self._seconds[name] = seconds

    def _promise(self, item: pytest.Item, mutant: Mutant) -> tuple[object, ...]:
        """Smallest first: who speaks of the function or of a policy that uses it, has killed most, is quickest."""
        name = mutant.function.partition(".")[0]
        near = name in _text(item) or any(name in source and word in item.name for word, source in _sources().items())
        return not near, -self._kills[item.nodeid], FIRST not in item.nodeid, self._seconds[item.nodeid]

    def _objection(self, mutant: Mutant, items: Sequence[pytest.Item], makes: Sequence[Make]) -> str | None:
        """What kills the mutant first; None if nothing does."""
        order = sorted(items, key=lambda item: self._promise(item, mutant))
        names = [*(item.nodeid for item in order), *(["kit"] * len(makes)), "the end"]

        def tried() -> Iterator[Ran]:
            install(mutant)
            yield from _tests(order)
            yield from _kit(makes)

        done = 0
        for name, failed, _ in _elsewhere(tried, lambda i: 10 * self._seconds.get(names[i], KIT_S / 10) + PATIENCE):
            done += 1
            if failed:
                self._kills[name] += 1
                return name
        return None if done == len(names) - 1 else f"no end of {names[done]}"


Make = Callable[[], Policy]
Ran = tuple[str, bool, float]
"""What was run, whether it failed, and how many seconds it took."""


def _tests(items: Sequence[pytest.Item]) -> Iterator[Ran]:
    for item in items:
        reports = runtestprotocol(item, log=False)
        yield item.nodeid, any(report.failed for report in reports), sum(report.duration for report in reports)


def _kit(makes: Sequence[Make]) -> Iterator[Ran]:
    for make in makes:
        report = check(make, only=PROPERTIES, seconds=1.0)
        failed = [failure.name for failure in report.failures]
        yield f"kit: {', '.join(failed)}", bool(failed), 0.0


def _elsewhere(tried: Callable[[], Iterator[Ran]], limit_s: Callable[[int], float]) -> Iterator[Ran]:
    """What is tried in a forked process, as it is done; ends early where the next one does not come in time."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(theirs, tried))
    process.start()
    theirs.close()
    try:
        i = 0
        while ours.poll(limit_s(i)):
            yield ours.recv()
            i += 1
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()


def _send(pipe: Any, tried: Callable[[], Iterator[Ran]]) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        for ran in tried():
            pipe.send(ran)
    except Exception as error:  # a mutant that does not even load is objected to
        pipe.send((type(error).__name__, True, 0.0))
    pipe.close()


def _pointed(items: Sequence[pytest.Item], module: ModuleType) -> list[pytest.Item]:
    """Tests that name what the module defines; for what policies share, those of every policy's decisions."""
    name = module.__name__.rpartition(".")[2]
    words = [name, *(key for key, value in vars(module).items() if is_of(value, module.__name__))]
    if name in HELPERS:
        return [item for item in items if item.path.name in DECISIONS]
    return [item for item in items if any(word in _text(item) for word in words)]


@cache
def _sources() -> dict[str, str]:
    """Text of each policy's module, by name."""
    return {module.__name__.rpartition(".")[2]: inspect.getsource(module) for module in modules([])}


def _text(item: pytest.Item) -> str:
    return item.nodeid + inspect.getsource(inspect.unwrap(item.obj)) if isinstance(item, pytest.Function) else ""


# ---- all of them ----


def policies_of(module: str) -> list[Make]:
    """The policies that the module defines, or through which its helpers are tried; with knobs that bite."""
    targets = {option.name: option.target for option in options() if option.origin == "schedlab"}
    names = [name for name, target in targets.items() if target.rpartition(".")[0] == module]
    return [maker(compose([f"policy={name}", *KNOBS.get(name, ())]).policy) for name in names or THROUGH]


def modules(names: Sequence[str]) -> list[ModuleType]:
    """Modules of schedlab.policies by name; all that policies are made of when no name is given."""
    own = "schedlab.policies."
    targets = [option.target for option in options() if option.origin == "schedlab" and option.target.startswith(own)]
    own_rules = dict.fromkeys(target.split(".")[2] for target in targets)
    everything = [*(name for name in own_rules if name not in NOT_TRIED), *HELPERS]
    return [import_module(f"schedlab.policies.{name}") for name in names or everything]


def survey(
    names: Sequence[str], show: Callable[[Fate], object] = lambda fate: None, passed_over: Collection[str] = ()
) -> list[Fate]:
    """The fate of every mutant of the named modules; those of the keys `passed_over` survive untried."""
    files = sorted(str(path) for pattern in TESTS for path in ROOT.glob(pattern))
    assert files, f"the repository's tests are not at {ROOT}"
    plugin = Survey(names, show, passed_over)
    words = ["-qq", "-s", "-n0", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *files]
    ended = pytest.main(words, plugins=[plugin])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"mutate_policies: pytest ended with {ended}")
    return plugin.fates


UNEXPLAINED = "**no test objects**"


def table(fates: Sequence[Fate], reasons: Mapping[str, str]) -> str:
    """Markdown: how many of each module were killed, survivors with their reasons, and what killed the others."""
    killed = Counter(fate.mutant.module for fate in fates if fate.killed)
    total = Counter(fate.mutant.module for fate in fates)
    survivors = [fate.mutant.key for fate in fates if fate.killed is None]
    rows = [f"| {module.rpartition('.')[2]} | {count} | {killed[module]} |" for module, count in total.items()]
    lives = [f"| `{_cell(key)}` | {_cell(reasons.get(key, UNEXPLAINED))} |" for key in survivors]
    deaths = [f"| `{_cell(f.mutant.key)}` | {_cell(f.killed.rpartition('/')[2])} |" for f in fates if f.killed]
    return "\n".join(
        [
            "# Mutants of the policies", "",
            "Comparisons of `policies/` moved at their edges and turned round, whole numbers moved by one.",
            "Written by `python -m schedlab.experiments.bench.mutate_policies`.", "",
            f"Not tried: {', '.join(NOT_TRIED)}: they follow other schedulers and are held to their decisions.", "",
            "| module | mutants | killed |", "|---|---|---|", *rows,
            f"| **all** | {total.total()} | {killed.total()} |", "",
            "## Survivors", "", "| mutant | why it makes no difference |", "|---|---|", *lives, "",
            "## Killed", "", "| mutant | by |", "|---|---|", *deaths, "",
        ]
    )  # fmt: skip


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, help=f"where the table goes (default, for all modules: {RESULTS.name})")
    parser.add_argument("--explained", action="store_true", help="try those that have a reason to survive, too")
    words = parser.parse_args()
    reasons = {str(key): str(reason) for key, reason in OmegaConf.load(REASONS).items()}
    started = time.monotonic()
    passed_over = [] if words.explained else list(reasons)
    fates = survey(words.names, lambda fate: print(_told(fate, reasons), flush=True), passed_over)
    survivors = [fate for fate in fates if fate.killed is None]
    print(f"\n{len(fates)} mutants, {len(survivors)} survive; {time.monotonic() - started:.0f} s")
    print("\n".join(_told(fate, reasons) for fate in survivors))
    out = words.out or (None if words.names else RESULTS)
    if out is not None:
        out.write_text(table(fates, reasons))
    sys.exit(any(fate.mutant.key not in reasons for fate in survivors))


def _told(fate: Fate, reasons: Mapping[str, str]) -> str:
    key = fate.mutant.key
    return f"{key}   {fate.killed or f'SURVIVES: {reasons.get(key, UNEXPLAINED)}'}"


if __name__ == "__main__":
    main()
