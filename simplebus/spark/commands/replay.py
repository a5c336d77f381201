"""`simplebus pipeline replay`: options in, one call out.

Rule 1: nothing of Spark is imported before the command runs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from simplebus.config.parse import option
from simplebus.spark.commands.shared import SERVERS, Channels, Master, Set, spark_session
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Publish the messages of an archive again, with their keys, headers and channels.\n\n"
    "As fast as it goes, or with --speed in the time in which they were published first. When it "
    "is killed, run it again with the same --name: what is published is not published twice, as "
    "long as the bus remembers, which is an hour.\n\n\b\n"
    "  simplebus pipeline replay /data/archive --class orders --name again\n"
    "  simplebus pipeline replay /data/archive --from 2026-11-21T08:00 --until 2026-11-21T09:00 "
    "--speed 10"
)


def parse_moment(text: str | datetime) -> datetime:
    """A moment in ISO 8601, in UTC unless it says otherwise. Raises typer.BadParameter."""
    try:
        found = text if isinstance(text, datetime) else datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time, such as 2026-11-21T08:00 or 2026-11-21T08:00:00+01:00"
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", show_default=False, help="The archive: what `archive --to` was given."
        ),
    ],
    servers: Annotated[
        str, option("--servers", "The bus to publish to, as HOST:PORT.", metavar="HOST:PORT")
    ] = SERVERS,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="CLASS",
            show_default="all classes",
            help="Only messages of this class, as the archive calls it. May be given several "
            "times.",
        ),
    ] = None,
    channel: Channels = None,
    begin: Annotated[
        Any,
        option(
            "--from",
            "Only messages published then or later, such as 2026-11-21T08:00, in UTC.",
            metavar="TIME",
            parser=parse_moment,
            show_default=False,
        ),
    ] = None,
    until: Annotated[
        Any,
        option(
            "--until",
            "Only messages published before then.",
            metavar="TIME",
            parser=parse_moment,
            show_default=False,
        ),
    ] = None,
    speed: Annotated[
        float | None,
        option(
            "--speed",
            "Keep the pauses between messages: 1 as they were, 10 a tenth of them.",
            min=1e-6,
            metavar="FACTOR",
            show_default="as fast as it goes",
        ),
    ] = None,
    to_class: Annotated[
        str,
        option(
            "--to-class",
            "Publish everything to this class.",
            metavar="CLASS",
            show_default="the class it was of",
        ),
    ] = "",
    name: Annotated[
        str,
        option(
            "--name",
            "What this replay is called. Under the same name the same messages are published once.",
            metavar="NAME",
            show_default="a name of its own",
        ),
    ] = "",
    master: Master = LOCAL,
    settings: Set = None,
) -> None:
    """Options in, one call out."""
    with spark_session("simplebus replay", master, settings) as spark:
        from simplebus.spark.jobs.progress import work
        from simplebus.spark.jobs.replay import replay

        done = work(
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
        before = f", {done.stored_before:,} of them before" if done.stored_before else ""
        typer.echo(f"{done.messages:,} messages published to {servers}{before}", err=True)
