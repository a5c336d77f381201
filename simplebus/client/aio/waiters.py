"""What callers under trio and asyncio wait for: confirms, answers, and that all is written.

Rule 1: who waits, waits through the loss of a connection; it is told when there will be no other.
Rule 2: a confirm, and an answer, wakes whom it is for and nobody else.
Rule 3: a bus belongs to one thread. Others are told so before they touch anything, wherever a call
may wait or has handed over a write's worth of messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.lowlevel

from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.aio.writer import TransportWriter
from simplebus.client.core.client import ClientCore
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.pending_confirms import PendingConfirms
from simplebus.core.errors import BusConnectionError, LocalProtocolError, RefusedError
from simplebus.core.limits import CLOSE_SECONDS


class ConnectionWaiters:
    """The half of a wire that its callers see."""

    def __init__(self, core: ClientCore) -> None:
        self.core = core
        self.changed = WakeupEvent()
        """Set when bytes were written, a connection was made or lost, or a consumer ran out of
        messages."""
        self.confirms = PendingConfirms()
        self.writer = TransportWriter(core, self.changed, check=self.check_open, lose=self.connection_lost)
        self.pending_requests: list[tuple[OpenRequest, Callable[[], None]]] = []
        """What the bus has yet to answer, and what is done then."""
        self.end_error: BusConnectionError | None = None
        """Why there will be no other connection; None while there may be one."""
        self._thread = threading.get_ident()
        """Whose event loop the bus belongs to."""

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise BusConnectionError when there is no connection and will be none, LocalProtocolError
        in another thread than the bus's."""
        self.check_thread()
        if self.end_error is not None:
            raise BusConnectionError(str(self.end_error)) from self.end_error.__cause__

    def check_thread(self) -> None:
        """Raise LocalProtocolError in another thread than the bus's."""
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(
                "this bus belongs to the event loop in which it was connected, and this is another "
                "thread; from here call anyio.from_thread.run(bus.publish, …), or connect anew"
            )

    def wake_answered(self) -> None:
        """Tell who waits for what the bus has answered."""
        before, self.pending_requests = self.pending_requests, []
        for request, wake in before:
            if request.is_done:
                wake()
            else:
                self.pending_requests.append((request, wake))

    async def wait_confirmed(self, first: int, last: int) -> list[RefusedError]:
        """Wait until the bus has confirmed these positions, or refused them."""
        event = anyio.Event()
        if self.confirms.has_waiters:  # Many publish at once: their messages leave together.
            self.writer.write_soon()
        else:
            self.writer.write_now()
        waiter = self.confirms.add_waiter(first, last, event.set)
        if self.end_error is not None:
            event.set()
        try:
            await event.wait()
        except BaseException:
            self.confirms.cancel(waiter)
            raise
        if not waiter.is_done:
            self.check_open()
        return waiter.refusals

    async def flush(self) -> None:
        """Wait until the bus has confirmed everything published so far, and every
        acknowledgement so far is written."""
        self.check_open()
        core, outgoing = self.core, self.core.send_queue
        core.ack_processed()
        while core.has_held_acks:
            self.check_open()
            await self.changed.wait()
        mark = outgoing.encode_acks()
        await anyio.lowlevel.checkpoint()
        self.writer.write_now()
        while not outgoing.has_written_acks(mark):
            self.check_open()
            await self.changed.wait()
        if core.confirmed_position < core.published_position:
            await self.wait_confirmed(core.published_position, core.published_position - 1)

    async def wait_answered(self, request: OpenRequest) -> OpenRequest:
        """Wait for an answer of the bus. Raises RefusedError, or what became of the connection."""
        if not request.is_done:
            self.check_open()  # Nobody will tell what was asked when all was over.
            event = anyio.Event()
            self.pending_requests.append((request, event.set))
            self.writer.write_now()
            await event.wait()
        if request.error is not None:
            raise request.error
        return request

    async def wait_answered_briefly(self, request: OpenRequest) -> None:
        """Wait until the bus has answered, with whatever: not for long, and not for a connection
        that is to be made first."""
        if self.writer.transport is None:
            return
        with suppress(RefusedError, BusConnectionError), anyio.move_on_after(CLOSE_SECONDS):
            await self.wait_answered(request)

    async def request(self, question: Callable[[], OpenRequest]) -> OpenRequest:
        """Ask the bus, again if the connection is lost before the answer."""
        while True:
            self.check_open()
            if self.writer.transport is None:
                await self.changed.wait()
                continue
            try:
                return await self.wait_answered(question())
            except BusConnectionError:
                self.check_open()
                await anyio.lowlevel.checkpoint()
