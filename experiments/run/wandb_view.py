"""`schedlab wandb view`: the panels by which W&B compares policies, as a file, or saved as a view of a project.

What they show is wandb_view.yaml beside this file, in the keys that tracking.py logs. Saving takes `wandb-workspaces`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from schedlab.framework.errors import ConfigError
from schedlab.framework.results.metrics import SUMMARY_KEYS
from schedlab.framework.results.writer import write_json

NEEDED = "wandb_workspaces"


@dataclass(frozen=True)
class Panel:
    """Bars of `y` by policy, points or lines of `y` over `x`."""

    kind: Literal["bars", "points", "lines"]
    title: str
    y: str
    x: str | None = None


@dataclass(frozen=True)
class View:
    """A page of W&B's: its sections have panels; runs are grouped by a key of their config."""

    name: str
    group_by: str
    sections: dict[str, list[Panel]]


def view() -> View:
    told: Any = OmegaConf.to_container(OmegaConf.create((files(__package__) / "wandb_view.yaml").read_text()))
    sections = {name: [Panel(**panel) for panel in panels] for name, panels in told["sections"].items()}
    return View(told["name"], told["group_by"], sections)


def view_command(project: str, entity: str | None, out: Path, save: bool) -> None:
    """Write the view's spec to `out`; with `save`, into the project, and print where."""
    if not save:
        write_json(out, spec(entity or "", project))
        print(f"{out}; --save makes it a view of {project}: it needs --entity, `wandb login`{_needed()}")
        return
    if entity is None:
        raise ConfigError("--save: expected --entity NAME, the user or team whose project it is, found none")
    if _needed():
        raise ConfigError(f"--save: expected the package wandb-workspaces{_needed()}")
    print(saved(entity, project))


def _needed() -> str:
    return "" if importlib.util.find_spec(NEEDED) else "; pip install schedlab[wandb-view]"


def spec(entity: str, project: str) -> dict[str, Any]:
    """What a file holds: the view in plain words."""
    told = view()
    sections = [
        {"name": name, "panels": [{k: v for k, v in vars(panel).items() if v is not None} for panel in panels]}
        for name, panels in told.sections.items()
    ]
    return {
        "entity": entity, "project": project, "name": told.name, "group_by": told.group_by, "sections": sections,
    }  # fmt: skip


def saved(entity: str, project: str) -> str:
    """Upload the view as a new one and return its address; ConfigError where W&B refuses."""
    import wandb

    try:
        page = workspace(entity, project)
        page.save()
    except (wandb.errors.Error, OSError, ValueError) as error:
        raise ConfigError(f"--save: W&B took no view of {entity}/{project}: {error}") from error
    return str(page.url)


def workspace(entity: str, project: str) -> Any:
    """The view as `wandb_workspaces` has it."""
    from wandb_workspaces import workspaces

    told = view()
    sections = [
        workspaces.Section(name=name, panels=[drawn(panel, told.group_by) for panel in panels], is_open=True)
        for name, panels in told.sections.items()
    ]
    grouped = workspaces.RunsetSettings(groupby=[workspaces.Config(told.group_by)])
    return workspaces.Workspace(
        entity=entity, project=project, name=told.name, sections=sections, runset_settings=grouped
    )


def drawn(panel: Panel, group_by: str) -> Any:
    from wandb_workspaces.reports import v2

    if panel.kind == "lines":
        return v2.LinePlot(title=panel.title, x=panel.x, y=[panel.y])
    if panel.kind == "points":
        return v2.ScatterPlot(title=panel.title, x=key_of(panel.x), y=key_of(panel.y))
    return v2.BarPlot(title=panel.title, metrics=[panel.y], groupby=f"config.{group_by}")


def key_of(name: str | None) -> Any:
    """A figure of the summary, or a key of the config."""
    from wandb_workspaces.reports import v2

    return v2.SummaryMetric(name) if name in SUMMARY_KEYS else v2.Config(name)
