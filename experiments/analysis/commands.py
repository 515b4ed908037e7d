"""The arguments of the commands on finished runs. Nothing is imported before a command is called: help is quick."""

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
Out = Annotated[Path | None, typer.Option(help="where to write instead")]
Trust = Annotated[bool, typer.Option("--trust", help="import classes that a run names, whosesoever they are")]
FORMS = ("terminal", "json", "markdown", "csv")


def check_form(form: str) -> None:
    if form not in FORMS:
        raise ConfigError(f"--format {form}: expected one of {', '.join(FORMS)}")


def compare(
    directories: Annotated[list[Path], typer.Argument(help="run or sweep directories")],
    baseline: Annotated[
        str | None, typer.Option(help="what the others are judged against: a variant, a policy or a directory")
    ] = None,
    primary: Annotated[str, typer.Option(help="the one metric that the question is about")] = "goodput/requests_per_s",
    metric: Annotated[
        list[str] | None, typer.Option(help="another metric to look at, in place of the usual ones")
    ] = None,
    gate: Annotated[
        list[str] | None, typer.Option(help="'ttft/p99 +5%': exit with 1 on a confident regression beyond that")
    ] = None,
    level: Annotated[float, typer.Option(help="of the intervals")] = 0.95,
    effect: Annotated[float, typer.Option(help="the smallest relative change that matters: 0.01 is 1 %")] = 0.01,
    format: Annotated[str, typer.Option(help="terminal, json, markdown, or csv: the runs")] = "terminal",
    out: Annotated[
        Path | None, typer.Option(help="where verdicts.json and .md go; into the sweep, if left out")
    ] = None,
    wandb: Annotated[str | None, typer.Option(help="offline, online or disabled; as the runs, if left out")] = None,
    bounds: Annotated[bool, typer.Option(help="show how far runs are from what no schedule could beat")] = True,
) -> None:
    """Table of finished runs, and verdicts from paired replicates: better, worse, below what matters, inconclusive."""
    from schedlab.experiments.analysis import compare as comparing

    check_form(format)
    if wandb not in (None, "offline", "online", "disabled"):
        raise ConfigError(f"--wandb {wandb}: expected offline, online or disabled")
    if not 0.5 <= level < 1:
        raise ConfigError(f"--level {level}: expected a probability from 0.5 up to 1")
    if not 0 <= effect < 1:
        raise ConfigError(f"--effect {effect}: expected a share from 0 up to 1")
    options = {
        "baseline": baseline, "primary": primary, "metrics": metric or None, "gates": gate or (), "level": level,
        "effect": effect,
    }  # fmt: skip
    if comparing.compare(directories, form=format, out=out, wandb_mode=wandb, bounds=bounds, options=options):
        raise typer.Exit(1)


def replay(
    directory: Annotated[Path, typer.Argument(help="a run directory")],
    words: Annotated[list[str] | None, typer.Argument(help="knobs of the other policy: policy.chunk_size=256")] = None,
    policy: Annotated[str | None, typer.Option(help="another policy, on the same arrivals")] = None,
    out: Annotated[Path | None, typer.Option(help="a directory that keeps the run under the other policy")] = None,
    trust: Trust = False,
) -> None:
    """Execute a run again from its files: the same decisions, or those of another policy."""
    from schedlab.experiments.analysis.replay import replay_command

    if policy is None and (words or out):
        raise ConfigError("replay: knobs and --out are for another policy, --policy NAME")
    if not replay_command(directory, policy, words or (), out, trust=trust):
        raise typer.Exit(1)


def diff(
    a: Annotated[Path, typer.Argument(help="a run directory")],
    b: Annotated[Path, typer.Argument(help="another")],
    requests: Annotated[int, typer.Option(help="so many requests, those first that fare worst in the other run")] = 10,
    step: Annotated[bool, typer.Option("--step", help="walk on from where they part")] = False,
    format: Annotated[str, typer.Option(help="terminal or json")] = "terminal",
    trust: Trust = False,
) -> None:
    """The first step at which two runs part: what each saw and decided, and what it did to each request."""
    from schedlab.experiments.analysis.diff import diff as show_difference

    if format not in ("terminal", "json"):
        raise ConfigError(f"--format {format}: expected terminal or json")
    if requests < 0:
        raise ConfigError(f"--requests {requests}: expected 0 or more")
    show_difference(a, b, requests=requests, step=step, form=format, trust=trust)


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


def declare(app: typer.Typer) -> None:
    """Make the functions above commands of `app`."""
    for command in (compare, replay, diff, timeline, explain, report, plot, metrics):
        app.command()(command)
