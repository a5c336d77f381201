"""`simplebus pipeline compact`: merges small files of an archive, and deletes old days."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

import typer

from simplebus.config.parse import option, parse_size
from simplebus.spark.commands.shared import MasterOption, SettingsOption, spark_session
from simplebus.spark.jobs.session import LOCAL

HELP = (
    "Merge the many small files of an archive into few.\n\n"
    "Archive queries may continue meanwhile. If the command is killed, run it again: no message is "
    "lost or stored twice.\n\n\b\n"
    "  simplebus pipeline compact /data/archive\n"
    "  simplebus pipeline compact /data/archive --before 2026-11-01\n"
    "  simplebus pipeline compact /data/archive --delete-before 2026-01-01"
)


def parse_day(text: str | date) -> date:
    """Parse a day, YYYY-MM-DD. Raises typer.BadParameter."""
    try:
        return text if isinstance(text, date) else date.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"expected a day such as 2026-11-01, got {text!r}") from None


def parse_target(text: str | int) -> int:
    """Parse a positive size in bytes. Raises typer.BadParameter."""
    size = parse_size(text)
    if size <= 0:
        raise typer.BadParameter(f"expected a size above 0, got {text!r}")
    return size


def command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", show_default=False, help="The archive: the value of `archive --to`."
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
    delete_before: Annotated[
        Any,
        option(
            "--delete-before",
            "First delete the messages of days before this one, in UTC. They cannot be restored.",
            metavar="DATE",
            parser=parse_day,
            show_default="delete none",
        ),
    ] = None,
    target_bytes: Annotated[
        Any,
        option(
            "--target-bytes",
            "Approximate size of a merged file; files of about that size are not merged.",
            metavar="SIZE",
            parser=parse_target,
            show_default="128MiB",
        ),
    ] = "128MiB",
    retention_hours: Annotated[
        int,
        option(
            "--retention-hours",
            "Delta tables only: remove files that no version of the last HOURS uses. Queries that "
            "run longer may fail to read them.",
            min=1,
            metavar="HOURS",
        ),
    ] = 168,
    master: MasterOption = LOCAL,
    settings: SettingsOption = None,
) -> None:
    """Run the command."""
    with spark_session("simplebus compact", master, settings) as spark:
        from simplebus.spark.jobs.compaction import compact
        from simplebus.spark.jobs.progress import run_job

        result = run_job(
            spark,
            "compacting",
            lambda: compact(
                spark,
                path,
                before=before,
                delete_before=delete_before,
                target_bytes=target_bytes,
                retention_hours=retention_hours,
            ),
        )
        typer.echo(f"{result}", err=True)
