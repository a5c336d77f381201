"""`simplebus pipeline dead-letters`: counts dead letters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.spark.commands.shared import (
    DEFAULT_SERVERS,
    MasterOption,
    ServersOption,
    SettingsOption,
    spark_session,
)
from simplebus.spark.jobs.session import LOCAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HELP = (
    "Count dead letters by class, reason and subscription.\n\n"
    "A message becomes a dead letter when it was rejected, or delivered too often without an ack. "
    "The command shows counts and times, with one example each. It removes nothing.\n\n\b\n"
    "  simplebus pipeline dead-letters --subscribe orders,7\n"
    "  simplebus pipeline dead-letters --archive /data/archive --json"
)


def command(
    subscribe: Annotated[
        str,
        option(
            "--subscribe",
            "Classes whose dead letters to count, with commas, by name, or by id if they have no "
            "name: orders for those in dead.orders.",
            metavar="CLASSES",
            show_default="required with buses; all in an archive",
        ),
    ] = "",
    servers: ServersOption = DEFAULT_SERVERS,
    archive: Annotated[
        str | None,
        option(
            "--archive",
            "Read an archive instead of buses. It has dead letters if their classes, such as "
            "dead.orders, were archived.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int, option("--limit", "Maximum number of rows; the largest counts come first.", min=1)
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per row instead of a table.")
    ] = False,
    master: MasterOption = LOCAL,
    settings: SettingsOption = None,
) -> None:
    """Run the command."""
    if not archive and not subscribe:
        raise typer.BadParameter(
            "expected --subscribe, such as orders,7, or --archive PATH",
            param_hint="--subscribe",
        )
    with spark_session("simplebus dead letters", master, settings) as spark:
        from simplebus.spark.jobs import dead_letters as job
        from simplebus.spark.jobs.progress import run_job

        if archive:
            frame = job.read_archived(spark, archive, subscribe)
        else:
            frame = job.messages(spark, servers=servers, subscribe=subscribe)
        found = run_job(
            spark, "dead letters", lambda: job.dead_letters(frame).limit(limit).collect()
        )
        rows = [row.asDict(recursive=True) for row in found]
    (_print_json if as_json else _print_table)(rows)


def _print_json(rows: Sequence[Mapping[str, Any]]) -> None:
    from simplebus.spark.jobs.dead_letters import to_json_object

    for row in rows:
        typer.echo(json.dumps(to_json_object(row), ensure_ascii=False))


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from simplebus.spark.jobs.dead_letters import HEADINGS, to_table_cells

    if not rows:
        typer.echo("no dead letters", err=True)
        return
    table = Table(box=None, header_style="bold")
    for heading in HEADINGS:
        is_number = heading in ("messages", "attempts")
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, to_table_cells(row)))
    Console().print(table)
