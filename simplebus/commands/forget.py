"""`simplebus forget`: have the bus forget a durable that nobody uses any more.

Rule 1: nothing heavy is imported before the command runs.
Rule 2: what others wrote is printed without control characters.
Rule 3: nothing is forgotten that was not agreed to, nor what somebody is connected to.
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
    "Have the bus forget a durable that nobody uses any more, and with it what only that one still "
    "needs.\n\nA durable keeps messages until they are acknowledged, for ever unless it was said "
    "for how long: that of a bridge that has another name now, or of a program that is gone.\n\n\b"
    "\n  simplebus explain orders            which durables there are, and who is connected\n"
    "  simplebus forget orders billing     what that one still waits for\n"
    "  simplebus forget orders billing --yes"
)


def forget(
    class_: Annotated[
        Any,
        typer.Argument(
            parser=parse_class,
            metavar="CLASS",
            show_default=False,
            help="The class: its id, or its name.",
        ),
    ],
    durable: Annotated[
        str, typer.Argument(metavar="DURABLE", show_default=False, help="The name of the durable.")
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without, it is only said what it waits for.")
    ] = False,
    url: Annotated[str, URL_OPTION] = URL,
) -> None:
    import trio

    import simplebus
    from simplebus.core.broker.wait_reasons import format_message_count

    async def work() -> None:
        async with simplebus.connect(url, reconnect=None) as bus:
            found = await _find(bus, class_, durable)
            waiting = (
                f"{format_message_count(found.lag)} from the first that it has not acknowledged on"
            )
            if not yes:
                fail(printable(f"durable {durable!r} has {waiting}; say --yes to do it"), status=2)
            await _forget(bus, class_, found)
            typer.echo(printable(f"forgot the durable {durable!r}, which had {waiting}"))

    trio.run(work)


async def _find(bus: Bus, class_: int | str, durable: str) -> PositionInfo:
    """Raises BusError unless it is there, and nobody is connected to it."""
    from simplebus.core.errors import BusError

    said: Any = await bus.explain(class_)
    names = []
    for each in said.positions:
        if each.durable != durable:
            names += [repr(each.durable)] if each.durable else []
            continue
        if each.session >= 0 or each.members:
            raise BusError(f"somebody is connected to the durable {durable!r}: stop that first")
        if each.patterns_left_out:
            raise BusError(f"the durable {durable!r} has too many channels to name it by them")
        found: PositionInfo = each
        return found
    there = ", ".join(names) or "none"
    more = f" and {said.positions_left_out:,} more" if said.positions_left_out else ""
    raise BusError(f"class {class_} has no durable {durable!r}; there are {there}{more}")


async def _forget(bus: Bus, class_: int | str, found: PositionInfo) -> None:
    """Take it up as it is, and let go of it. Raises RefusedError."""
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
