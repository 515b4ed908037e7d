"""Puts configs from outside on schedlab's search path: other distributions', then `./conf` of the current folder.

A distribution names its config package in the entry-point group `schedlab.conf`. One that cannot be imported is skipped
with a warning, because Hydra imports every `pkg://` source at composition and would fail every run, theirs or not.
`SCHEDLAB_DISABLE_PLUGINS=1` leaves distributions out. Other Hydra applications are left alone: Hydra shows this plugin
to them too. Knows nothing of what the configs say.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

GROUP = "schedlab.conf"
OURS = "pkg://schedlab.conf"


class SchedlabSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if not any(element.path == OURS for element in search_path.get_path()):
            return
        owners = dict.fromkeys(config_options(files("schedlab.conf")), "schedlab")
        for entry in declared_entries():
            options = usable_options(entry)
            if options is None:
                continue
            warn_of_hidden(options, origin(entry), owners)
            search_path.append(provider=f"plugin:{origin(entry)}", path=f"pkg://{entry.value}")
        local = Path.cwd() / "conf"
        if local.is_dir() and not (local / "__init__.py").exists():  # not schedlab's own, seen from its repository
            warn_of_hidden(config_options(local), "./conf", owners)
            search_path.append(provider="current folder", path=f"file://{local}")


def declared_entries() -> list[EntryPoint]:
    if os.environ.get("SCHEDLAB_DISABLE_PLUGINS") == "1":
        return []
    return sorted(entry_points(group=GROUP), key=lambda entry: (origin(entry), entry.value))


def origin(entry: EntryPoint) -> str:
    """The distribution that declares the entry point."""
    return entry.dist.name if entry.dist is not None else entry.value


def usable_options(entry: EntryPoint) -> list[str] | None:
    """The config options that the package brings, or None, with a warning, if it cannot be imported."""
    try:
        import_module(entry.value)
        return list(config_options(files(entry.value)))
    except Exception as error:  # whatever their import raises, everyone else's runs go on
        warn(f"{origin(entry)} is skipped: {entry.value} cannot be imported ({type(error).__name__}: {error})")
        return None


def config_options(folder: Traversable, prefix: str = "") -> Iterable[str]:
    """`policy/theirs` for each YAML file below `folder`."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from config_options(item, f"{prefix}{item.name}/")
        elif prefix and item.name.endswith(".yaml"):
            yield prefix + item.name.removesuffix(".yaml")


def warn_of_hidden(options: Iterable[str], name: str, owners: dict[str, str]) -> None:
    """Record `name` as owner of its options; the first on the search path wins, so say which ones lose."""
    for option in options:
        owner = owners.setdefault(option, name)
        if owner != name:
            warn(f"{name}: its {option} is hidden by that of {owner}; <group>/<vendor>/<name> cannot clash")


def warn(message: str) -> None:
    warnings.warn(f"config {message}", stacklevel=2)
