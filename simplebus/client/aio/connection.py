"""The client core on a link to the bus, and on another one when that is lost; trio and asyncio.

Rule 1: no decisions here. What bytes mean and what is written next is the core's business, when to
try again is the schedule's, and what a socket is `link.py` knows.
Rule 2: the reader always reads. What waits here is bounded by what subscriptions let be in flight.
Rule 3: who waits, waits through a loss; it is told when there will be no other connection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import suppress

import anyio

from simplebus.client import addresses, fork_safety
from simplebus.client.aio.transport import Transport, Endpoint, open_transport
from simplebus.client.aio.waiters import ConnectionWaiters
from simplebus.client.aio.wakeup_event import WakeupEvent
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.reconnect import Schedule, is_worth_retrying
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import ACK_SECONDS, READ_BYTES
from simplebus.core.protocol.receive_buffer import ReceiveBuffer

log = logging.getLogger("simplebus.client")


class ClientConnection(ConnectionWaiters):
    """Whoever makes it calls `open`, then runs `run`, and ends that by `close`."""

    def __init__(
        self,
        core: ClientCore,
        places: Sequence[Endpoint],
        schedule: Schedule,
        *,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """Reads so much at most at a time."""
        super().__init__(core)
        self._arrivals: dict[Inbox, WakeupEvent] = {}
        self._places, self._schedule = places, schedule
        self._place = places[0]
        """Where the connection goes, or went."""
        self._link: Transport | None = None
        """The last connection; the writer knows whether it is still there."""
        self._loss: BusConnectionError | None = None
        """What became of the last connection."""
        self._is_last = False
        """Whether this connection is to be the last: nothing is left to be done on another."""
        self._scope = anyio.CancelScope(shield=True)
        """Around all tasks: a program that is cancelled still says goodbye."""
        self._serving = anyio.CancelScope()
        """Around the tasks of one connection."""
        self._buffer = ReceiveBuffer(read_bytes)
        self._beating = False
        """Whether a consumer holds messages that it may process any time."""
        self._beat_wanted = WakeupEvent()
        core.on_ack = self._acked
        core.set_notice_handler(lambda sentence: log.warning("the bus says: %s", sentence))
        fork_safety.register(self)

    # Connections ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Make a connection. Raises BusConnectionError when the time for it is over."""
        schedule = self._schedule
        while attempt := schedule.next(anyio.current_time()):
            await anyio.sleep(attempt.delay_seconds)
            self._place = self._places[attempt.address]
            try:
                known = self.core.publish_buffer.forgotten_count
                link = await open_transport(self._place, self.core, self._buffer, attempt.seconds)
            except BusConnectionError as problem:
                if not schedule.mark_failed(attempt.address_index, problem):
                    break
                if schedule.last_error is problem and schedule.has_permanent_refusal:
                    log.warning("%s; that address is not tried again", problem)
            else:
                addresses.log_forgotten_messages(
                    self._place, self.core.publish_buffer.forgotten_count - known
                )
                schedule.mark_connected(attempt.address_index, anyio.current_time())
                self._link = self.writer.transport = link
                return
        raise schedule.last_error or addresses.connect_timeout_error(
            self._place, schedule.timeout, is_connected=False
        )

    async def run(self) -> None:
        """Move bytes, on one connection after the other, until `close` has ended."""
        with self._scope:
            while self.end_error is None:
                link = self._link
                assert link is not None
                try:
                    await self._serve(link)
                finally:
                    link.close()
                await self._replace()
        self._over(addresses.connection_closed_error(self._place))

    async def _serve(self, link: Transport) -> None:
        """Move bytes until the connection is lost."""
        async with anyio.create_task_group() as tasks:
            self._serving = tasks.cancel_scope
            if self.writer.transport is None:  # Somebody who wrote has found it lost already.
                return
            for task in (self._read, self.writer.run):
                tasks.start_soon(task, link)
            for other in (self._beat, self._tick):
                tasks.start_soon(other)
            self._after_receiving()  # The answer to the Connect says what is confirmed.
            self.changed.set()

    async def _replace(self) -> None:
        """The connection is lost: have another one, or be told that there will be none."""
        if self.end_error is not None:
            return
        self.core.connection_lost()
        self._after_receiving()  # What came before the end counts.
        self.changed.set()
        loss = self._loss
        assert loss is not None
        if self._is_last or not self._schedule.reconnect_seconds or not is_worth_retrying(loss.__cause__):
            self._over(addresses.connection_closed_error(self._place) if self._is_last else loss)
            return
        log.warning("%s; trying again", loss)
        self._schedule.lost(anyio.current_time())
        try:
            await self.open()
        except BusConnectionError as problem:
            seconds = None if self._schedule.has_permanent_refusal else self._schedule.reconnect_seconds
            end = addresses.reconnect_failed_error(loss, problem, seconds)
            log.error("%s", end)
            self._over(end)
        else:
            log.info("connected again, to %s", self._place)

    def lose(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self.writer.transport is not None:
            self.writer.transport = None
            self._loss = addresses.connection_lost_error(self._place, error)
            self._serving.cancel()

    def disown(self, end: BusConnectionError) -> None:
        """This process is a child of the one that made the connection. Nobody is woken: what
        waits is the parent's."""
        if self.end_error is None:
            self.end_error = end
            self.writer.free_until_bytes = 0
            self.writer.transport = None

    def _over(self, end: BusConnectionError) -> None:
        """There will be no other connection: whoever waits learns so."""
        if self.end_error is None:
            self.end_error = end
            self.writer.free_until_bytes = 0
            self.core.fail_requests(end)
            self.wake_answered()
            self.confirms.wake_all()
            for signal in (self.changed, *self._arrivals.values()):
                signal.set()

    # The tasks of a connection -------------------------------------------------------------------

    async def _read(self, link: Transport) -> None:
        """Take what comes until the connection ends."""
        core, buffer = self.core, self._buffer
        error: Exception | None = None
        try:
            while count := await link.receive_into(buffer.writable):
                for inbox in core.receive(buffer, count, anyio.current_time()):
                    if inbox in self._arrivals:
                        self._arrivals[inbox].set()
                self._after_receiving()
        except (OSError, RemoteProtocolError) as lost:
            error = lost
        self.lose(error)

    def _after_receiving(self) -> None:
        refused = self.core.pop_refusals()
        if refused or self.confirms.has_waiters:
            self.confirms.update(self.core.confirmed_position, refused)
        if self.pending_requests:
            self.wake_answered()
        if (
            self.core.send_queue.queued_bytes
        ):  # A confirm has made room, or something was asked for.
            self.writer.write_now()
        self.changed.set()

    async def _beat(self) -> None:
        """Acknowledge what slow consumers have processed meanwhile."""
        while True:
            if not self._beating:
                await self._beat_wanted.wait()
                continue
            await anyio.sleep(ACK_SECONDS)
            self._beating = self.core.ack_processed()
            self.writer.write_now()

    async def _tick(self) -> None:
        """Say that we are there, and notice when the bus is not."""
        while True:
            try:
                due = self.core.tick(anyio.current_time())
            except RemoteProtocolError as error:
                self.lose(error)
                return
            self.writer.write_now()
            await anyio.sleep_until(due) if due < math.inf else await anyio.sleep_forever()

    # What subscriptions tell ---------------------------------------------------------------------

    def opened(self, inbox: Inbox, arrived: WakeupEvent) -> None:
        """A subscription begins. The signal is set when there is something to look at."""
        self._arrivals[inbox] = arrived
        self.writer.write_soon()

    def closed(self, inbox: Inbox) -> None:
        """A subscription has ended."""
        arrived = self._arrivals.pop(inbox, None)
        if arrived is not None:
            arrived.set()  # Another task may wait for what will not come.
        self.writer.write_now()

    def handed_out(self) -> None:
        """A consumer has got messages: it may have processed them before it asks again."""
        if not self._beating:
            self._beating = True
            self._beat_wanted.set()

    def _acked(self) -> None:
        """A consumer has acknowledged by hand."""
        self.check_thread()
        self.writer.write_due_acks()
        self.handed_out()

    # The end -------------------------------------------------------------------------------------

    async def close(self, *, seconds: float, shield: bool) -> None:
        """Have everything confirmed, say goodbye, and wait until the bus has heard it.

        Closing at once could lose what was written: a socket closed with bytes unread resets the
        connection. So the bus closes first.
        """
        try:
            with anyio.move_on_after(seconds, shield=shield), suppress(BusConnectionError, OSError):
                await self.flush()
                self._is_last = True
                link = self.writer.transport
                if link is not None:
                    link.end()
                while link is not None and self.writer.transport is link:
                    await self.changed.wait()
        finally:
            self._scope.cancel()

    def unconfirmed(self) -> BusConnectionError | None:
        """After `close`: an error if the bus did not confirm everything."""
        count = self.core.published_position - self.core.confirmed_position
        return (
            addresses.unconfirmed_error(count, self.end_error or addresses.connection_closed_error(self._place)) if count else None
        )
