"""`simplebus journal`: inspects and repairs a data directory without a server."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import format_size, parse_class

if TYPE_CHECKING:
    from simplebus.storage.inspection import ClassSummary, InspectedMessage

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Inspect or repair the journal of `simplebus serve --data-dir`.\n\n"
        "A server may use the directory at the same time, except for a repair; its latest writes "
        "may appear incomplete.\n\n"
        "\b\n"
        "  simplebus journal ls /var/lib/simplebus\n"
        "  simplebus journal verify /var/lib/simplebus\n"
        "  simplebus journal repair /var/lib/simplebus\n"
        "  simplebus journal dump /var/lib/simplebus orders --first 1000 --count 5\n"
        "  simplebus journal export /var/lib/simplebus orders > orders.jsonl"
    ),
)

_DIRECTORY = typer.Argument(
    metavar="DIRECTORY", show_default=False, help="Data directory of a server."
)
_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="Message class, by id or name.",
)
_FIRST = typer.Option(
    "--first", min=0, metavar="SEQUENCE", help="Sequence of the first message to read."
)
_DROPPED = typer.Option(
    "--dropped",
    help="Read the intact messages of damaged files instead, whose names end with .dropped. The "
    "server neither reads nor removes these files; delete them when you do not need them.",
)
_ALL = 1 << 62


@app.command(help="List the classes and their durables.")
def ls(directory: Annotated[str, _DIRECTORY]) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import JournalInspection

    inspection = JournalInspection(Path(directory))
    typer.echo(f"bus {inspection.directory.bus_id}")
    for summary in inspection.summaries():
        for line in _summary_lines(summary):
            typer.echo(line)
    _print_problems(inspection.problems)


@app.command(
    help="Read the whole journal and report damaged files and the messages that a server would "
    "skip. The exit status is 1 if a file is damaged. Gaps that a server or a repair has recorded "
    "are listed, and are no damage."
)
def verify(directory: Annotated[str, _DIRECTORY]) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import JournalInspection
    from simplebus.storage.segments import describe_range

    inspection = JournalInspection(Path(directory), reads_past_damage=False)
    messages = size = dropped = 0
    for summary in inspection.summaries(verify=True):
        dropped += len(summary.dropped)
        messages += summary.head - summary.first
        size += summary.bytes
        for gap in summary.gaps:
            messages -= gap.last - gap.first
            if not gap.is_new:
                label = summary.name or str(summary.class_id)
                typer.echo(f"gap: {describe_range(label, gap.first, gap.last)}")
    _print_problems(inspection.problems)
    if inspection.problems:
        raise typer.Exit(1)
    typer.echo(f"intact: {messages:,} messages in {size:,} bytes")
    if dropped:
        typer.echo(f"{dropped} damaged files were dropped before; see `simplebus journal ls`")


@app.command(
    help="Move damaged records to files whose names end with .dropped, and record the gaps, as a "
    "server does when it starts. All records are read, also those of acknowledged messages. The "
    "server must be stopped. The exit status is 1 if damage remains."
)
def repair(
    directory: Annotated[str, _DIRECTORY],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")
    ] = False,
) -> None:
    from pathlib import Path

    from simplebus.storage.directory import lock_existing
    from simplebus.storage.errors import JournalError
    from simplebus.storage.inspection import JournalInspection
    from simplebus.storage.repair import apply_repairs, describe_repairs

    with contextlib.closing(lock_existing(Path(directory))):
        inspection = JournalInspection(Path(directory), reads_past_damage=False)
        for _ in inspection.summaries(verify=True):
            pass
        _print_problems(inspection.problems)
        steps = list(describe_repairs(inspection.found))
        for step in steps:
            typer.echo(step)
        if dry_run and steps:
            raise typer.Exit(1)
        if not steps:
            typer.echo("nothing to repair")
        try:
            apply_repairs(inspection.found)
        except OSError as error:
            raise JournalError(f"cannot repair {directory}: {error.strerror}") from None
        verify(directory)


@app.command(
    help="Print messages, one per line, with non-text bytes as escapes. Messages after a damaged "
    "record, which a server would skip, are printed too."
)
def dump(
    directory: Annotated[str, _DIRECTORY],
    class_: Annotated[Any, _CLASS],
    first: Annotated[int, _FIRST] = 0,
    count: Annotated[
        int,
        typer.Option(
            "--count", min=1, metavar="COUNT", help="Maximum number of messages to print."
        ),
    ] = 100,
    dropped: Annotated[bool, _DROPPED] = False,
) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import JournalInspection

    inspection = JournalInspection(Path(directory))
    messages = inspection.dropped if dropped else inspection.messages
    for message in messages(inspection.class_id(class_), first=first, count=count):
        typer.echo(_line(message))
    _print_problems(inspection.problems)


@app.command(
    help=(
        "Write the messages of a class as JSON, one object per line: sequence, time, channel, key, "
        "headers, and the payload as text or base64."
    )
)
def export(
    directory: Annotated[str, _DIRECTORY],
    class_: Annotated[Any, _CLASS],
    first: Annotated[int, _FIRST] = 0,
    count: Annotated[
        int | None,
        typer.Option(
            "--count",
            min=1,
            metavar="COUNT",
            help="Maximum number of messages to write; all by default.",
        ),
    ] = None,
    dropped: Annotated[bool, _DROPPED] = False,
) -> None:
    from pathlib import Path

    import msgspec

    from simplebus.storage.inspection import JournalInspection

    inspection = JournalInspection(Path(directory))
    out = sys.stdout.buffer
    messages = inspection.dropped if dropped else inspection.messages
    for message in messages(
        inspection.class_id(class_), first=first, count=_ALL if count is None else count
    ):
        out.write(msgspec.json.encode(_to_json(message)) + b"\n")
    out.flush()
    _print_problems(inspection.problems)


def _print_problems(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"simplebus: {problem}", err=True)


def _summary_lines(summary: ClassSummary) -> list[str]:
    name = f" {summary.name}" if summary.name else ""
    count = summary.head - summary.first
    line = f"class {summary.class_id}{name}: {count:,} messages"
    if count:
        line += f", {summary.first} to {summary.head - 1}"
    line += f", of which {max(0, summary.head - summary.floor):,} are still needed"
    line += f"; {summary.segments} segments, {format_size(summary.bytes)}"
    if summary.times is not None:
        line += f"; {_moment(summary.times[0])} to {_moment(summary.times[1])}"
    lines = [line]
    for durable in summary.durables:
        window = durable.window
        group = f" of the group {durable.group}" if durable.group else ""
        channels = f", for {' '.join(durable.patterns)}" if durable.patterns else ""
        lines.append(
            f"  durable {durable.durable}{group}{channels}: all below {window.floor} "
            f"acknowledged, {summary.head - window.cursor:,} not sent yet"
        )
    if summary.dropped:
        names = ", ".join(path.name for path in summary.dropped)
        lines.append(
            f"  dropped as damaged, {format_size(summary.dropped_bytes)}: {names}; "
            "read the intact messages with dump --dropped or export --dropped"
        )
    return lines


def _moment(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _line(message: InspectedMessage) -> str:
    parts = [str(message.sequence), _moment(message.time)]
    if message.publisher:
        parts.append(f"{message.publisher}#{message.number}")
    envelope = message.envelope
    if envelope.channel:
        parts.append(envelope.channel)
    if envelope.key:
        parts.append(f"key={_text(envelope.key)}")
    parts += [f"{name}={value}" for name, value in envelope.headers]
    return "  ".join([*parts, _text(message.payload)])


def _text(data: bytes) -> str:
    """Return bytes as text, with non-printable characters as escapes."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _to_json(message: InspectedMessage) -> dict[str, object]:
    """Return a message as a JSON object."""
    from base64 import b64encode

    envelope = message.envelope
    record: dict[str, object] = {"sequence": message.sequence, "time": message.time}
    if message.publisher:
        record |= {"publisher": message.publisher, "number": message.number}
    if envelope.channel:
        record["channel"] = envelope.channel
    if envelope.headers:
        record["headers"] = [list(pair) for pair in envelope.headers]
    for name, data in (("key", envelope.key), ("payload", message.payload)):
        if data or name == "payload":
            try:
                record[name] = data.decode()
            except UnicodeDecodeError:
                record[name + "_base64"] = b64encode(data).decode()
    return record
