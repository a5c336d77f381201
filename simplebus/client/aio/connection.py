"""Connection of the async client, which is replaced when it is lost.

`ClientConnection` moves bytes between the client core and a transport. The core decides which bytes
are sent, and the reconnect schedule when to connect. The reader never pauses, because
`max_in_flight` limits the buffered messages. Callers wait through a loss and get an error when no
other connection will be made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import anyio

from simplebus.client import addresses, fork_safety
from simplebus.client.aio.transport import (
    Endpoint,
    SocketTransport,
    Transport,
    open_transport,
)
from simplebus.client.aio.waiters import ConnectionWaiters
from simplebus.client.core.client import ClientCore
from simplebus.client.core.inbox import Inbox
from simplebus.client.event_loop.services import ReadResult
from simplebus.client.event_loop.wakeup_event import WakeupEvent
from simplebus.client.reconnect import ReconnectSchedule, is_worth_retrying
from simplebus.core.errors import BusConnectionError, RemoteProtocolError
from simplebus.core.limits import ACK_SECONDS, READ_BYTES
from simplebus.core.protocol.receive_buffer import ReceiveBuffer
from simplebus.logs.event_logger import EventLogger

log = EventLogger("simplebus.client")


class ClientConnection(ConnectionWaiters):
    """Reconnecting connection of a client core. Call `open`, then `run`; `close` ends it."""

    def __init__(
        self,
        core: ClientCore,
        endpoints: Sequence[Endpoint],
        schedule: ReconnectSchedule,
        *,
        read_bytes: int = READ_BYTES,
    ) -> None:
        super().__init__(core)
        self._on_arrival: dict[Inbox, Callable[[], None]] = {}
        """Functions to call when a subscription has received messages or has ended."""
        self._endpoints, self._schedule = endpoints, schedule
        self._endpoint = endpoints[0]
        """Endpoint of the present or last connection."""
        self._transport: Transport | None = None
        """Last transport; `writer.transport` is None once it is lost."""
        self._lost_error: BusConnectionError | None = None
        """Reason for the loss of the last connection."""
        self._is_last = False
        """True if no other connection is needed, because everything is confirmed."""
        self._run_scope = anyio.CancelScope(shield=True)
        """Scope of all tasks, shielded so that a cancelled program still closes the connection
        properly.
        """
        self._connection_scope = anyio.CancelScope()
        """Scope of the tasks of one connection."""
        self._buffer = ReceiveBuffer(read_bytes)
        self._has_unacked = False
        """True if a consumer holds messages that it may have processed since the last ack."""
        self._unacked_added = WakeupEvent()
        core.on_ack = self._on_manual_ack
        core.set_notice_handler(addresses.NoticeLog().add)
        fork_safety.register(self)

    # Connections ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Make a connection. Raises BusConnectionError when the time for attempts is over."""
        schedule = self._schedule
        while attempt := schedule.next_attempt(anyio.current_time()):
            await anyio.sleep(attempt.delay_seconds)
            self._endpoint = self._endpoints[attempt.address_index]
            try:
                forgotten_before = self.core.publish_buffer.forgotten_count
                transport = await open_transport(
                    self._endpoint, self.core, self._buffer, attempt.timeout_seconds
                )
            except BusConnectionError as problem:
                if not schedule.mark_failed(attempt.address_index, problem):
                    break
                if schedule.last_error is problem and schedule.has_permanent_refusal:
                    log.warning(
                        "address.refused", "{error}; that address is not tried again", error=problem
                    )
            else:
                addresses.log_forgotten_messages(
                    self._endpoint, self.core.publish_buffer.forgotten_count - forgotten_before
                )
                schedule.mark_connected(attempt.address_index, anyio.current_time())
                self._transport = self.writer.transport = transport
                return
        raise schedule.last_error or addresses.connect_timeout_error(
            self._endpoint, schedule.timeout_seconds, is_connected=False
        )

    async def run(self) -> None:
        """Serve one connection after another, until `close` has ended."""
        with self._run_scope:
            while self.end_error is None:
                transport = self._transport
                assert transport is not None
                try:
                    await self._serve(transport)
                finally:
                    transport.close()
                await self._reconnect()
        self._end(addresses.connection_closed_error(self._endpoint))

    async def _serve(self, transport: Transport) -> None:
        """Run the tasks of one connection until it is lost."""
        async with anyio.create_task_group() as tasks:
            self._connection_scope = tasks.cancel_scope
            if self.writer.transport is None:  # A write has already detected the loss.
                return
            for stream_task in (self._run_reader, self.writer.run):
                tasks.start_soon(stream_task, transport)
            for timer_task in (self._run_ack_timer, self._run_heartbeats):
                tasks.start_soon(timer_task)
            self._process_received()  # The reply to the Connect contains confirms.
            self.changed.set()

    async def _reconnect(self) -> None:
        """Replace the lost connection, or end if no other one can be made."""
        if self.end_error is not None:
            return
        self.core.connection_lost()
        self._process_received()  # Frames received before the loss are valid.
        self.changed.set()
        loss = self._lost_error
        assert loss is not None
        if (
            self._is_last
            or not self._schedule.reconnect_seconds
            or not is_worth_retrying(loss.__cause__)
        ):
            self._end(addresses.connection_closed_error(self._endpoint) if self._is_last else loss)
            return
        log.warning("connection.lost", "{error}; retrying", error=loss)
        self._schedule.mark_lost(anyio.current_time())
        try:
            await self.open()
        except BusConnectionError as problem:
            seconds = (
                None if self._schedule.has_permanent_refusal else self._schedule.reconnect_seconds
            )
            end = addresses.reconnect_failed_error(loss, problem, seconds)
            log.error("connection.abandoned", "{error}", error=end)
            self._end(end)
        else:
            log.info("connection.restored", "reconnected to {server}", server=self._endpoint)

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the tasks of the connection; `run` replaces it."""
        if self.writer.transport is not None:
            self.writer.transport = None
            self._lost_error = addresses.connection_lost_error(self._endpoint, error)
            self._connection_scope.cancel()

    def disown(self, end: BusConnectionError) -> None:
        """Close in a forked child, without waking tasks: they belong to the parent."""
        if self.end_error is None:
            self.end_error = end
            self.writer.free_until_bytes = 0
            self.writer.transport = None

    def _end(self, end: BusConnectionError) -> None:
        """Wake every caller with an error, because no other connection will be made."""
        if self.end_error is None:
            self.end_error = end
            self.writer.free_until_bytes = 0
            self.core.fail_requests(end)
            self.wake_answered()
            self.confirms.wake_all()
            self.deadlines.close()
            for wake in (self.changed.set, *self._on_arrival.values()):
                wake()

    # The tasks of a connection -------------------------------------------------------------------

    async def _run_reader(self, transport: Transport) -> None:
        """Receive frames until the connection ends."""
        error: Exception | None = None
        try:
            if isinstance(transport, SocketTransport):
                await self.event_loop.read_socket(
                    transport.socket,
                    partial(self._receive_now, transport),
                    has_unread=transport.has_unread,
                )
            else:
                while count := await transport.receive_into(self._buffer.writable):
                    self._receive(count)
        except (OSError, RemoteProtocolError) as lost:
            error = lost
        self.connection_lost(error)

    def _receive_now(self, transport: SocketTransport) -> ReadResult:
        """Read once, without waiting."""
        count = transport.receive_now(self._buffer.writable)
        if count is None:
            return ReadResult.WAIT
        if not count:
            return ReadResult.END
        self._receive(count)
        return ReadResult.READ_ON if transport.has_unread else ReadResult.WAIT

    def _receive(self, count: int) -> None:
        """Process the `count` bytes that were read, and wake the tasks that wait for them."""
        for inbox in self.core.receive(self._buffer, count, self.event_loop.current_time()):
            if inbox in self._on_arrival:
                self._on_arrival[inbox]()
        self._process_received()

    def _process_received(self) -> None:
        core = self.core
        if core.publish_buffer.has_refusals:
            self.confirms.update(core.confirmed_position, core.pop_refusals())
        elif self.confirms.has_waiters:
            self.confirms.update(core.confirmed_position, {})
        if self.pending_requests:
            self.wake_answered()
        if core.send_queue.has_queued:  # A confirm gave credit, or a request was queued.
            self.writer.write_now()
        self.changed.set()

    async def _run_ack_timer(self) -> None:
        """Send acks at intervals, because slow consumers rarely cause them to be written."""
        while True:
            if not self._has_unacked:
                await self._unacked_added.wait()
                continue
            await anyio.sleep(ACK_SECONDS)
            self._has_unacked = self.core.ack_processed()
            self.writer.write_now()

    async def _run_heartbeats(self) -> None:
        """Send heartbeats, and detect a bus that sends none."""
        while True:
            try:
                due = self.core.tick(anyio.current_time())
            except RemoteProtocolError as error:
                self.connection_lost(error)
                return
            self.writer.write_now()
            await anyio.sleep_until(due) if due < math.inf else await anyio.sleep_forever()

    # Subscriptions -------------------------------------------------------------------------------

    def add_inbox(self, inbox: Inbox, on_arrival: Callable[[], None]) -> None:
        """Register a subscription. `on_arrival` is called when messages have arrived or the
        subscription has ended.
        """
        self._on_arrival[inbox] = on_arrival
        self.writer.write_soon()

    def remove_inbox(self, inbox: Inbox) -> None:
        """Unregister a subscription that has ended."""
        on_arrival = self._on_arrival.pop(inbox, None)
        if on_arrival is not None:
            on_arrival()  # Another task may wait for messages of this subscription.
        self.writer.write_now()

    def start_ack_timer(self) -> None:
        """Start the ack timer, because a consumer received messages."""
        if not self._has_unacked:
            self._has_unacked = True
            self._unacked_added.set()

    def _on_manual_ack(self) -> None:
        self.check_thread()
        self.writer.write_due_acks()
        self.start_ack_timer()

    # The end -------------------------------------------------------------------------------------

    async def close(self, *, seconds: float, shield: bool) -> None:
        """Wait until everything is confirmed and the bus has closed the connection.

        If the client closed first, data could be lost: a socket that is closed with unread bytes
        resets the connection.
        """
        try:
            with anyio.move_on_after(seconds, shield=shield), suppress(BusConnectionError, OSError):
                await self.flush()
                self._is_last = True
                transport = self.writer.transport
                if transport is not None:
                    transport.send_eof()
                while transport is not None and self.writer.transport is transport:
                    await self.changed.wait()
        finally:
            self._run_scope.cancel()

    def unconfirmed_error(self) -> BusConnectionError | None:
        """Return an error if, after `close`, messages are not confirmed."""
        count = self.core.published_position - self.core.confirmed_position
        return (
            addresses.unconfirmed_error(
                count, self.end_error or addresses.connection_closed_error(self._endpoint)
            )
            if count
            else None
        )
