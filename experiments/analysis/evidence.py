"""Commands that turn the files of finished runs into evidence: timeline, explain, report. The work is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from schedlab.framework.errors import ConfigError

RunDirectory = Annotated[Path, typer.Argument(help="a run directory")]
Start = Annotated[float | None, typer.Option(help="seconds of engine time")]
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
    tried: Annotated[bool, typer.Option("--try/--no-try", help="run each suggestion on the virtual clock")] = True,
    format: Annotated[str, typer.Option(help="terminal or json")] = "terminal",
) -> None:
    """Where the wait of a run came from, what to change, and what the change does."""
    from schedlab.experiments.analysis.explain import explain as explain_run
    from schedlab.experiments.analysis.explain import show

    if format not in ("terminal", "json"):
        raise ConfigError(f"--format {format}: expected terminal or json")
    show(explain_run(directory, tried), format)


def report(
    directory: Annotated[Path, typer.Argument(help="a run or sweep directory")],
    out: Out = None,
    tried: Annotated[bool, typer.Option("--try/--no-try", help="run what the explanations suggest")] = True,
) -> None:
    """One HTML file on a run or a sweep that needs nothing else; its pictures as PNG and SVG beside it."""
    from schedlab.experiments.analysis.report import write_report

    path, pictures = write_report(directory, out, tried)
    print(f"{path}, and {len(pictures)} pictures in {path.parent / 'plots'}")


def plot(
    directories: Annotated[list[Path], typer.Argument(help="run or sweep directories")],
    x: Annotated[str | None, typer.Option("--x", help="the swept number: engine.max_num_seqs, rate, …")] = None,
    y: Annotated[list[str] | None, typer.Option("--y", help="a metric; more than once for more pictures")] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="throughput per device against that per user")] = False,
    out: Annotated[Path | None, typer.Option(help="the folder of the pictures; plots in the first directory")] = None,
) -> None:
    """Metrics against a number that a sweep varied: PNG, SVG, and the data as CSV."""
    from schedlab.experiments.analysis.curves import plot as draw

    for path in draw(directories, x, y or (), pareto, out):
        print(path)


def metrics() -> None:
    """Every metric that compare, gates and searches take, with its meaning."""
    from schedlab.experiments.analysis.metrics import show_metrics

    show_metrics()


def add_to(app: typer.Typer) -> None:
    """Declare the commands."""
    for command in (timeline, explain, report, plot, metrics):
        app.command()(command)
