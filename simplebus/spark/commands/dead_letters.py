"""`simplebus pipeline dead-letters`: options in, one call out.

Rule 1: nothing of Spark is imported before the command runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.spark.commands.shared import SERVERS, Master, Servers, Set, spark_session
from simplebus.spark.jobs.session import LOCAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HELP = (
    "Show what subscriptions have given up on: what fails, why and since when.\n\n"
    "What was delivered as often as it may be, and never acknowledged, lies on the bus in its "
    "class's dead letters. They are counted by class, reason and subscription, with an example "
    "each. Nothing of them is taken away.\n\n\b\n"
    "  simplebus pipeline dead-letters --subscribe orders,7\n"
    "  simplebus pipeline dead-letters --archive /data/archive --json"
)


def command(
    subscribe: Annotated[
        str,
        option(
            "--subscribe",
            "The classes whose dead letters are meant, with commas, by name, or by id where they "
            "have no name: orders for those in dead.orders.",
            metavar="CLASSES",
            show_default="needed with buses; in an archive all",
        ),
    ] = "",
    servers: Servers = SERVERS,
    archive: Annotated[
        str | None,
        option(
            "--archive",
            "Those in an archive, instead of those on buses. It has them if their classes were "
            "archived, such as dead.orders.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, option("--limit", "At most so many rows, those with the most first.", min=1)
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="An object in JSON per row, instead of a table.")
    ] = False,
    master: Master = LOCAL,
    settings: Set = None,
) -> None:
    """Options in, one call out."""
    if not archive and not subscribe:
        raise typer.BadParameter(
            "say whose dead letters: --subscribe orders,7, or --archive PATH",
            param_hint="--subscribe",
        )
    with spark_session("simplebus dead letters", master, settings) as spark:
        from simplebus.spark.jobs import dead_letters as job
        from simplebus.spark.jobs.progress import work

        if archive:
            frame = job.archived(spark, archive, subscribe)
        else:
            frame = job.messages(spark, servers=servers, subscribe=subscribe)
        found = work(spark, "dead letters", lambda: job.dead_letters(frame).limit(limit).collect())
        rows = [row.asDict(recursive=True) for row in found]
    (_say_json if as_json else _say_table)(rows)


def _say_json(rows: Sequence[Mapping[str, Any]]) -> None:
    from simplebus.spark.jobs.dead_letters import as_object

    for row in rows:
        typer.echo(json.dumps(as_object(row), ensure_ascii=False))


def _say_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from simplebus.spark.jobs.dead_letters import HEADINGS, as_cells

    if not rows:
        typer.echo("no dead letters", err=True)
        return
    table = Table(box=None, header_style="bold")
    for heading in HEADINGS:
        is_number = heading in ("messages", "attempts")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, as_cells(row)))
    Console().print(table)
