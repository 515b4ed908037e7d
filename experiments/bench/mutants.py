"""Mutants of a module: copies with one comparison or one number changed, and how one takes the module's place."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, ModuleType
from typing import Any

FLIPS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
"""The edge moved, and the opposite."""


@dataclass(frozen=True)
class Mutant:
    """One change of one function: `before` becomes `after`."""

    module: str
    function: str
    before: str
    after: str
    tree: ast.Module

    @property
    def key(self) -> str:
        """What it is called wherever it is spoken of; its line would change with every edit above it."""
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.before} -> {self.after}"


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """Comparisons of the module's functions, each moved at its edge and turned round; whole numbers, moved by one."""
    tree = ast.parse(inspect.getsource(module))
    for path, function, node in _walk(tree):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = _at(mutated, path)
            shown = _shown(tree, path)
            change(target)
            after = ast.unparse(_at(mutated, shown))
            before = ast.unparse(_at(tree, shown))
            yield Mutant(module.__name__, function, before, after, ast.fix_missing_locations(mutated))


Way = tuple[tuple[str, int | None], ...]


def _walk(node: ast.AST, path: Way = (), scope: str = "", inside: bool = False) -> Iterator[tuple[Way, str, Any]]:
    """Comparisons and numbers inside of functions, with the way to each and the name of the function."""
    if inside and isinstance(node, (ast.Compare, ast.Constant)):
        yield path, scope, node
    inside = inside or isinstance(node, ast.FunctionDef)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        scope = f"{scope}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_hint(name):
                yield from _walk(child, (*path, (name, i)), scope, inside)


def _is_hint(name: str) -> bool:
    return name in ("annotation", "returns", "decorator_list")


def _at(node: Any, path: Way) -> Any:
    for name, i in path:
        node = getattr(node, name) if i is None else getattr(node, name)[i]
    return node


def _shown(tree: ast.AST, path: Way) -> Way:
    """The way to what tells a reader where the change is: the expression or the simple statement around it."""
    node = _at(tree, path)
    while isinstance(node, ast.Constant) or len(ast.unparse(node)) < 12:
        if isinstance(_at(tree, path[:-1]), (ast.If, ast.For, ast.While, ast.FunctionDef)):
            break
        path = path[:-1]
        node = _at(tree, path)
    return path


def _changes(node: ast.AST) -> list[Callable[[Any], None]]:
    if isinstance(node, ast.Compare):
        return [_flip(i, to) for i, op in enumerate(node.ops) for to in FLIPS[type(op)]]
    assert isinstance(node, ast.Constant)
    return [_move(1), _move(-1)] if type(node.value) is int else []


def _flip(i: int, to: type[ast.cmpop]) -> Callable[[Any], None]:
    def change(node: Any) -> None:
        node.ops[i] = to()

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
        if is_of(value, mutant.module):
            _take_code(value, names[name])


def _take_code(ours: Any, theirs: Any) -> None:
    if inspect.isclass(ours):
        for name, value in vars(ours).items():
            if name in vars(theirs):
                _take_code(value, vars(theirs)[name])
    elif isinstance(ours, property):
        _take_code(ours.fget, theirs.fget)
    elif isinstance(ours, cached_property):
        _take_code(ours.func, theirs.func)
    elif isinstance(ours, FunctionType) and ours.__code__.co_filename != "<string>":  # as what a dataclass writes
        ours.__code__, ours.__defaults__ = theirs.__code__, theirs.__defaults__


def is_of(value: Any, module: str) -> bool:
    """Whether the class or function is defined in the module of this name."""
    return getattr(value, "__module__", None) == module
