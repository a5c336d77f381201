"""The commands that look at a journal: what a data directory holds, without a server.

Rule 1: they write nothing but what they print. Rule 2: nothing heavy is imported before one runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.config.parse import parse_class, show_size

if TYPE_CHECKING:
    from simplebus.storage.inspection import ClassSummary, KeptMessage

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help=(
        "Look at what `simplebus serve --data-dir` keeps.\n\n"
        "A server may use the directory meanwhile; what it is just writing may look unfinished.\n\n"
        "\b\n"
        "  simplebus journal ls /var/lib/simplebus\n"
        "  simplebus journal verify /var/lib/simplebus\n"
        "  simplebus journal dump /var/lib/simplebus orders --first 1000 --count 5\n"
        "  simplebus journal export /var/lib/simplebus orders > orders.jsonl"
    ),
)

_DIRECTORY = typer.Argument(metavar="DIRECTORY", show_default=False, help="The data directory.")
_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="The class: its id, or its name.",
)
_FIRST = typer.Option("--first", min=0, metavar="SEQUENCE", help="The message to begin with.")
_DROPPED = typer.Option(
    "--dropped",
    help="Instead, what is whole in files that a server has given up, whose names end with "
    ".dropped. It neither reads nor removes them: you may, when you need nothing of it.",
)
_ALL = 1 << 62


@app.command(help="List the classes, and the durables of each.")
def ls(directory: Annotated[str, _DIRECTORY]) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import Inspection

    inspection = Inspection(Path(directory))
    typer.echo(f"bus {inspection.directory.bus}")
    for summary in inspection.summaries():
        for line in _summary_lines(summary):
            typer.echo(line)
    _complain(inspection.problems)


@app.command(
    help="Read everything, and say what is not whole, and which messages a server leaves out then. "
    "The exit status is 1 if anything is."
)
def verify(directory: Annotated[str, _DIRECTORY]) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import Inspection

    inspection = Inspection(Path(directory), goes_on=False)
    messages = size = dropped = 0
    for summary in inspection.summaries(whole=True):
        dropped += len(summary.dropped)
        messages += summary.head - summary.first
        size += summary.bytes
    _complain(inspection.problems)
    if inspection.problems:
        raise typer.Exit(1)
    typer.echo(f"whole: {messages:,} messages in {size:,} bytes")
    if dropped:
        typer.echo(f"{dropped} files were given up before; `simplebus journal ls` lists them")


@app.command(
    help="Print messages for people: one a line, with bytes that are no text escaped. Those behind "
    "something that is not whole, which a server leaves out, are shown as well."
)
def dump(
    directory: Annotated[str, _DIRECTORY],
    class_: Annotated[Any, _CLASS],
    first: Annotated[int, _FIRST] = 0,
    count: Annotated[
        int, typer.Option("--count", min=1, metavar="COUNT", help="How many messages at most.")
    ] = 100,
    dropped: Annotated[bool, _DROPPED] = False,
) -> None:
    from pathlib import Path

    from simplebus.storage.inspection import Inspection

    inspection = Inspection(Path(directory))
    messages = inspection.dropped if dropped else inspection.messages
    for message in messages(inspection.class_id(class_), first=first, count=count):
        typer.echo(_line(message))
    _complain(inspection.problems)


@app.command(
    help=(
        "Write a class's messages as JSON, an object a line: sequence, time, channel, key, "
        "headers, and the payload as text, or as base64 where it is none."
    )
)
def export(
    directory: Annotated[str, _DIRECTORY],
    class_: Annotated[Any, _CLASS],
    first: Annotated[int, _FIRST] = 0,
    count: Annotated[
        int | None,
        typer.Option("--count", min=1, metavar="COUNT", help="How many at most; all by default."),
    ] = None,
    dropped: Annotated[bool, _DROPPED] = False,
) -> None:
    from pathlib import Path

    import msgspec

    from simplebus.storage.inspection import Inspection

    inspection = Inspection(Path(directory))
    out = sys.stdout.buffer
    messages = inspection.dropped if dropped else inspection.messages
    for message in messages(
        inspection.class_id(class_), first=first, count=_ALL if count is None else count
    ):
        out.write(msgspec.json.encode(_object(message)) + b"\n")
    out.flush()
    _complain(inspection.problems)


def _complain(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"simplebus: {problem}", err=True)


def _summary_lines(summary: ClassSummary) -> list[str]:
    name = f" {summary.name}" if summary.name else ""
    count = summary.head - summary.first
    line = f"class {summary.class_id}{name}: {count:,} messages"
    if count:
        line += f", {summary.first} to {summary.head - 1}"
    line += f", of which {max(0, summary.head - summary.floor):,} are still needed"
    line += f"; {summary.segments} segments, {show_size(summary.bytes)}"
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
            f"  given up, {show_size(summary.dropped_bytes)}: {names}; "
            "what is whole in them: dump --dropped, export --dropped"
        )
    return lines


def _moment(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _line(message: KeptMessage) -> str:
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
    """As text, where what cannot be printed is escaped."""
    text = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _object(message: KeptMessage) -> dict[str, object]:
    """As JSON has it."""
    from base64 import b64encode

    envelope = message.envelope
    found: dict[str, object] = {"sequence": message.sequence, "time": message.time}
    if message.publisher:
        found |= {"publisher": message.publisher, "number": message.number}
    if envelope.channel:
        found["channel"] = envelope.channel
    if envelope.headers:
        found["headers"] = [list(pair) for pair in envelope.headers]
    for name, data in (("key", envelope.key), ("payload", message.payload)):
        if data or name == "payload":
            try:
                found[name] = data.decode()
            except UnicodeDecodeError:
                found[name + "_base64"] = b64encode(data).decode()
    return found
