"""`simplebus peek` and `simplebus purge`: stored messages of a class.

Texts of other clients are printed without control characters.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.commands.operate.explain import printable
from simplebus.commands.operate.message_text import encode_content, format_content, format_key
from simplebus.config.parse import URL, URL_OPTION, parse_class
from simplebus.console.errors import fail

if TYPE_CHECKING:
    from simplebus.client.core.messages import Message

PEEK_HELP = (
    "Print stored messages of a class.\n\n"
    "No message is acknowledged, and no subscription changes.\n\n\b\n"
    "  simplebus peek orders\n"
    "  simplebus peek orders --first 1200 --count 5\n"
    "  simplebus peek orders --json"
)
PURGE_HELP = (
    "Discard stored messages of a class, for every subscription.\n\n"
    "Messages that are published meanwhile stay.\n\n\b\n"
    "  simplebus purge orders                    print what would be discarded\n"
    "  simplebus purge orders --yes              discard all stored messages\n"
    "  simplebus purge orders --last 1200 --yes  discard those before 1200"
)

_CLASS = typer.Argument(
    parser=parse_class,
    metavar="CLASS",
    show_default=False,
    help="Message class, by id or name.",
)


def peek(
    class_: Annotated[Any, _CLASS],
    first: Annotated[
        int,
        typer.Option(
            "--first",
            min=0,
            metavar="N",
            show_default="the oldest message",
            help="Sequence of the first message.",
        ),
    ] = 0,
    count: Annotated[
        int,
        typer.Option("--count", min=1, metavar="COUNT", help="Maximum number of messages."),
    ] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    import trio

    import simplebus

    async def read() -> list[Message[bytes]]:
        async with simplebus.connect(url, reconnect=None) as bus:
            info = await bus.explain(class_)  # A fetch by name would create the class.
            return await bus.fetch(info.class_id, first, count)

    messages = trio.run(read)
    for message in messages:
        content = message.headers, message.payload
        if as_json:
            record: dict[str, object] = {"sequence": message.sequence, "channel": message.channel}
            record |= encode_content(message.key, *content)
            typer.echo(json.dumps(record, ensure_ascii=False))
            continue
        title = f"#{message.sequence}  {message.channel}".rstrip() + format_key(message.key)
        for line in (title, *format_content(*content)):
            typer.echo(printable(line))
    if not messages and not as_json:
        typer.echo("no such messages")


def purge(
    class_: Annotated[Any, _CLASS],
    first: Annotated[
        int,
        typer.Option(
            "--first",
            min=0,
            metavar="N",
            show_default="the oldest message",
            help="Sequence of the first message to discard.",
        ),
    ] = 0,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            min=0,
            metavar="N",
            show_default="after the newest message",
            help="Sequence after the last message to discard.",
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Discard them. Without --yes, only print their range.")
    ] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    import trio

    import simplebus
    from simplebus.core.broker.wait_reasons import format_message_count

    async def work() -> None:
        async with simplebus.connect(url, reconnect=None) as bus:
            info = await bus.explain(class_)
            begin, end = max(first, info.floor), info.head if last is None else min(last, info.head)
            if begin >= end:
                typer.echo("no such messages")
                return
            if not yes:
                count = min(end - begin, info.stored - info.purged)
                fail(
                    f"up to {format_message_count(count)}, from {begin} to {end - 1}, would be "
                    "discarded; add --yes to discard them",
                    status=2,
                )
            # Messages that are published meanwhile stay.
            purged_count = await bus.purge(info.class_id, first, end)
            typer.echo(f"discarded {format_message_count(purged_count)}")

    trio.run(work)
