"""`simplebus pipeline`: the jobs in Spark as commands.

Rule 1: a command's module is imported when the command is asked for, and pyspark when it runs, so
that help is instant and nothing of this is loaded by who does not use it.
Rule 2: a module here has HELP, what the command is for with an example, and `command`, its options
and the call that they amount to.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

MODULES = {
    "archive": "simplebus.spark.commands.archive",
    "compact": "simplebus.spark.commands.compact",
    "replay": "simplebus.spark.commands.replay",
    "report": "simplebus.spark.commands.report",
    "dead-letters": "simplebus.spark.commands.dead_letters",
}
"""Where each command is, by its name; help lists them in this order."""


class _Commands(typer.core.TyperGroup):
    """Commands that are imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One of them; None when there is none of that name."""
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
        "Messages in Spark: archive them, play them back, look at them.\n\n"
        'It needs Spark: [bold]pip install "simplebus-broker\\[spark]"[/bold], and nothing else. Each '
        "command runs on this machine, or with --master on a cluster.\n\n\b\n"
        "  simplebus pipeline archive --subscribe orders --to archive"
    ),
)


@app.callback()
def _top() -> None:
    """Options that stand before a command."""
