"""`simplebus forget`: removes a durable that is no longer used.

A durable is removed only with --yes, and only if no client is connected to it. Texts of other
clients are printed without control characters.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simplebus.commands.operate.explain import printable
from simplebus.config.parse import URL, URL_OPTION, parse_class
from simplebus.console.errors import fail

HELP = (
    "Remove an idle durable, and release the messages that only this durable needs.\n\nA durable "
    "keeps messages until they are acknowledged, without a time limit unless one was set. Remove "
    "the durables of renamed bridges and of programs that no longer run.\n\n\b\n"
    "  simplebus explain orders            durables and connected clients\n"
    "  simplebus forget orders billing     print the backlog of the durable\n"
    "  simplebus forget orders billing --yes"
)


def forget(
    class_: Annotated[
        Any,
        typer.Argument(
            parser=parse_class,
            metavar="CLASS",
            show_default=False,
            help="Message class, by id or name.",
        ),
    ],
    durable: Annotated[
        str,
        typer.Argument(
            metavar="DURABLE", show_default=False, help="Name of the durable to remove."
        ),
    ],
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Remove the durable. Without --yes, only print its backlog."),
    ] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    import trio

    import simplebus
    from simplebus.client.aio import durables
    from simplebus.core.broker.wait_reasons import format_message_count

    async def work() -> None:
        async with simplebus.connect(url, reconnect=None) as bus:
            position = await durables.find_idle_durable(bus, class_, durable)
            backlog = f"{format_message_count(position.lag)} after its first unacknowledged one"
            if not yes:
                fail(
                    printable(f"durable {durable!r} has {backlog}; add --yes to remove it"),
                    status=2,
                )
            await durables.forget_durable(bus, class_, position)
            typer.echo(printable(f"removed the durable {durable!r}, which had {backlog}"))

    trio.run(work)
