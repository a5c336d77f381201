"""`simplebus pipeline compact`: options in, one call out.

Rule 1: nothing of Spark is imported before the command runs.
"""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

import typer

from simplebus.config.parse import option, parse_size
from simplebus.spark.commands.shared import Master, Set, spark_session
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Merge the many small files of an archive into few.\n\n"
    "An archive query may go on meanwhile. When the command is killed, run it again: nothing is "
    "lost, and each message is there once.\n\n\b\n"
    "  simplebus pipeline compact /data/archive\n"
    "  simplebus pipeline compact /data/archive --before 2026-11-01"
)


def parse_day(text: str | date) -> date:
    """A day as YYYY-MM-DD. Raises typer.BadParameter."""
    try:
        return text if isinstance(text, date) else date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no day, such as 2026-11-01") from None


def parse_target(text: str | int) -> int:
    """Bytes above 0. Raises typer.BadParameter."""
    size = parse_size(text)
    if size <= 0:
        raise typer.BadParameter(f"{text!r} is no size above 0")
    return size


def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", show_default=False, help="The archive: what `archive --to` was given."
        ),
    ],
    before: Annotated[
        Any,
        option(
            "--before",
            "Only days before this one, in UTC, such as 2026-11-01.",
            metavar="DATE",
            parser=parse_day,
            show_default="all days",
        ),
    ] = None,
    target_bytes: Annotated[
        Any,
        option(
            "--target-bytes",
            "About how large a file becomes; files near to it are left alone.",
            metavar="SIZE",
            parser=parse_target,
            show_default="128MiB",
        ),
    ] = "128MiB",
    retention_hours: Annotated[
        int,
        option(
            "--retention-hours",
            "Of a Delta table: files that no version of so many hours knows are removed. Queries "
            "that read for longer may miss them.",
            min=1,
            metavar="HOURS",
        ),
    ] = 168,
    master: Master = LOCAL,
    settings: Set = None,
) -> None:
    """Options in, one call out."""
    with spark_session("simplebus compact", master, settings) as spark:
        from simplebus.spark.jobs.compaction import compact
        from simplebus.spark.jobs.progress import work

        done = work(
            spark,
            "compacting",
            lambda: compact(
                spark,
                path,
                before=before,
                target_bytes=target_bytes,
                retention_hours=retention_hours,
            ),
        )
        typer.echo(f"{done}", err=True)
