"""`simplebus pipeline replay`: publishes an archive again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.core.broker.wait_reasons import format_count
from simplebus.spark.commands.shared import (
    DEFAULT_SERVERS,
    ChannelsOption,
    MasterOption,
    SettingsOption,
    spark_session,
)
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Publish the messages of an archive again, with their keys, headers and channels.\n\n"
    "Messages are published at full speed, or with --speed at their original pace. If the command "
    "is killed, run it again with the same --name within an hour: the bus discards the messages "
    "that it already has.\n\n\b\n"
    "  simplebus pipeline replay /data/archive --class orders --name again\n"
    "  simplebus pipeline replay /data/archive --from 2026-11-21T08:00 --until 2026-11-21T09:00 "
    "--speed 10"
)


def parse_moment(text: str | datetime) -> datetime:
    """Parse an ISO 8601 time; UTC if it has no time zone. Raises typer.BadParameter."""
    try:
        found = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a time such as 2026-11-21T08:00 or 2026-11-21T08:00:00+01:00, got {text!r}"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", show_default=False, help="The archive: the value of `archive --to`."
        ),
    ],
    servers: Annotated[
        str, option("--servers", "The bus to publish to, as HOST:PORT.", metavar="HOST:PORT")
    ] = DEFAULT_SERVERS,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="CLASS",
            show_default="all classes",
            help="Only messages of this class, as named in the archive. May be repeated.",
        ),
    ] = None,
    channel: ChannelsOption = None,
    begin: Annotated[
        Any,
        option(
            "--from",
            "Only messages published at this time or later, such as 2026-11-21T08:00, in UTC.",
            metavar="TIME",
            parser=parse_moment,
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        Any,
        option(
            "--until",
            "Only messages published before this time.",
            metavar="TIME",
            parser=parse_moment,
            show_default=False,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        option(
            "--speed",
            "Keep the pauses between messages: 1 for the original ones, 10 for a tenth of them.",
            min=1e-6,
            metavar="FACTOR",
            show_default="full speed",
        ),
    ] = None,
    to_class: Annotated[
        str,
        option(
            "--to-class",
            "Publish everything to this class.",
            metavar="CLASS",
            show_default="the original class",
        ),
    ] = "",
    name: Annotated[
        str,
        option(
            "--name",
            "Name of this replay. Messages are published once per name.",
            metavar="NAME",
            show_default="a new name",
        ),
    ] = "",
    master: MasterOption = LOCAL,
    settings: SettingsOption = None,
) -> None:
    """Run the command."""
    with spark_session("simplebus replay", master, settings) as spark:
        from simplebus.spark.jobs.progress import run_job
        from simplebus.spark.jobs.replay import replay

        result = run_job(
            spark,
            "replaying",
            lambda: replay(
                spark,
                path,
                servers,
                classes=classes or (),
                channels=channel or (),
                begin=begin,
                end=until,
                speed=speed,
                to_class=to_class,
                name=name,
            ),
        )
        before = f", {result.stored_before:,} of them before" if result.stored_before else ""
        messages = format_count(result.messages, "message")
        typer.echo(f"{messages} published to {servers}{before}", err=True)
