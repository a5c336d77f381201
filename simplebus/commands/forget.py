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
            found = await _find(bus, class_, durable)
            waiting = f"{format_message_count(found.lag)} after its first unacknowledged one"
            if not yes:
                fail(
                    printable(f"durable {durable!r} has {waiting}; add --yes to remove it"),
                    status=2,
                )
            await _forget(bus, class_, found)
            typer.echo(printable(f"removed the durable {durable!r}, which had {waiting}"))

    trio.run(work)


async def _find(bus: Bus, class_: int | str, durable: str) -> PositionInfo:
    """Return the durable's position. Raises BusError if it is missing or in use."""
    from simplebus.core.errors import BusError

    said: Any = await bus.explain(class_)
    names = []
    for each in said.positions:
        if each.durable != durable:
            names += [repr(each.durable)] if each.durable else []
            continue
        if each.session >= 0 or each.members:
            raise BusError(f"a client is connected to the durable {durable!r}: stop it first")
        if each.patterns_left_out:
            raise BusError(f"the durable {durable!r} has too many patterns to subscribe to it")
        found: PositionInfo = each
        return found
    there = ", ".join(names) or "none"
    more = f" and {said.positions_left_out:,} more" if said.positions_left_out else ""
    raise BusError(f"class {class_} has no durable {durable!r}; there are {there}{more}")


async def _forget(bus: Bus, class_: int | str, found: PositionInfo) -> None:
    """Subscribe to the durable with its own options and forget it. Raises RefusedError."""
    from simplebus.core.errors import Reason, RefusedError

    for by_key in (False, True):
        options: Any = {"group": found.group, "by_key": by_key} if found.group else {}
        try:
            async with bus.subscribe(
                class_, *found.patterns, durable=found.durable, auto_ack=False, **options
            ) as one:
                one.forget()
            return
        except RefusedError as error:
            if error.code != Reason.SUBSCRIPTION_MISMATCH or by_key or not found.group:
                raise
