"""Removal of durables by operators."""

from __future__ import annotations

from typing import Any

from simplebus.client.aio.bus import Bus
from simplebus.core.errors import BusError, Reason, RefusedError
from simplebus.core.protocol.inquiry import PositionInfo


class NoIdleDurableError(BusError):
    """A durable does not exist, or cannot be removed now."""


async def find_idle_durable(bus: Bus, class_: int | str, durable: str) -> PositionInfo:
    """Return the durable's position. Raises NoIdleDurableError if it is missing or in use."""
    info: Any = await bus.explain(class_)
    names = []
    for position in info.positions:
        if position.durable != durable:
            names += [repr(position.durable)] if position.durable else []
            continue
        if position.session >= 0 or position.members:
            raise NoIdleDurableError(
                f"a client is connected to the durable {durable!r}: stop that client first"
            )
        if position.patterns_left_out:
            raise NoIdleDurableError(
                f"the durable {durable!r} has too many patterns to subscribe to it"
            )
        match: PositionInfo = position
        return match
    durables = ", ".join(names) or "none"
    more = f" and {info.positions_left_out:,} more" if info.positions_left_out else ""
    raise NoIdleDurableError(
        f"class {class_} has no durable {durable!r}; there are {durables}{more}"
    )


async def forget_durable(bus: Bus, class_: int | str, position: PositionInfo) -> None:
    """Subscribe to the durable with its own options and forget it. Raises RefusedError."""
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
