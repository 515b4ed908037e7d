"""`schedlab policy …`: its commands. The work is in policy.py; nothing is imported before a command is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

policies = typer.Typer(help="Policies: what there are, a package for a new one, and whether one keeps the contract.")


@policies.command("list")
def list_policies() -> None:
    """What policy= accepts: name, class, and the distribution that brings it."""
    from schedlab.experiments.policy import show_policies

    show_policies()


@policies.command()
def new(
    name: Annotated[str, typer.Argument(help="of the policy and its package: small letters, digits, - and _")],
    folder: Annotated[Path, typer.Option("--in", help="where the package's folder is made")] = Path("."),
) -> None:
    """Write an installable package with one policy, its YAML and its test."""
    from schedlab.experiments.policy import new_package

    written = new_package(name, folder)
    root, option = folder / name, name.replace("-", "_")
    print(*written, sep="\n")
    print(f"\nnext: pip install -e {root}\n      schedlab policy check policy={option}")
    print(f"      schedlab run policy={option} engine=virtual model=llama3.1-8b")


@policies.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def check(context: typer.Context) -> None:
    """Try the contract's properties on a policy: schedlab policy check policy=NAME check.seconds=25"""
    from schedlab.experiments.policy import check_job
    from schedlab.experiments.run.compose import run_with_overrides

    run_with_overrides(check_job, context.args, "policy check")
