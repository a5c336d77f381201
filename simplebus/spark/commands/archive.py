"""`simplebus pipeline archive`: options in, one call out.

Rule 1: nothing of Spark is imported before the command runs.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.spark.commands.shared import (
    INTERRUPTED,
    SERVERS,
    Channels,
    Format,
    Master,
    Servers,
    Set,
    parse_setting,
    spark_session,
)
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Write the messages of a bus to an archive, each once.\n\n"
    "The archive has a folder per class and day, with Parquet that every program reads, or is a "
    "Delta table. Run it again to go on where it ended: what came meanwhile waits on the bus.\n\n"
    "\b\n"
    "  simplebus pipeline archive --subscribe orders,7 --to /data/archive\n"
    "  simplebus pipeline archive --subscribe orders --to /data/archive --trigger 10\n"
    "  simplebus pipeline archive --subscribe orders --to /data/archive --path /var/lib/bus\n\n"
    "It ends when everything is archived that was there when it began, or, with --trigger SECONDS, "
    "at Ctrl-C."
)


def parse_trigger(text: str | float | None) -> float | None:
    """Seconds between batches; None for once. Raises typer.BadParameter."""
    if text is None or text == "once":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{text!r} is neither once nor seconds above 0, such as 10")
    return seconds


def parse_path(text: str | None) -> str | None:
    """Data directories, with commas, by their absolute paths."""
    return text and ",".join(os.path.abspath(part.strip()) for part in text.split(","))


def command(
    context: typer.Context,
    subscribe: Annotated[
        str,
        typer.Option(
            "--subscribe",
            metavar="CLASSES",
            show_default=False,
            help="The classes to archive, by name or id, with commas.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PATH",
            show_default=False,
            help="The archive: a folder, or what Spark writes to, such as hdfs://… or s3a://….",
        ),
    ],
    servers: Servers = SERVERS,
    path: Annotated[
        Any,
        typer.Option(
            "--path",
            parser=parse_path,
            metavar="PATH",
            show_default=False,
            help="Instead of servers: the data directory of a bus, whose files are read; the bus "
            "may run or not, and keeps nothing for this.",
        ),
    ] = None,
    format: Annotated[
        Format,
        option("--format", "Parquet files that any program reads, or a Delta table."),
    ] = Format.PARQUET,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "Where the query notes how far it is. Without it the archive has no beginning that it "
            "goes on from: keep it as long as the archive.",
            metavar="PATH",
            show_default="_checkpoint in the archive",
        ),
    ] = None,
    trigger: Annotated[
        Any,
        option(
            "--trigger",
            "once: archive what is there, and end. Or seconds: go on, with a batch every so often.",
            metavar="once|SECONDS",
            parser=parse_trigger,
            show_default="once",
        ),
    ] = "once",
    max_offsets: Annotated[
        int | None,
        option(
            "--max-offsets",
            "At most so many messages in a batch.",
            min=1,
            metavar="COUNT",
            show_default="all that wait",
        ),
    ] = None,
    channel: Channels = None,
    source: Annotated[
        list[Any] | None,
        typer.Option(
            "--option",
            parser=parse_setting,
            metavar="KEY=VALUE",
            show_default=False,
            help="An option of the source, such as failOnDataLoss=false. May be given several "
            "times.",
        ),
    ] = None,
    master: Master = LOCAL,
    settings: Set = None,
) -> None:
    """Options in, one call out."""
    options: dict[str, object] = dict(source or ())
    given = context.get_parameter_source("servers")
    if path and given is not None and given.name == "COMMANDLINE":
        raise typer.BadParameter(
            "there are --servers too: give the buses, or where their files are", param_hint="--path"
        )
    if max_offsets is not None:
        options["maxOffsetsPerTrigger"] = max_offsets
    if channel:
        options["channels"] = ",".join(channel)
    with spark_session("simplebus archive", master, settings) as spark:
        from simplebus.spark.jobs.archive import archive, messages
        from simplebus.spark.jobs.progress import follow

        rows = messages(
            spark, servers=None if path else servers, path=path, subscribe=subscribe, **options
        )
        query = archive(rows, to, format=format.value, checkpoint=checkpoint, every=trigger)
        standing, was_stopped = follow(query, "archived")
        typer.echo(f"archived {standing} to {to}", err=True)
        if was_stopped:
            raise typer.Exit(INTERRUPTED)
