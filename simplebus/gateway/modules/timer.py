"""Publishes a message periodically.

    module = "timer"
    settings = { every = 60, content = "collect", properties = { kind = "order" } }

The property `tick` numbers the messages from 0. Ticks are skipped while a queue is full; with
`count`, the timer ends after that many messages.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import trio

from simplebus.gateway.messages import ModuleMessage
from simplebus.gateway.module import Module


class TimerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the timer."""

    every: Annotated[float, msgspec.Meta(ge=0.001, le=366 * 86_400)]
    """Interval in seconds."""
    content: str = ""
    properties: dict[str, str] = {}
    count: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of messages; None for no limit."""

    def __post_init__(self) -> None:
        ModuleMessage(self.content.encode(), self.properties)  # Checks the properties.


class Timer(Module):
    """Timer module."""

    Settings = TimerSettings

    async def run(self) -> None:
        """Publish messages."""
        settings: TimerSettings = self.settings
        started_at, tick, published_count = trio.current_time(), 0, 0
        while settings.count is None or published_count < settings.count:
            await trio.sleep_until(started_at + (tick + 1) * settings.every)
            await self.bus.publish(
                settings.content.encode(), {**settings.properties, "tick": str(tick)}
            )
            published_count += 1
            tick = max(tick + 1, int((trio.current_time() - started_at) / settings.every))
