"""`simplebus pipeline archive`: archives messages of a bus."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.spark.commands.monitoring import serve_monitor
from simplebus.spark.commands.shared import (
    DEFAULT_SERVERS,
    INTERRUPTED_STATUS,
    ArchiveFormat,
    ChannelsOption,
    MasterOption,
    PartitionPeriod,
    PipelineHttpOption,
    ServersOption,
    SettingsOption,
    parse_setting,
    spark_session,
)
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Write the messages of a bus to an archive, each once.\n\n"
    "The archive has a folder per class and day, or hour, with Parquet files, or is a Delta table. "
    "Run the command again to continue: the bus keeps the messages that arrive meanwhile.\n\n"
    "\b\n"
    "  simplebus pipeline archive --subscribe orders,7 --to /data/archive\n"
    "  simplebus pipeline archive --subscribe orders --to /data/archive --trigger 10\n"
    "  simplebus pipeline archive --subscribe orders --to /data/archive --path /var/lib/bus\n\n"
    "It ends when all messages present at its start are archived, or, with --trigger SECONDS, at "
    "Ctrl-C or SIGTERM, after the current batch. [bold]simplebus deploy pipeline-unit[/bold] "
    "prints a service that runs it."
)


def parse_trigger(text: str | float | None) -> float | None:
    """Return the seconds between batches; None for one run. Raises typer.BadParameter."""
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
    """Return comma-separated data directories as absolute paths."""
    return text and ",".join(os.path.abspath(part.strip()) for part in text.split(","))


def command(
    context: typer.Context,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PATH",
            show_default=False,
            help="The archive: a folder, or a URL that Spark can write, such as hdfs://… or s3a://….",
        ),
    ],
    subscribe: Annotated[
        str | None,
        typer.Option(
            "--subscribe",
            metavar="CLASSES",
            show_default=False,
            help="The classes to archive, by name or id, with commas.",
        ),
    ] = None,
    subscribe_pattern: Annotated[
        str | None,
        typer.Option(
            "--subscribe-pattern",
            metavar="REGEX",
            show_default=False,
            help="Instead of --subscribe: a regular expression that matches whole names of "
            "classes. Run the command again to archive classes that were created after its start.",
        ),
    ] = None,
    servers: ServersOption = DEFAULT_SERVERS,
    path: Annotated[
        Any,
        typer.Option(
            "--path",
            parser=parse_path,
            metavar="PATH",
            show_default=False,
            help="Instead of servers: read the files in the data directory of a bus. The server "
            "may run or not; it does not retain messages for this command.",
        ),
    ] = None,
    format: Annotated[
        ArchiveFormat,
        option("--format", "Parquet files that any program reads, or a Delta table."),
    ] = ArchiveFormat.PARQUET,
    partition_by: Annotated[
        PartitionPeriod,
        option(
            "--partition-by",
            "day: a folder per class and day. hour: a folder per class, day and hour. An archive "
            "keeps the folders that it was created with.",
        ),
    ] = PartitionPeriod.DAY,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "Folder for the progress of the query. Keep it as long as the archive: without it, all "
            "messages are archived again.",
            metavar="PATH",
            show_default="_checkpoint in the archive",
        ),
    ] = None,
    trigger: Annotated[
        Any,
        option(
            "--trigger",
            "once: archive the present messages and end. SECONDS: continue, with this interval "
            "between batches.",
            metavar="once|SECONDS",
            parser=parse_trigger,
            show_default="once",
        ),
    ] = "once",
    max_offsets: Annotated[
        int | None,
        option(
            "--max-offsets",
            "Maximum number of messages in a batch.",
            min=1,
            metavar="COUNT",
            show_default="all messages",
        ),
    ] = None,
    channel: ChannelsOption = None,
    http: PipelineHttpOption = None,
    source: Annotated[
        list[Any] | None,
        typer.Option(
            "--option",
            parser=parse_setting,
            metavar="KEY=VALUE",
            show_default=False,
            help="An option of the source, such as failOnDataLoss=false. May be repeated.",
        ),
    ] = None,
    master: MasterOption = LOCAL,
    settings: SettingsOption = None,
) -> None:
    """Run the command."""
    options: dict[str, object] = dict(source or ())
    if (subscribe is None) == (subscribe_pattern is None):
        raise typer.BadParameter(
            "expected either --subscribe or --subscribe-pattern, got "
            + ("neither" if subscribe is None else "both"),
            param_hint="--subscribe",
        )
    servers_source = context.get_parameter_source("servers")
    if path and servers_source is not None and servers_source.name == "COMMANDLINE":
        raise typer.BadParameter(
            "expected either --servers or --path, got both", param_hint="--path"
        )
    if max_offsets is not None:
        options["maxOffsetsPerTrigger"] = max_offsets
    if channel:
        options["channels"] = ",".join(channel)
    with (
        spark_session("simplebus archive", master, settings) as spark,
        serve_monitor(http) as monitor,
    ):
        from simplebus.spark.jobs.archive import archive, messages
        from simplebus.spark.jobs.progress import follow

        rows = messages(
            spark,
            servers=None if path else servers,
            path=path,
            subscribe=subscribe,
            subscribe_pattern=subscribe_pattern,
            **options,
        )
        query = archive(
            rows,
            to,
            format=format.value,
            partition_by=partition_by.value,
            checkpoint=checkpoint,
            every=trigger,
        )
        progress, was_stopped = follow(query, "archived", monitor.update)
        typer.echo(f"archived {progress} to {to}", err=True)
        if was_stopped:
            raise typer.Exit(INTERRUPTED_STATUS)
