"""`simplebus forget`: removes a durable that is no longer used.

A durable is removed only with --yes, and only if nobody is connected to it. Texts of other clients
are printed without control characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from simplebus.commands.explain import printable
from simplebus.config.parse import URL, URL_OPTION, parse_class
from simplebus.console.errors import fail

if TYPE_CHECKING:
    from simplebus.client.aio.bus import Bus
    from simplebus.core.protocol.inquiry import PositionInfo

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
    from simplebus.core.broker.wait_reasons import format_message_count

    async def work() -> None:
        async with simplebus.connect(url, reconnect=None) as bus:
            position = await _find(bus, class_, durable)
            backlog = f"{format_message_count(position.lag)} after its first unacknowledged one"
            if not yes:
                fail(
                    printable(f"durable {durable!r} has {backlog}; add --yes to remove it"),
                    status=2,
                )
            await _forget(bus, class_, position)
            typer.echo(printable(f"removed the durable {durable!r}, which had {backlog}"))

    trio.run(work)


async def _find(bus: Bus, class_: int | str, durable: str) -> PositionInfo:
    """Return the durable's position. Raises BusError if it is missing or in use."""
    from simplebus.core.errors import BusError

    info: Any = await bus.explain(class_)
    names = []
    for position in info.positions:
        if position.durable != durable:
            names += [repr(position.durable)] if position.durable else []
            continue
        if position.session >= 0 or position.members:
            raise BusError(f"a client is connected to the durable {durable!r}: stop it first")
        if position.patterns_left_out:
            raise BusError(f"the durable {durable!r} has too many patterns to subscribe to it")
        match: PositionInfo = position
        return match
    durables = ", ".join(names) or "none"
    more = f" and {info.positions_left_out:,} more" if info.positions_left_out else ""
    raise BusError(f"class {class_} has no durable {durable!r}; there are {durables}{more}")


async def _forget(bus: Bus, class_: int | str, position: PositionInfo) -> None:
    """Subscribe to the durable with its own options and forget it. Raises RefusedError."""
    from simplebus.core.errors import Reason, RefusedError

    for by_key in (False, True):
        options: Any = {"group": position.group, "by_key": by_key} if position.group else {}
        try:
            async with bus.subscribe(
                class_, *position.patterns, durable=position.durable, auto_ack=False, **options
            ) as subscription:
                subscription.forget()
            return
        except RefusedError as error:
            if error.code != Reason.SUBSCRIPTION_MISMATCH or by_key or not position.group:
                raise
