"""What an uplink has heard, on its way into the bus in this process, until that has it.

Rule 1: what the bus has no room for is given to it again, in order, until there is some: meanwhile
nothing else is taken. So who copies from that bus goes on, and makes room.
Rule 2: what is under way is bounded, in messages and in bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import trio

from simplebus.client.aio.bus import Bus
from simplebus.client.pending_confirms import ConfirmWaiter
from simplebus.core.errors import Reason, RefusedError

MESSAGES_MAX = 4096
AGAIN_SECONDS = 1.0
"""How long what found no room is left alone."""
_NO_ROOM = {Reason.DISK_FULL, Reason.DROP_NEWEST}


@dataclass(frozen=True, slots=True)
class _Given:
    """A message that the bus was given."""

    waiter: ConfirmWaiter
    payload: bytes
    about: Mapping[str, Any]


class Intake:
    """Gives messages to a bus. Enter `run` in a nursery."""

    def __init__(
        self,
        bus: Bus,
        class_: int | str,
        *,
        bytes_max: int,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        """`bytes_max`: with so many bytes under way, `put` waits."""
        self._bus = bus
        self._class = class_
        self._bytes_max = bytes_max
        self._log = log
        self._given: deque[_Given] = deque()
        """In the order in which the bus was given them."""
        self._bytes = 0
        self._moved = trio.Event()
        self.kept = 0
        """Messages that are where they are kept."""
        self.problem = ""
        """Why there is no room; empty while there is some."""

    async def put(self, payload: bytes, about: Mapping[str, Any]) -> None:
        """Have it kept, once there is room. Raises LocalProtocolError and ValueError for what
        cannot be published."""
        while self.problem or len(self._given) >= MESSAGES_MAX or self._bytes > self._bytes_max:
            await self._moved.wait()
        await self._give(payload, about)

    async def run(self) -> None:
        """Learn what is kept. Raises RefusedError when something can never be."""
        while True:
            if lacking := self._settled():
                await self._again(lacking)
            await self._wait()

    async def flushed(self) -> None:
        """Return when all that was put is kept."""
        while self._given or self.problem:
            self._bus.connection.check_open()
            await self._moved.wait()

    async def _wait(self) -> None:
        """For something to happen. Raises BusConnectionError when the bus is gone."""
        self._bus.connection.check_open()
        if not (self._given and self._given[0].waiter.is_done):
            await self._moved.wait()
            self._bus.connection.check_open()

    async def _give(self, payload: bytes, about: Mapping[str, Any]) -> None:
        wire = self._bus.connection
        await self._bus.publish(payload, class_id=self._class, confirm=False, **about)
        position = wire.core.published_position - 1
        waiter = wire.confirms.add_waiter(position, position, self._move)
        self._given.append(_Given(waiter, payload, about))
        self._bytes += len(payload)
        wire.writer.write_soon()

    def _move(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    def _settled(self) -> list[_Given]:
        """Of what the bus has decided on by now, what it had no room for. Raises RefusedError."""
        lacking, before = [], len(self._given)
        while self._given and self._given[0].waiter.is_done:
            each = self._given.popleft()
            self._bytes -= len(each.payload)
            if not each.waiter.refusals:
                self.kept += 1
                continue
            error = each.waiter.refusals[0]
            if error.code not in _NO_ROOM:
                raise error
            lacking.append(each)
        if len(self._given) != before:  # There is room for others.
            self._move()
        return lacking

    async def _again(self, lacking: list[_Given]) -> None:
        """Give these again, until the bus has them: few at first, so that they stay in order."""
        error: RefusedError = lacking[0].waiter.refusals[0]
        self.problem = str(error)
        self._log.warning("there is no room for what is heard: it waits (%s)", error)
        lacking += await self._all_settled()
        count = 1
        while lacking:
            await trio.sleep(AGAIN_SECONDS if count == 1 else 0)
            for each in lacking[:count]:
                await self._give(each.payload, each.about)
            refused = await self._all_settled()
            lacking = refused + lacking[count:]
            count = 1 if refused else 2 * count
        self.problem = ""
        self._log.info("there is room again for what is heard")
        self._move()

    async def _all_settled(self) -> list[_Given]:
        lacking = self._settled()
        while self._given:
            await self._wait()
            lacking += self._settled()
        return lacking
