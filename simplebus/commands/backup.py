"""`simplebus backup` and `simplebus restore`: copies of a data directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simplebus.config.parse import option
from simplebus.console.errors import JOURNAL_STATUS, describe_error, fail

if TYPE_CHECKING:
    from simplebus.storage.backup import CopyResult

BACKUP_HELP = (
    "Back up the data directory of a server, which may be running.\n\n"
    "Files that have not changed since the previous backup in the same directory are not copied "
    "again. The backup is read completely, and the exit status is 74 if it is damaged.\n\n\b\n"
    "  simplebus backup /backup/simplebus --data-dir /var/lib/simplebus"
)
RESTORE_HELP = (
    "Restore a backup to an empty data directory, before the server is started.\n\n"
    "The backup and the copy are read completely. Files get the owner of the directory.\n\n\b\n"
    "  simplebus restore /backup/simplebus --data-dir /var/lib/simplebus"
)

Backup = Annotated[
    Path,
    typer.Argument(metavar="BACKUP", show_default=False, help="Directory of the backup."),
]
DataDirectory = Annotated[
    Path,
    option("--data-dir", "Data directory of the server.", metavar="DIRECTORY", parser=Path),
]


def backup(backup: Backup, data_dir: DataDirectory) -> None:
    from simplebus.storage.backup import back_up

    result = _run(lambda: back_up(data_dir, backup))
    typer.echo(
        f"copied {result.copied_count} new or changed files, {result.copied_bytes:,} bytes\n"
        f"intact: bus {result.bus_id}, {result.class_count:,} classes, "
        f"{result.message_count:,} messages"
    )


def restore(backup: Backup, data_dir: DataDirectory) -> None:
    from simplebus.storage.backup import restore as restore_backup

    result = _run(lambda: restore_backup(backup, data_dir))
    typer.echo(
        f"restored: bus {result.bus_id}, {result.class_count:,} classes, "
        f"{result.message_count:,} messages"
    )


def _run(copy: Callable[[], CopyResult]) -> CopyResult:
    """Return the result; exit with a message if the copy fails."""
    from simplebus.storage.errors import JournalError

    try:
        return copy()
    except (JournalError, OSError) as error:
        fail(describe_error(error), status=JOURNAL_STATUS)
