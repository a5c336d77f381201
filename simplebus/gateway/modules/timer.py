"""Says something every so many seconds.

    module = "timer"
    settings = { every = 60, content = "collect", properties = { kind = "order" } }

Each message says in the property `tick` which it is, from 0. Ticks that are missed are left out, as
when nobody has room; with `count` it goes on until it has said so many messages all the same.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import trio

from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import Module


class TimerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it says, and when."""

    every: Annotated[float, msgspec.Meta(ge=0.001, le=366 * 86_400)]
    """Seconds."""
    content: str = ""
    properties: dict[str, str] = {}
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """How many messages it says; for ever if it is not set."""

    def __post_init__(self) -> None:
        ModuleMessage(self.content.encode(), self.properties)  # It is checked in there.


class Timer(Module):
    """The module."""

    Settings = TimerSettings

    async def run(self) -> None:
        """Say it again and again."""
        settings: TimerSettings = self.settings
        begun, tick, said = trio.current_time(), 0, 0
        while settings.count is None or said < settings.count:
            await trio.sleep_until(begun + (tick + 1) * settings.every)
            await self.bus.publish(
                settings.content.encode(), {**settings.properties, "tick": str(tick)}
            )
            said += 1
            tick = max(tick + 1, int((trio.current_time() - begun) / settings.every))
