"""A connected socket and the client core behind it, under trio and asyncio.

Rule 1: no decisions here. What bytes mean and what is written next is the core's business.
Rule 2: whoever has something to write tries at once, without waiting; the writer task does what did
not fit, and the small messages that were left to pile up until their publisher yields.
Rule 3: the reader reads, whoever waits for whatever; it pauses only while local subscriptions hold
more than they should, and acknowledgements are written meanwhile.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import anyio
import anyio.lowlevel

from simplebus.client import dial
from simplebus.client.signal import Signal
from simplebus.client.subscription import Subscription
from simplebus.core.client import ClientCore
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.inbox import Inbox
from simplebus.core.limits import ACK_SECONDS, READ_BYTES, STILL_SECONDS
from simplebus.core.receive import ReceiveBuffer

# A publisher goes on without a thought until so much waits to be written.
WRITE_BYTES = 64 * 1024
# Written in one turn before other tasks get theirs.
_TURN_BYTES = 1024 * 1024


class Wire:
    """Whoever makes it runs `run`, ends it by `close`, and closes the socket."""

    def __init__(self, core: ClientCore, sock: socket.socket, address: dial.Address) -> None:
        self.core = core
        self.address = address
        self.write_at = 0
        """With so many bytes queued, a publisher must call `make_room` first; 0 while the writer
        sleeps, so that the next publisher wakes it."""
        self.changed = Signal()
        """Set when bytes were written, a Connect was answered, a consumer ran out of messages, or
        the connection was lost."""
        self._scope = anyio.CancelScope(shield=True)
        """Around all tasks: a program that is cancelled still says goodbye."""
        self._socket = sock
        self._buffer = ReceiveBuffer(READ_BYTES)
        self._subscriptions: dict[Inbox, Subscription] = {}
        self._loss = ""
        """What became of the connection; empty while it is there."""
        self._cause: Exception | None = None
        self._leaving = False
        """Whether the user has left: what comes is read and dropped."""
        self._writing = False
        """Whether the writer task has something to do."""
        self._stuck = False
        """Whether the socket took less than it was given."""
        self._beating = False
        """Whether a consumer holds messages that it may process any time."""
        self._paused = False
        """Whether the reader waits for consumers."""
        self._write_wanted, self._beat_wanted, self._room = Signal(), Signal(), Signal()

    def check(self) -> None:
        """Raise BusConnectionError unless the connection is there."""
        if self._loss:
            raise BusConnectionError(self._loss) from self._cause

    # Tasks ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Move bytes until `close` has ended."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                for task in (self._read, self._write, self._beat):
                    tasks.start_soon(task)

    async def _read(self) -> None:
        """Take what comes until the connection ends."""
        sock, core, buffer = self._socket, self.core, self._buffer
        error: Exception | None = None
        try:
            while True:
                await anyio.wait_readable(sock)
                try:
                    count = sock.recv_into(buffer.space)
                except BlockingIOError:
                    continue
                if count == 0:
                    break
                if self._leaving:
                    continue
                answers = core.answers
                for inbox in core.receive(buffer, count):
                    self._subscriptions[inbox].arrived.set()
                if core.answers != answers:
                    self.changed.set()
                while core.is_full and not self._leaving:
                    await self._pause()
        except (OSError, RemoteProtocolError) as lost:
            error = lost
        self._lose(error)

    async def _pause(self) -> None:
        """Leave what comes in the socket until consumers have made room, or stand still."""
        self._paused = True
        progress = self.core.progress()
        with anyio.move_on_after(STILL_SECONDS) as patience:
            await self._room.wait()
        if patience.cancelled_caught:
            self.core.find_still(progress)

    async def _write(self) -> None:
        """Write what others left: what did not fit, and small messages."""
        while not self._loss:
            if not self._writing:
                await self._write_wanted.wait()
                continue
            if self._stuck:
                await anyio.wait_writable(self._socket)
                self._stuck = False
            self.push()
            if not self._stuck:
                self._writing = False
                self.write_at = 0
            self.changed.set()

    async def _beat(self) -> None:
        """Acknowledge what slow consumers have processed meanwhile."""
        while not self._loss:
            if not self._beating:
                await self._beat_wanted.wait()
                continue
            await anyio.sleep(ACK_SECONDS)
            self._beating = self.core.settle_processed()
            self.push()

    # Writing -------------------------------------------------------------------------------------

    def push(self) -> None:
        """Write what the socket takes now; the writer task does the rest."""
        if self._stuck or self._loss:
            return
        outgoing = self.core.outgoing
        enough = outgoing.sent_bytes + _TURN_BYTES
        try:
            while data := outgoing.peek():
                outgoing.sent(self._socket.send(data))
                if outgoing.sent_bytes > enough:
                    self._stick()
                    return
        except BlockingIOError:
            self._stick()
        except OSError as error:
            self._lose(error)

    def push_due_acks(self) -> None:
        if self.core.acks_are_due:
            self.push()

    def push_soon(self) -> None:
        """Have the writer task write, once the caller yields."""
        self._writing = True
        self._write_wanted.set()

    async def make_room(self) -> None:
        """Return when a publisher may queue one more message."""
        self.check()
        outgoing = self.core.outgoing
        if outgoing.queued_bytes >= WRITE_BYTES:
            self.push()
            await anyio.lowlevel.checkpoint()
            self.check()
            while outgoing.queued_bytes >= WRITE_BYTES:
                await self.changed.wait()
                self.check()
        self.write_at = WRITE_BYTES
        self.push_soon()

    async def flush(self) -> None:
        """Wait until everything published and acknowledged so far is written."""
        self.check()
        self.core.settle_processed()
        mark = self.core.outgoing.mark()
        self.push()
        await anyio.lowlevel.checkpoint()
        while not self.core.outgoing.has_written(mark):
            self.check()
            await self.changed.wait()

    async def sync(self) -> None:
        """Wait until the bus has applied everything queued so far."""
        self.check()
        asked = self.core.connect()
        self.push()
        self._room.set()
        while self.core.answers < asked:
            self.check()
            await self.changed.wait()

    def _stick(self) -> None:
        self._stuck = True
        self.push_soon()

    # What subscriptions tell ---------------------------------------------------------------------

    def opened(self, subscription: Subscription, *, auto_ack: bool) -> Inbox:
        """A subscription begins."""
        self.check()
        inbox = self.core.subscribe(subscription.class_id, auto_ack=auto_ack)
        self._subscriptions[inbox] = subscription
        self.push_soon()
        return inbox

    def closed(self, inbox: Inbox, *, processed: bool) -> None:
        """A subscription has ended."""
        self.core.unsubscribe(inbox, processed=processed)
        self._subscriptions.pop(inbox, None)
        self.push()
        self._room.set()

    def handed_out(self) -> None:
        """A consumer has got messages."""
        self._beat_soon()
        if self._paused and self.core.has_room:
            self._paused = False
            self._room.set()

    def acked(self) -> None:
        """A consumer has acknowledged by hand."""
        self.push_due_acks()
        self._beat_soon()

    def _beat_soon(self) -> None:
        if not self._beating:
            self._beating = True
            self._beat_wanted.set()

    # The end -------------------------------------------------------------------------------------

    async def close(self, *, seconds: float, shield: bool) -> None:
        """Write what is queued, say goodbye, and wait until the bus has heard it.

        Closing at once could lose what was written: a socket closed with bytes unread resets the
        connection. So the bus closes first.
        """
        self._leaving = True
        self._room.set()
        if self.core.session_id is None:  # Nobody is there to hear it.
            seconds = 0
        try:
            with anyio.move_on_after(seconds, shield=shield), suppress(BusConnectionError, OSError):
                await self.flush()
                self._socket.shutdown(socket.SHUT_WR)
                while not self._loss:
                    await self.changed.wait()
        finally:
            self._lose(None)
            self._scope.cancel()

    def unwritten(self) -> BusConnectionError | None:
        """After `close`: an error if something was left that the bus did not take."""
        left = self.core.outgoing.queued_bytes
        return dial.unwritten(left, self._loss) if left else None

    def _lose(self, error: Exception | None) -> None:
        """The connection is gone: whoever waits for it learns so."""
        if self._loss:
            return
        self._loss = dial.lost(self.address, error, left=self._leaving)
        self._cause = error
        self.write_at = 0
        for signal in (self.changed, self._room, self._write_wanted, self._beat_wanted):
            signal.set()
        for subscription in self._subscriptions.values():
            subscription.arrived.set()
