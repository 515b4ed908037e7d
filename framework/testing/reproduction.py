"""A failure as a file: a Python program that shows it again, alone, and a test that pytest collects.

Knows how a policy can be made again from its class and knobs; knows no property.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import MISSING, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from schedlab.framework.policy import Policy
from schedlab.framework.testing.case import Case, Subject, Violation

TEMPLATE = '''"""{policy} does not have the property `{name}`:

    {what}

Run this file to see it again, or let pytest collect it. It ends with 0 as soon as the policy is right.
"""

{imports}from schedlab.testing import SLO, Case, Spec, again


{source}


CASE = {case}


def test_{name}():
    again({name!r}, make, CASE)


if __name__ == "__main__":
    test_{name}()
'''


def program(subject: Subject, case: Case | None, violation: Violation) -> str:
    """Python text that reproduces the violation; a case of None stands for the loads that are always the same."""
    imports, source = construction(subject.make()) if subject.source is None else ("", subject.source)
    return TEMPLATE.format(
        policy=subject.name,
        name=violation.name,
        what=violation.what.replace("\\", "\\\\"),
        imports=imports,
        source=source.strip(),
        case="None  # the kit's own loads" if case is None else case.literal(),
    )


def construction(policy: Policy) -> tuple[str, str]:
    """Imports, and a function `make` that builds a policy of the same class and knobs."""
    cls = type(policy)
    knobs = _knobs(policy)
    if cls.__qualname__ != cls.__name__ or cls.__module__ == "__main__" or knobs is None:
        return "", (
            "def make():\n"
            f'    raise NotImplementedError("return a fresh {cls.__qualname__}: it cannot be built from its name")\n'
        )
    root = root_to_add(cls.__module__)
    path = path_lines(root)
    words = ", ".join(f"{name}={value!r}" for name, value in knobs.items())
    imported = f"from {cls.__module__} import {cls.__name__}\n"
    return path + imported, f"def make():\n    return {cls.__name__}({words})\n"


def _knobs(policy: Any) -> dict[str, object] | None:
    """Constructor arguments that differ from their defaults; None if one cannot be written down."""
    if not is_dataclass(policy):
        return {} if _takes_nothing(type(policy)) else None
    knobs = {}
    for field in fields(policy):
        value = getattr(policy, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if not field.init or value == default:
            continue
        try:
            ast.literal_eval(repr(value))
        except (ValueError, SyntaxError):
            return None
        knobs[field.name] = value
    return knobs


def _takes_nothing(cls: type) -> bool:
    """Whether an object of the class can be made without arguments."""
    parameters = list(inspect.signature(cls).parameters.values())
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def path_lines(root: Path | None) -> str:
    """Python that puts `root` first on the path of imports."""
    return f"import sys\n\nsys.path.insert(0, {str(root)!r})\n" if root else ""


def root_to_add(module: str) -> Path | None:
    """The folder from which `module` is imported, if other processes would not look there by themselves."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).resolve().parents[module.count(".") + (Path(spec.origin).stem == "__init__")]
    return None if module.startswith("schedlab.") or root.is_relative_to(sys.prefix) else root
