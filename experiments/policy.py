"""`schedlab policy`: what policies there are, a package for a new one, and whether one keeps the contract.

Knows config options and packages; the properties themselves are `schedlab.framework.testing`'s.
"""

from __future__ import annotations

import copy
import keyword
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

import schedlab
from schedlab.experiments import compose
from schedlab.experiments.checks import check_arguments
from schedlab.framework.errors import ConfigError
from schedlab.framework.policy import Policy

TEMPLATE = "package"
"""Folder of the template beside this file: `*.j2` files, with `package` and `name` in their paths filled in."""


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
    report = check(
        maker(config.policy),
        against={name: maker(compose.compose([f"policy={name}"]).policy) for name in settings.against},
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
    keys = OmegaConf.to_container(node, resolve=True)
    return (
        f"def make():\n    from hydra.utils import instantiate\n\n    return instantiate({keys!r}, _convert_='all')\n"
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


def options() -> list[Option]:
    """Every option of the group `policy` by name, each from the first place on the search path that has it."""
    from hydra_plugins.schedlab_searchpath.plugin import config_options, declared_entries, origin, usable_options

    owners = dict.fromkeys(_policies(config_options(files("schedlab.conf"))), ("schedlab", schedlab.__version__))
    for entry in declared_entries():
        named = (origin(entry), version(origin(entry)) if entry.dist is not None else "")
        for name in _policies(usable_options(entry) or ()):
            owners.setdefault(name, named)
    local = Path.cwd() / "conf"
    if local.is_dir() and not (local / "__init__.py").exists():
        for name in _policies(config_options(local)):
            owners.setdefault(name, ("./conf", ""))
    return [Option(name, _target(name), *owners[name]) for name in sorted(owners)]


def _policies(options: Any) -> Iterator[str]:
    names = (option.removeprefix("policy/") for option in options if option.startswith("policy/"))
    return (name for name in names if not name.startswith("shared/"))  # what other options are made of


def _target(name: str) -> str:
    try:
        node = compose.compose([f"policy={name}"]).policy
    except ConfigError as error:
        return f"({error})"
    return "given by policy._target_" if OmegaConf.is_missing(node, "_target_") else str(node._target_)


# ---- new ----


def new_package(name: str, folder: Path) -> list[Path]:
    """Write an installable package of one policy into `folder / name`; returns its files.

    ConfigError for a name that is no identifier, or that a policy or a folder has already.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", package) or keyword.iskeyword(package):
        raise ConfigError(f"policy new {name}: expected a name of small letters, digits, - and _, such as my_policy")
    taken = {option.name: option.origin for option in options()}
    if package in taken:
        raise ConfigError(f"policy new {name}: {taken[package]} has a policy of this name")
    root = folder / name
    if root.exists():
        raise ConfigError(f"policy new {name}: {root} exists already")
    words = {"name": package, "project": name, "class": "".join(map(str.capitalize, package.split("_")))}
    return [_render(source, root, words) for source in _sources()]


def _sources() -> list[Path]:
    return sorted((Path(__file__).parent / TEMPLATE).rglob("*.j2"))


def _render(source: Path, root: Path, words: dict[str, str]) -> Path:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    place = source.relative_to(Path(__file__).parent / TEMPLATE).with_suffix("")
    path = root / environment.from_string(str(place).replace("NAME", words["name"])).render(words)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(environment.from_string(source.read_text()).render(words))
    return path
