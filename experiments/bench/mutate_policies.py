"""Changes one comparison or one number of a policy at a time and asks whether anything objects.

`python -m schedlab.experiments.bench.mutate_policies fcfs common`; all of them without names. The conformance kit may
object, and the policies' own tests where the repository is at hand. What both let pass is listed with its line, and
with whether it ever decided otherwise than the original: one that never did may mean the same. Each mutant runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import ast
import copy
import inspect
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from types import FunctionType, ModuleType
from typing import Any

from schedlab.experiments.compose import compose
from schedlab.experiments.policy import maker, options
from schedlab.framework.policy import Policy
from schedlab.framework.testing.case import Case, Subject, Violation
from schedlab.framework.testing.conformance import BEHAVIOUR, check
from schedlab.framework.testing.harness import Spec
from schedlab.framework.testing.repeats import digests

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
HELPERS = ("common", "preemption", "ranking", "victims")
"""Modules of policies that define none; they are tried through these policies."""
THROUGH = ("chunked_prefill", "priority")
TIMEOUT_S = 90.0
KNOBS = {
    "chunked_prefill": ["policy.chunk_size=12"],
    "decode_priority": ["policy.stall_tokens=5", "policy.max_prefill_streak=2", "policy.watermark_blocks=2"],
    "prefix_reuse": ["policy.chunk_size=12"],
    "static_batching": ["policy.batch_size=3"],
}
"""Knobs that bite on the kit's tiny engines, where those of the YAML would not."""
FIRST, LAST = tuple(BEHAVIOUR), ("gap", "cache", "waiting", "hold")
"""Properties of the kit that are tried before the policies' own tests, and after them."""
ROOT = Path(__file__).resolve().parents[2]
TESTS = [str(path) for path in sorted((ROOT / "tests/framework").glob("test_*policies.py"))]


@dataclass(frozen=True)
class Mutant:
    """One change of one module: `before` becomes `after` in `line`."""

    module: str
    line: int
    before: str
    after: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


@dataclass(frozen=True)
class Fate:
    """`killed` says by what; None for a survivor, which `differs` from the original on some trace or on none."""

    mutant: Mutant
    killed: str | None
    differs: bool = True


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """Every comparison of the module's functions flipped at its edge, every whole number moved by one."""
    tree = ast.parse(inspect.getsource(module))
    for path, node in _walk(tree):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = _at(mutated, path)
            before = ast.unparse(node)
            change(target)
            yield Mutant(module.__name__, node.lineno, before, ast.unparse(target), ast.fix_missing_locations(mutated))


Way = tuple[tuple[str, int | None], ...]


def _walk(node: ast.AST, path: Way = (), inside: bool = False) -> Iterator[tuple[Way, Any]]:
    """Comparisons and numbers inside of functions, with the way to each."""
    if inside and isinstance(node, (ast.Compare, ast.Constant)):
        yield path, node
    inside = inside or isinstance(node, (ast.FunctionDef, ast.Lambda))
    for name, value in ast.iter_fields(node):
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_hint(name):
                yield from _walk(child, (*path, (name, i)), inside)


def _is_hint(name: str) -> bool:
    return name in ("annotation", "returns", "decorator_list")


def _at(node: Any, path: Way) -> Any:
    for name, i in path:
        node = getattr(node, name) if i is None else getattr(node, name)[i]
    return node


def _changes(node: ast.AST) -> list[Callable[[Any], None]]:
    if isinstance(node, ast.Compare):
        return [_flip(i) for i, op in enumerate(node.ops) if type(op) in FLIPS]
    assert isinstance(node, ast.Constant)
    return [_move(1), _move(-1)] if type(node.value) is int else []


def _flip(i: int) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        node.ops[i] = FLIPS[type(node.ops[i])]()

    return change


def _move(by: int) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        node.value += by

    return change


def install(mutant: Mutant) -> None:
    """Give the functions of the imported module the mutant's code, wherever they are referred to."""
    module = sys.modules[mutant.module]
    names: dict[str, Any] = {"__name__": mutant.module, "__file__": module.__file__}
    exec(compile(mutant.tree, str(module.__file__), "exec", dont_inherit=True), names)
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) == mutant.module:
            _take_code(value, names[name])


def _take_code(ours: Any, theirs: Any) -> None:
    if isinstance(ours, FunctionType):
        ours.__code__ = theirs.__code__
    elif inspect.isclass(ours):
        for name, value in vars(ours).items():
            if isinstance(value, FunctionType) and value.__code__.co_filename != "<string>":
                _take_code(value, vars(theirs)[name])


# ---- what objects ----


def objection(module: str, makes: Sequence[Callable[[], Policy]]) -> str | None:
    """The first property that fails, or `tests`; None if nothing objects."""
    return _kit(makes, FIRST) or _own_tests(module) or _kit(makes, LAST)


def _kit(makes: Sequence[Callable[[], Policy]], only: Sequence[str]) -> str | None:
    for make in makes:
        report = check(make, only=only, seconds=1.0)
        if not report.passed:
            return report.failures[0].name
    return None


def _own_tests(module: str) -> str | None:
    """Those that name the policy or speak of every knob; for what policies share, all of them."""
    import pytest

    name = module.rpartition(".")[2]
    words = ["-x", "-q", "-n0", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *TESTS]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        ended = pytest.main(words if name in HELPERS else [*words, "-k", f"{name} or knob"]) if TESTS else 0
    return "tests" if ended == pytest.ExitCode.TESTS_FAILED else None


def crowded(seed: int) -> Case:
    """A trace that queues, shares prefixes and outgrows its pool."""
    dice = Random(seed)
    trace = []
    for i in range(14):
        prompt, shared = dice.randint(1, 50), dice.randint(0, 8)
        ids = tuple(k if k < shared else 100 * (i % 3 + 1) + k for k in range(-(-prompt // 4)))
        arrival = dice.randint(0, 30) * 1_000_000
        spec = Spec(f"r{i}", arrival, prompt, dice.randint(1, 20), ids=ids, id_width=4, priority=dice.randint(0, 2))
        trace.append(spec)
    return Case(tuple(sorted(trace, key=lambda spec: spec.arrival_ns)), {"num_blocks": dice.randint(18, 30)})


def decisions(makes: Sequence[Callable[[], Policy]]) -> list[str]:
    try:
        return [digest for make in makes for digest in digests(Subject(make), [crowded(seed) for seed in range(40)])]
    except Violation as violation:
        return [str(violation)]


def fate(mutant: Mutant, makes: Sequence[Callable[[], Policy]], original: list[str]) -> Fate:
    """Try the mutant in a process of its own; one that does not come to an end is killed by that."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_try, args=(theirs, mutant, makes, original))
    process.start()
    try:
        answer = ours.recv() if ours.poll(TIMEOUT_S) else ("no end", True)
    except EOFError:
        answer = ("crash", True)
    process.kill()
    process.join()
    return Fate(mutant, *answer)


def _try(pipe: Any, mutant: Mutant, makes: Any, original: list[str]) -> None:
    try:
        install(mutant)
        killed = objection(mutant.module, makes)
        pipe.send((killed, killed is not None or decisions(makes) != original))
    except Exception as error:  # a mutant that does not even load is objected to
        pipe.send((type(error).__name__, True))


# ---- all of them ----


def policies_of(module: str) -> list[Callable[[], Policy]]:
    """The policies that the module defines, or through which its helpers are tried; with knobs that bite."""
    targets = {option.name: option.target for option in options() if option.origin == "schedlab"}
    names = [name for name, target in targets.items() if target.rpartition(".")[0] == module]
    return [maker(compose([f"policy={name}", *KNOBS.get(name, ())]).policy) for name in names or THROUGH]


def modules(names: Sequence[str]) -> list[ModuleType]:
    """Modules of schedlab.policies by name; all that policies are made of when no name is given."""
    targets = [option.target for option in options() if option.origin == "schedlab" and option.name != "custom"]
    everything = [*dict.fromkeys(target.split(".")[2] for target in targets), *HELPERS]
    return [import_module(f"schedlab.policies.{name}") for name in names or everything]


def survey(names: Sequence[str], show: Callable[[Fate], object] = lambda fate: None) -> list[Fate]:
    """The fate of every mutant of the named modules."""
    fates = []
    for module in modules(names):
        makes = policies_of(module.__name__)
        original = decisions(makes)
        for mutant in mutants(module):
            fates.append(fate(mutant, makes, original))
            show(fates[-1])
    return fates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    words = parser.parse_args()
    started = time.monotonic()
    fates = survey(words.names, lambda f: print("." if f.killed else "S", end="", flush=True))
    survivors = [f for f in fates if f.killed is None]
    print(f"\n{len(fates)} mutants, {len(survivors)} survive; {time.monotonic() - started:.0f} s")
    for survivor in survivors:
        print(f"{survivor.mutant}   ({'decides otherwise' if survivor.differs else 'never decided otherwise'})")


if __name__ == "__main__":
    main()
