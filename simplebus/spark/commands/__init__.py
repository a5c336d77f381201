"""`simplebus pipeline`: the Spark jobs as commands.

A command's module has HELP and `command`, and is imported when the command is invoked; pyspark is
imported when it runs. So help is fast, and other commands do not load Spark.

    shared        common options and the session
    monitoring    health and metrics of a running query
    archive, compact, replay, report, dead_letters   one command each

May import: config, console and simplebus.spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from simplebus.console.installation import install_command

_INSTALL = install_command("spark").replace("[", "\\[")
"""Command that installs Spark, escaped for rich."""
MODULES = {
    "archive": "simplebus.spark.commands.archive",
    "compact": "simplebus.spark.commands.compact",
    "replay": "simplebus.spark.commands.replay",
    "report": "simplebus.spark.commands.report",
    "dead-letters": "simplebus.spark.commands.dead_letters",
}
"""Module by command name, in the order of the help text."""


class _Commands(typer.core.TyperGroup):
    """Group that imports a command's module when the command is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command with this name; None if it does not exist."""
        if cmd_name not in MODULES:
            return None
        module = import_module(MODULES[cmd_name])
        made = typer.Typer(
            rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
        )
        made.command(cmd_name, help=module.HELP)(module.command)
        return typer.main.get_command(made)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Archive, replay and analyse messages with Spark.\n\n"
        f"Install Spark by [bold]{_INSTALL}[/bold] in a clone of the repository. Each command runs "
        "on this machine, or with --master on a cluster.\n\n\b\n"
        "  simplebus pipeline archive --subscribe orders --to archive"
    ),
)


@app.callback()
def _main() -> None:
    """Accept options before a command."""
