"""Commands that turn the files of finished runs into evidence: timeline, explain, report. The work is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.framework.errors import ConfigError

RunDirectory = Annotated[Path, typer.Argument(help="a run directory")]
Start = Annotated[float | None, typer.Option(help="seconds of engine time")]
Tried = Annotated[
    bool | None,
    typer.Option("--try/--no-try", help="run suggestions on the virtual clock; left out: if this machine made the run"),
]
Trust = Annotated[bool, typer.Option("--trust", help="import classes that the run names, whosesoever they are")]
Out = Annotated[Path | None, typer.Option(help="where to write instead")]


def timeline(directory: RunDirectory, start: Start = None, stop: Start = None, out: Out = None) -> None:
    """Write timeline.json of a run, or of a window of it, for ui.perfetto.dev or chrome://tracing."""
    from schedlab.experiments.analysis.timeline import TIMELINE, write_timeline
    from schedlab.framework.results.reader import read_run

    whole = start is None and stop is None
    window = f"timeline-{start or 0:g}-{'end' if stop is None else f'{stop:g}'}.json"
    path = out or directory / (TIMELINE if whole else window)
    print(f"{write_timeline(read_run(directory), path, start, stop):,} events in {path}")


def explain(
    directory: RunDirectory,
    tried: Tried = None,
    trust: Trust = False,
    format: Annotated[str, typer.Option(help="terminal or json")] = "terminal",
) -> None:
    """Where the wait of a run came from, what to change, and what the change does."""
    from schedlab.experiments.analysis.explain import explain as explain_run
    from schedlab.experiments.analysis.explain import show

    if format not in ("terminal", "json"):
        raise ConfigError(f"--format {format}: expected terminal or json")
    show(explain_run(directory, tried, trust), format)


def report(
    directory: Annotated[Path, typer.Argument(help="a run or sweep directory")],
    out: Out = None,
    tried: Tried = None,
    trust: Trust = False,
) -> None:
    """One HTML file on a run or a sweep that needs nothing else; its pictures as PNG and SVG beside it."""
    from schedlab.experiments.analysis.report import write_report

    path, pictures = write_report(directory, out, tried, trust)
    print(f"{path}, and {len(pictures)} pictures in {path.parent / 'plots'}")


def metrics() -> None:
    """Every metric that compare, gates and searches take, with its meaning."""
    from schedlab.experiments.analysis.metrics import show_metrics

    show_metrics()


def add_to(app: typer.Typer) -> None:
    """Declare the commands."""
    for command in (timeline, explain, report, metrics):
        app.command()(command)
