"""`schedlab policy`: what policies there are, a package for a new one, and whether one keeps the contract.

The properties themselves are `schedlab.framework.testing`'s.
"""

from __future__ import annotations

import copy
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

import schedlab
from schedlab.experiments.run import compose
from schedlab.experiments.run.checks import check_arguments
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy

TEMPLATE = "package"
"""Folder of the templates beside this file: `common` to all packages, and those of a kind; `*.j2` files, with `NAME` in
their paths filled in."""
VALUES = ("true", "false", "null", "nan", "inf")
"""Words that Hydra takes for something else than text."""


# ---- check ----


@dataclass(frozen=True)
class CheckSettings:
    """The node `check` of the config."""

    seconds: float
    against: list[str]
    only: list[str] | None


def check_job(config: DictConfig) -> None:
    """Try every property on the configured policy, print the report, exit with 1 if one fails."""
    from schedlab.framework.testing.conformance import check
    from schedlab.framework.testing.report import PROPERTIES

    keys = compose.resolve(config.check)
    check_arguments("check", keys, CheckSettings)
    settings = CheckSettings(**keys)
    for name in settings.only or ():
        if name not in PROPERTIES:
            raise ConfigError(compose.no_such(f"check.only: {name} is no property", name, list(PROPERTIES), "the kit"))
    make = maker(config.policy)
    with compose.blaming("check.against"):
        against = {name: maker(compose.compose([f"policy={name}"]).policy) for name in settings.against}
    report = check(
        make,
        against=against,
        seconds=settings.seconds,
        seed=config.seed,
        only=settings.only or tuple(PROPERTIES),
        source=source_of(config.policy),
    )
    print(report)
    for path in report.write(compose.output_directory()):
        print(f"to see it again: python {path}")
    if not report.passed:
        raise SystemExit(1)


def maker(node: DictConfig) -> Callable[[], Policy]:
    """Fresh policies like the one that `node` describes."""
    prototype = compose.build(node, "policy")
    return lambda: copy.deepcopy(prototype)


def source_of(node: DictConfig) -> str:
    """Python that makes the policy of `node` without its YAML."""
    from schedlab.framework.testing.reproduction import path_lines, root_to_add

    keys = OmegaConf.to_container(node, resolve=True)
    path = path_lines(root_to_add(str(node._target_).rpartition(".")[0]))
    return (
        f"{path}\n\ndef make():\n"
        "    from hydra.utils import instantiate\n\n"
        f"    return instantiate({keys!r}, _convert_='all')\n"
    )


# ---- list ----


class Option(NamedTuple):
    """What `policy=name` chooses, and the distribution that brings it; `./conf` has no version."""

    name: str
    target: str
    origin: str
    version: str


def show_policies() -> None:
    """A table of all that `policy=` accepts."""
    rows = [("policy", "class", "origin", "version"), *options()]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def options(group: str = "policy") -> list[Option]:
    """Every option of `group` by name, each from the first place on the search path that has it."""
    found: dict[str, Option] = {}
    for folder, origin, origin_version in _places():
        for name in _named(folder, group):
            target = _target(folder / group / f"{name}.yaml")
            shown = f"given by {group}._target_" if target == "???" else target
            found.setdefault(name, Option(name, shown, origin, origin_version))
    return [found[name] for name in sorted(found)]


def _target(file: Traversable) -> str:
    """The class that an option's file names, or that it cannot be read, with a warning that says why."""
    try:
        keys = OmegaConf.to_container(OmegaConf.create(file.read_text(encoding="utf-8")))
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        warnings.warn(f"{compose.flat(error)} (in {file})", stacklevel=2)
        return "cannot be read"
    return str(keys.get("_target_", "???")) if isinstance(keys, dict) else "???"


def _places() -> Iterator[tuple[Traversable, str, str]]:
    """Folders of configs in the order of the search path, with the distribution of each and its version."""
    from hydra_plugins.schedlab_searchpath.plugin import declared_entries, origin, usable_options

    yield files("schedlab.conf"), "schedlab", schedlab.__version__
    for entry in declared_entries():
        if usable_options(entry) is not None:
            yield files(entry.value), origin(entry), entry.dist.version if entry.dist is not None else ""
    local = Path.cwd() / "conf"
    if local.is_dir() and not (local / "__init__.py").exists():
        yield local, "./conf", ""


def _named(folder: Traversable, group: str) -> list[str]:
    """Names of the options of `group` in a folder of configs, without what they share parts of."""
    from hydra_plugins.schedlab_searchpath.plugin import config_options

    start = f"{group}/"
    names = [option.removeprefix(start) for option in config_options(folder) if option.startswith(start)]
    return [name for name in names if not name.startswith("shared/")]


# ---- new ----


def new_package(name: str, folder: Path, kind: str = "policy") -> list[Path]:
    """Write an installable package of one policy or one router (`kind`) into `folder / name`; returns its files.

    ConfigError for a name that cannot be a module's, or that something has already.
    """
    package, root = name.replace("-", "_"), folder / name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package):
        raise ConfigError(f"policy new {name}: expected a name of small letters, digits, - and _, such as my_policy")
    if (whose := _owner(package, root, kind)) is not None:
        raise ConfigError(f"policy new {name}: {whose}; choose another name")
    words = {"name": package, "project": name, "class": "".join(map(str.capitalize, package.split("_"))), "kind": kind}
    return [_render(part, source, root, words) for part in ("common", kind) for source in _sources(part)]


def _owner(package: str, root: Path, kind: str) -> str | None:
    """What makes `package` unusable as the name of a module, a project and an option, in words; None if it is free."""
    taken = {option.name: option.origin for option in options(kind)}
    if package in taken:
        return f"{taken[package]} has a {kind} of this name"
    if keyword.iskeyword(package) or keyword.issoftkeyword(package):
        return "Python has this word for itself"
    if package in VALUES:
        return f"{kind}={package} would be read as a value"
    if package in sys.stdlib_module_names:
        return "Python's standard library has a module of this name"
    if root.exists():
        return f"{root} exists already"
    return _installed(package)


def _installed(package: str) -> str | None:
    """Who has the module or the project `package` already, in words; an empty folder of that name has not."""
    found = find_spec(package)
    if found is not None and found.origin is not None:
        return f"a module of this name is installed, {found.origin}"
    try:
        return f"the project {distribution(package).name} is installed"
    except PackageNotFoundError:
        return None


def _sources(part: str) -> list[Path]:
    return sorted((Path(__file__).parent / TEMPLATE / part).rglob("*.j2"))


def _render(part: str, source: Path, root: Path, words: dict[str, str]) -> Path:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    place = source.relative_to(Path(__file__).parent / TEMPLATE / part).with_suffix("")
    path = root / environment.from_string(str(place).replace("NAME", words["name"])).render(words)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(environment.from_string(source.read_text(encoding="utf-8")).render(words), encoding="utf-8")
    return path
