"""Waits of callers under trio and asyncio: for confirms, for replies and for written bytes.

A wait survives the loss of a connection; it ends with an error when no other connection will be
made. A confirm or reply wakes only the caller that waits for it.

A bus belongs to one thread. The thread is checked wherever a call may wait or has appended enough
messages for a write; a call from another thread raises before it changes anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.lowlevel

from simplebus.client.aio.writer import TransportWriter
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.core.open_requests import OpenRequest
from simplebus.client.event_loop.deadlines import Deadlines
from simplebus.client.event_loop.find import find_event_loop
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from simplebus.client.pending_confirms import PendingConfirms
from simplebus.core.errors import BusConnectionError, LocalProtocolError, RefusedError
from simplebus.core.limits import CLOSE_SECONDS


class ConnectionWaiters:
    """Part of a client connection that its callers use."""

    def __init__(self, core: ClientCore) -> None:
        self.core = core
        self.event_loop = find_event_loop()
        self.changed = WakeupEvent()
        """Set when bytes were written, a connection was made or lost, or a consumer ran out of
        messages.
        """
        self.confirms = PendingConfirms()
        self.deadlines = Deadlines()
        """Deadlines of callers, closed when no other connection will be made. `Bus` runs them."""
        self.writer = TransportWriter(
            core, self.changed, check=self.check_open, on_lost=self.connection_lost
        )
        self.pending_requests: list[tuple[OpenRequest, Callable[[], None]]] = []
        """Requests that the bus has not answered, each with the function that wakes its caller."""
        self.end_error: BusConnectionError | None = None
        """Reason why no other connection will be made; None while one may be."""
        self._thread = threading.get_ident()
        """Thread of the event loop to which the bus belongs."""

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the loss of the connection."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise BusConnectionError if no other connection will be made.

        Raises LocalProtocolError in another thread than that of the bus.
        """
        self.check_thread()
        if self.end_error is not None:
            raise BusConnectionError(str(self.end_error)) from self.end_error.__cause__

    def check_thread(self) -> None:
        """Raise LocalProtocolError in another thread than that of the bus."""
        if threading.get_ident() != self._thread:
            raise LocalProtocolError(
                "this bus belongs to the event loop in which it was connected, and this is another "
                "thread; in a thread of anyio.to_thread call "
                "anyio.from_thread.run(functools.partial(bus.publish, …)), or connect again "
                "in this thread"
            )

    def wake_answered(self) -> None:
        """Wake the callers whose requests the bus has answered."""
        waiting, self.pending_requests = self.pending_requests, []
        for request, wake in waiting:
            if request.is_done:
                wake()
            else:
                self.pending_requests.append((request, wake))

    async def wait_confirmed(self, first: int, last: int) -> list[RefusedError]:
        """Wait until the bus has confirmed or refused the positions first..last. Returns the
        refusals.
        """
        awaited = self.event_loop.create_waiter()
        self.core.require_confirm(last + 1)
        if self.confirms.has_waiters:  # Several tasks publish: their messages are written together.
            self.writer.write_soon()
        else:
            self.writer.write_now()
        waiter = self.confirms.add_waiter(first, last, awaited.wake)
        if self.end_error is not None:
            awaited.wake()
        try:
            await awaited
        except BaseException:
            self.confirms.cancel(waiter)
            raise
        if not waiter.is_done:
            self.check_open()
        return waiter.refusals

    async def flush(self) -> None:
        """Wait until everything published so far is confirmed and every ack so far is written."""
        self.check_open()
        core, outgoing = self.core, self.core.send_queue
        core.ack_processed()
        while core.has_held_acks:
            self.check_open()
            await self.changed.wait()
        acks_end = outgoing.encode_acks()
        core.require_confirm(core.published_position)
        await anyio.lowlevel.checkpoint()
        self.writer.write_now()
        while not outgoing.has_written_acks(acks_end):
            self.check_open()
            await self.changed.wait()
        if core.confirmed_position < core.published_position:
            await self.wait_confirmed(core.published_position, core.published_position - 1)

    async def wait_answered(self, request: OpenRequest) -> OpenRequest:
        """Wait for the reply to a request. Raises RefusedError or BusConnectionError."""
        if not request.is_done:
            self.check_open()  # No reply can arrive on a closed bus.
            waiter = self.event_loop.create_waiter()
            self.pending_requests.append((request, waiter.wake))
            self.writer.write_now()
            await waiter
        if request.error is not None:
            raise request.error
        return request

    async def wait_answered_briefly(self, request: OpenRequest) -> None:
        """Wait up to CLOSE_SECONDS for any reply; return at once if there is no connection."""
        if self.writer.transport is None:
            return
        with suppress(RefusedError, BusConnectionError), anyio.move_on_after(CLOSE_SECONDS):
            await self.wait_answered(request)

    async def sync_acks(self, inbox: Inbox) -> None:
        """Wait until the acks of a subscription are stored.

        Raises:
            BusConnectionError: The connection is lost; the acks may be lost, too.
            RefusedError: The server cannot confirm stored acks.
        """
        while True:
            self.check_open()
            if self.writer.transport is None:
                await self.changed.wait()
                continue
            await self.wait_answered(inbox.subscribe_request)
            if self.writer.transport is not None and not inbox.has_held_acks:
                break
            await anyio.lowlevel.checkpoint()
        await self.wait_answered(self.core.sync_acks())

    async def request(self, send: Callable[[], OpenRequest]) -> OpenRequest:
        """Send a request and wait for its reply; repeat it if the connection is lost before."""
        while True:
            self.check_open()
            if self.writer.transport is None:
                await self.changed.wait()
                continue
            try:
                return await self.wait_answered(send())
            except BusConnectionError:
                self.check_open()
                await anyio.lowlevel.checkpoint()
