"""Which other doors there are, asked of themselves (trio).

Rule 1: a door that nobody answers for is gone, which the server says. One that is connected and
says nothing, stopped for example, is taken to be there, and is not asked again for a while: to take
what is its own would have two have it, and nobody is to wait for it.
"""

from __future__ import annotations

from collections.abc import Collection

import trio

from simplebus.core.errors import BusConnectionError
from simplebus.engine.link import Link
from simplebus.engine.names import Names
from simplebus.nats.client import jetstream

SILENT_SECONDS = 30.0
"""For how long."""


class Others:
    """As one door sees them."""

    def __init__(self, link: Link, names: Names) -> None:
        self._link = link
        self._names = names
        self._silent_until: dict[str, float] = {}
        """Those that have said nothing."""

    async def alive(self, doors: Collection[str]) -> set[str]:
        """Which of these are there. Raises BusConnectionError."""
        alive, lost = set[str](), list[BusConnectionError]()

        async def ask(door: str) -> None:
            try:
                if await self.is_alive(door):
                    alive.add(door)
            except BusConnectionError as error:
                lost.append(error)

        async with trio.open_nursery() as nursery:
            for door in doors:
                nursery.start_soon(ask, door)
        if lost:
            raise lost[0]
        return alive

    async def is_alive(self, door: str) -> bool:
        """Whether this one is. Raises BusConnectionError."""
        now = trio.current_time()
        if now < self._silent_until.get(door, 0.0):
            return True
        try:
            return await self._is_answered(self._names.door(door))
        except BusConnectionError:
            if not self._link.is_ready:
                raise
        now = trio.current_time()
        self._silent_until = {each: at for each, at in self._silent_until.items() if at > now}
        self._silent_until[door] = now + SILENT_SECONDS
        return True

    async def is_held(self, class_id: int, name: str) -> bool:
        """Whether a door feeds somebody from the consumer of this name: it says so. A server may
        take one for alive that has just died. Raises BusConnectionError."""
        try:
            return await self._is_answered(self._names.holder(class_id, name))
        except BusConnectionError:
            if self._link.is_ready:  # It was asked, and is silent.
                return False
            raise

    async def _is_answered(self, subject: str) -> bool:
        headers, said = await self._link.request(subject)
        # A door says nothing more; a stream that somebody else made would say that it has it.
        return jetstream.status(headers)[0] != jetstream.NO_RESPONDERS and not said
