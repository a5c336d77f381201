"""`simplebus check-config` and `simplebus config sample`.

The file, and the files that it names, are checked as `serve --config FILE` does, without starting a
server. All errors are reported at once.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from simplebus.config.environment import unread_variables
from simplebus.console.errors import CONFIG_STATUS, fail

CHECK_HELP = (
    "Check a configuration file without starting a server.\n\n"
    "The file, and the files that it names, are checked as "
    "[bold]simplebus serve --config FILE[/bold] does. Every error is printed with its line; the "
    "exit status is then 78.\n\n\b\n"
    "  simplebus check-config /etc/simplebus.toml"
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Configuration files of `simplebus serve`.\n\n\b\n"
        "  simplebus config sample > simplebus.toml\n\n"
        "[bold]simplebus check-config[/bold] checks a file."
    ),
)


def check_config(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", show_default=False, help="TOML file of `serve` to check."),
    ],
) -> None:
    from simplebus.commands.serve.settings import check_file

    warnings, mistakes = check_file(file)
    root = context.find_root().command
    unread = unread_variables(os.environ, root)
    for warning in (*warnings, *unread):
        typer.echo(f"simplebus: {warning}", err=True)
    if mistakes:
        fail("\n".join(mistakes), status=CONFIG_STATUS)
    typer.echo(f"{file} is valid")


@app.command(
    help=(
        "Print a sample configuration file with every setting, its default and its meaning.\n\n"
        "The settings are commented out; remove the # to change one.\n\n\b\n"
        "  simplebus config sample > simplebus.toml"
    )
)
def sample() -> None:
    from simplebus.config.sample import render_sample

    typer.echo(render_sample(), nl=False)
